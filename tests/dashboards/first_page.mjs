// first_page: what a person sees on the first page of a server, as lines of JSON.
//
//   node first_page.mjs http://127.0.0.1:PORT/
//
// {"live":true} once the page is connected; then {"run","stage","head","step"},
// the texts of a row, whenever its stage or its head changes. Ends with its input.
import { openTelling } from './chromium.mjs';

const { browser, page, say } = await openTelling(process.argv[2]);
await page.evaluate(() => {
  const seen = new Map();
  const look = () => {
    for (const row of document.querySelectorAll('.runs tbody tr')) {
      if (!row.checkVisibility()) continue;
      const [run, stage, head, step] = ['a.row', '.at-stage', '.at-head', '.at-step'].map((part) => row.querySelector(part).innerText);
      if (seen.get(run) === stage + head) continue;
      seen.set(run, stage + head);
      globalThis.say({ run, stage, head, step });
    }
  };
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
  look();
});
say({ live: true });
process.stdin.resume();
process.stdin.once('end', () => browser.close());
