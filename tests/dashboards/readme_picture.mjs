// readme_picture: the picture of the page in README.md, from a recorded run.
//
//   node readme_picture.mjs BIN      takes docs/images/run-page.webp anew, and the words on it
//
// bellwetherd of the folder BIN imports a recording and serves it; page_test.mjs compares the words that the page has
// for it today with those that were written down beside the picture. With BELLWETHER_PAGE the page is of that folder.
import { execFileSync, spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { fileURLToPath } from 'node:url';
import { launch } from './chromium.mjs';

const root = fileURLToPath(new URL('../..', import.meta.url));
const recording = 'tests/testdata/runs/gpt-live-flash-s4.bwrun';
export const picture = `${root}/docs/images/run-page.webp`;
const wordsFile = `${root}/docs/images/run-page.txt`;
const size = { width: 1200, height: 900 };

/** Of a picture that is committed. */
export function digest() {
  return createHash('sha256').update(readFileSync(picture)).digest('hex');
}

/** What was written down when the picture was taken. */
export function committed() {
  return readFileSync(wordsFile, 'utf8');
}

/** The page of the recorded run, once all of it is there, and what ends its server. */
export async function openRecorded(browser, bin) {
  const folder = mkdtempSync(`${tmpdir()}/bellwether-picture-`);
  const ready = `${folder}/ready.json`;
  const server = spawn(`${bin}/bellwetherd`, [`--storage.path=${folder}/data`, '--grpc.listen-address=127.0.0.1:0',
    '--web.listen-address=127.0.0.1:0', `--ready.file=${ready}`, '--gpu=off'], { stdio: 'ignore' });
  const stop = async () => {
    const ended = new Promise((resolve) => server.once('exit', resolve));
    server.kill('SIGTERM');
    await ended;
    rmSync(folder, { recursive: true });
  };
  for (let i = 0; i < 600 && !existsSync(ready); i++) await new Promise((resolve) => setTimeout(resolve, 100));
  const { grpc, http } = JSON.parse(readFileSync(ready, 'utf8'));
  execFileSync(`${bin}/bellwether`, ['--server', grpc, 'run', 'import', `${root}/${recording}`], { stdio: 'ignore' });
  const page = await browser.newPage({ viewport: size, colorScheme: 'light' });
  page.setDefaultTimeout(120000);
  await page.goto(`${http}/#/run/gpt-live-flash-s4`);
  await page.locator('.why li', { hasText: ', now ' }).first().waitFor();
  await page.waitForSelector('.chart canvas');
  await page.waitForTimeout(1000);
  return { page, stop };
}

/** What a person reads on the picture, less what passes with time. */
export async function wordsOf(page) {
  const lines = await page.evaluate(() => [...document.querySelectorAll('header nav, .title-row, .verdict, section[aria-label=Map] .panel-head h2, .legend-limit, .chart-title')]
    .filter((e) => e.getBoundingClientRect().top < innerHeight).flatMap((e) => e.innerText.split('\n')).map((line) => line.trim()).filter((line) => line !== ''));
  return lines.map((line) => line.replace(/(\d+ (s|min|h|d)\b ?)+ago|just now/g, 'some time ago')).join('\n');
}

async function take(bin) {
  const browser = await launch();
  const { page, stop } = await openRecorded(browser, bin);
  const png = (await page.screenshot()).toString('base64');
  const painter = await browser.newPage();
  const webp = await painter.evaluate(async (bytes) => {
    const image = new Image();
    image.src = `data:image/png;base64,${bytes}`;
    await image.decode();
    const canvas = Object.assign(document.createElement('canvas'), { width: image.width, height: image.height });
    canvas.getContext('2d').drawImage(image, 0, 0);
    return canvas.toDataURL('image/webp', 0.85).split(',')[1];
  }, png);
  writeFileSync(picture, Buffer.from(webp, 'base64'));
  writeFileSync(wordsFile, `run-page.webp, sha256 ${digest()}, of ${recording}\n\n${await wordsOf(page)}\n`);
  await browser.close();
  await stop();
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await take(process.argv[2]);
