// A headless Chromium for the tests of the page.
import { existsSync } from 'node:fs';

/** A browser that asks nobody; ends the process with 77 where there is none, or where `npm ci` was not run. */
export async function launch() {
  const executablePath = ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'].find((path) => existsSync(path));
  if (!executablePath) {
    console.error('Chromium is not installed');
    process.exit(77);
  }
  let chromium;
  try {
    ({ chromium } = await import('playwright-core'));
  } catch {
    console.error('playwright-core is not installed: npm ci');
    process.exit(77);
  }
  return chromium.launch({ executablePath, args: ['--no-sandbox'], timeout: 120000 });
}

/**
 * The connected page of a server, and what prints a line of JSON: `say` here, and in the page `globalThis.say`.
 * @param {string} address
 */
export async function openTelling(address) {
  const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
  const browser = await launch();
  const page = await browser.newPage();
  page.setDefaultTimeout(120000);
  await page.exposeFunction('say', say);
  await page.goto(address);
  await page.waitForSelector('.conn.live');
  return { browser, page, say };
}
