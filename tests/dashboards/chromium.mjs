// A headless Chromium for the tests of the page.
import { existsSync, readFileSync } from 'node:fs';
import { basename } from 'node:path';

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
  const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'], timeout: 120000 });
  const folder = process.env.BELLWETHER_PAGE;
  return folder ? withBundle(browser, folder) : browser;
}

/** A browser whose pages have the bundle of a folder: what is changed is seen without building the server. */
function withBundle(browser, folder) {
  const open = browser.newPage.bind(browser);
  browser.newPage = async (options) => {
    const page = await open(options);
    await page.context().route(/\/(console\.js|console\.css)?(\?[^/]*)?$/, async (route) => {
      const name = basename(new URL(route.request().url()).pathname) || 'index.html';
      const response = await route.fetch({ maxRedirects: 0 }).catch(() => null);
      if (response === null) return route.abort();  // The server is gone.
      if (response.status() !== 200) return route.fulfill({ response });
      const { 'content-encoding': _, 'content-length': __, ...headers } = response.headers();
      return route.fulfill({ status: 200, headers, body: readFileSync(`${folder}/${name}`) });
    });
    return page;
  };
  return browser;
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
