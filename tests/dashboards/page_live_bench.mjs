// How long the page's frames take while a run of 10,275 parameters lives and a person
// drags its slider, beside the same of a run of 31 parameters of the same server: what the
// machine itself costs shows there, too.
//
//   node page_live_bench.mjs BIN [--rounds=3] [--seconds=10] [--python=PYTHON] [--page=FOLDER] [--trace=FILE]
//
// A real bellwetherd gets a sample of each run a second (live_tensors.py).  The page is that of
// the server, or of FOLDER as build.mjs writes it.  Rounds take the runs in turn.  For each: the
// time between two frames of the browser, and what the page's main thread ran for a frame, which a
// machine that is busy otherwise lengthens least.  FILE gets a trace of the last drag over the
// large run, as the browser's own tools read it.
import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { loadavg } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { launch } from './chromium.mjs';

const [bin, ...options] = process.argv.slice(2);
const option = (name, usual) => options.find((each) => each.startsWith(`--${name}=`))?.slice(name.length + 3) ?? usual;
const [rounds, seconds] = [Number(option('rounds', '3')), Number(option('seconds', '10'))];
const here = dirname(fileURLToPath(import.meta.url));
const python = option('python', join(here, '../../.venv/bin/python'));
const vsync = 1000 / 60;
/** Of the main thread: all, and what is of these. */
const parts = ['TaskDuration', 'ScriptDuration', 'LayoutDuration', 'RecalcStyleDuration'];

const server = spawn(python, [join(here, 'live_tensors.py'), bin], { stdio: ['pipe', 'pipe', 'inherit'] });
const { port } = JSON.parse(await new Promise((resolve) => server.stdout.once('data', (d) => resolve(String(d)))));
const browser = await launch();

/** A page of the run whose map is shown and that has its news from the server. */
async function open(run) {
  const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
  page.setDefaultTimeout(60000);
  const folder = option('page', '');
  for (const file of folder ? ['console.js', 'console.css'] : []) {
    await page.route(`**/${file}`, (route) => route.fulfill({ path: join(folder, file) }));
  }
  await page.goto(`http://127.0.0.1:${port}/#/run/${run}?signal=tensor_grad_norm`);
  await page.waitForSelector('.chart canvas');
  await page.waitForSelector('.conn.live');
  await page.waitForTimeout(1500);
  return page;
}

/** The times between frames, the steps that the map showed and the main thread's time, while `act` goes on. */
async function frames(page, devtools, act) {
  const ran = async () => {
    const { metrics } = await devtools.send('Performance.getMetrics');
    return parts.map((part) => 1000 * metrics.find((each) => each.name === part).value);
  };
  const before = await ran();
  await page.evaluate(() => {
    const seen = { gaps: [], steps: new Set(), long: 0, on: true };
    globalThis.seen = seen;
    new PerformanceObserver((list) => { seen.long += list.getEntries().length; }).observe({ type: 'longtask' });
    const text = document.querySelector('.step');
    let last = 0;
    const frame = (now) => {
      if (last > 0) seen.gaps.push(now - last);
      last = now;
      seen.steps.add(text.textContent);
      if (seen.on) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
  await act();
  const { gaps, steps, long } = await page.evaluate(() => {
    globalThis.seen.on = false;
    return { gaps: globalThis.seen.gaps, steps: globalThis.seen.steps.size, long: globalThis.seen.long };
  });
  return { gaps, steps, long, busy: (await ran()).map((each, i) => each - before[i]) };
}

const acts = {
  watched: (page) => page.waitForTimeout(1000 * seconds),
  dragged: async (page) => {
    const slider = page.locator('input[type=range]');
    await slider.scrollIntoViewIfNeeded();
    const box = await slider.boundingBox();
    const [left, width, y] = [box.x + 8, box.width - 16, box.y + box.height / 2];
    await page.mouse.move(left + width, y);
    await page.mouse.down();
    // There and back again in 4 s, as a hand does: each move is answered before the next.
    for (const begin = Date.now(), end = begin + 1000 * seconds; Date.now() < end;) {
      const phase = ((Date.now() - begin) / 4000) % 1;
      await page.mouse.move(left + width * Math.abs(1 - 2 * phase), y);
      await page.waitForTimeout(8);
    }
    await page.mouse.up();
  },
};

const found = new Map();
for (let round = 0; round < rounds; ++round) {
  for (const run of ['small', 'large']) {
    const page = await open(run);
    const devtools = await page.context().newCDPSession(page);
    await devtools.send('Performance.enable', { timeDomain: 'threadTicks' });
    for (const act of Object.keys(acts)) {
      const traced = option('trace', '') !== '' && run === 'large' && act === 'dragged' && round === rounds - 1;
      if (traced) await browser.startTracing(page);
      const one = await frames(page, devtools, () => acts[act](page));
      if (traced) writeFileSync(option('trace', ''), await browser.stopTracing());
      const all = found.get(`${run} ${act}`) ?? { gaps: [], steps: 0, long: 0, busy: parts.map(() => 0) };
      found.set(`${run} ${act}`, { gaps: [...all.gaps, ...one.gaps], steps: all.steps + one.steps, long: all.long + one.long, busy: all.busy.map((each, i) => each + one.busy[i]) });
    }
    await page.close();
  }
}
// Times have 0.1 ms; a frame that was missed makes a gap of two or more.
for (const [name, { gaps, steps, long, busy }] of found) {
  gaps.sort((a, b) => a - b);
  const at = (q) => gaps[Math.min(gaps.length - 1, Math.floor(q * gaps.length))].toFixed(1);
  const share = (100 * gaps.filter((gap) => gap < vsync + 0.15).length) / gaps.length;
  const sum = gaps.reduce((a, b) => a + b, 0);
  console.log(`${name.padEnd(14)} ${gaps.length} frames, ${((1000 * gaps.length) / sum).toFixed(1)} a second: ${at(0.5)} / ${at(0.99)} / ${at(1)} ms (p50 / p99 / most), ` +
    `${share.toFixed(1)} % within 16.7 ms, main thread ${busy.map((each) => (each / gaps.length).toFixed(2)).join(' / ')} ms a frame (all / script / layout / style), ${long} long tasks, ${steps} texts of the step`);
}
console.log(`load ${loadavg().map((each) => each.toFixed(1)).join(' ')}`);
await browser.close();
server.stdin.end();
