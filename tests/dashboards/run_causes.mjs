// run_causes: what a person is told of one run after the other, as lines of JSON.
//
//   node run_causes.mjs http://127.0.0.1:PORT/
//
// {"live":true} once the page is connected.  Each line of its input is the name of a run, whose page it opens.
// {"run","cause"} whenever the cause in the verdict changes; "" while no alert fires.  Ends with its input.
import { createInterface } from 'node:readline';
import { openTelling } from './chromium.mjs';

const { browser, page, say } = await openTelling(process.argv[2]);
await page.evaluate(() => {
  let said = '';
  const look = () => {
    const verdict = document.querySelector('.verdict');
    if (!verdict?.checkVisibility()) return;
    // Both are drawn at once; the address may already be that of the next run.
    const run = /^(?:\(\d\) )?(.*) · Bellwether$/.exec(document.title)?.[1];
    const cause = /cause: (.*)/.exec(verdict.innerText)?.[1] ?? '';
    if (said === `${run} ${cause}`) return;
    said = `${run} ${cause}`;
    globalThis.say({ run, cause });
  };
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
});
say({ live: true });
for await (const run of createInterface({ input: process.stdin })) {
  await page.evaluate((name) => { location.hash = `#/run/${encodeURIComponent(name)}`; }, run);
}
await browser.close();
