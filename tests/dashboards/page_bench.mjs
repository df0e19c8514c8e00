// How long the page's frames take while one scrubs through a million steps of
// 126 layers of 128 heads, walks over the heads by keyboard, and hovers them; then
// the same on the map of 10,275 parameters, whose values this program answers with.
//
//   node tests/dashboards/page_bench.mjs build/cpu/bin
//
// For each: the time between two frames beside that of the same page left alone
// (a headless Chromium draws without a GPU), the page's own work in its handlers,
// and what its main thread did in all for a frame: fetching, reading, painting and
// layout, which a machine that is busy otherwise lengthens least (the browser's
// long tasks are those above 50 ms). To compare two versions of the page run them
// in turn.
import { spawn } from 'node:child_process';
import { launch } from './chromium.mjs';
import { addTensors, tensorNames } from './tensor_run.mjs';

const [bin] = process.argv.slice(2);
const browser = await launch();
const child = spawn(`${bin}/console_test_server`, ['--scenario=huge', '--port=0']);
const { port } = JSON.parse(await new Promise((resolve) => child.stdout.once('data', (d) => resolve(String(d)))));
const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
await page.goto(`http://127.0.0.1:${port}/#/run/gpt2-small%2Fbf16-fa2`);
await page.waitForSelector('.chart canvas');
await page.waitForTimeout(1000);

const quantile = (sorted, q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];

const devtools = await page.context().newCDPSession(page);
await devtools.send('Performance.enable', { timeDomain: 'threadTicks' });
/** Milliseconds that the page's main thread has run so far. */
async function ran() {
  const { metrics } = await devtools.send('Performance.getMetrics');
  return 1000 * metrics.find((each) => each.name === 'TaskDuration').value;
}

/** Frames of the page while `act` goes on inside it, one act a frame. */
async function frames(act) {
  const before = await ran();
  const { gaps, work, long, asked } = await page.evaluate(async (name) => {
    const gaps = [], work = [];
    performance.clearResourceTimings();
    let long = 0;
    new PerformanceObserver((list) => { long += list.getEntries().length; }).observe({ type: 'longtask' });
    const slider = document.querySelector('input[type=range]');
    const grid = document.querySelector('[role=grid]');
    const canvas = grid.querySelector('canvas') ?? grid;
    grid.focus();
    const acts = {
      nothing: () => undefined,
      scrub: (i) => { slider.value = String(Math.round(Number(slider.max) * (i / 120))); slider.dispatchEvent(new Event('input', { bubbles: true })); },
      keys: (i) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: i % 2 ? 'ArrowRight' : 'ArrowDown', bubbles: true })),
      hover: (i) => {
        const box = canvas.getBoundingClientRect();
        canvas.dispatchEvent(new MouseEvent('mousemove', { clientX: box.left + (box.width * i) / 120, clientY: box.top + (box.height * i) / 120, bubbles: true }));
      },
    };
    let last = await new Promise(requestAnimationFrame);
    for (let i = 0; i < 120; ++i) {
      const began = performance.now();
      acts[name](i);
      work.push(performance.now() - began);
      const now = await new Promise(requestAnimationFrame);
      gaps.push(now - last);
      last = now;
    }
    return { gaps, work, long, asked: performance.getEntriesByType('resource').length };
  }, act);
  const busy = ((await ran()) - before) / gaps.length;
  gaps.sort((a, b) => a - b);
  work.sort((a, b) => a - b);
  const show = (all) => [0.5, 0.95, 0.99].map((q) => quantile(all, q).toFixed(1)).join(' / ');
  console.log(`${act.padEnd(8)} frames ${show(gaps)} ms, handlers ${show(work)} ms (p50 / p95 / p99), main thread ${busy.toFixed(1)} ms a frame, long tasks ${long}, ${asked} questions to the server`);
}

const acts = ['nothing', 'scrub', 'keys', 'hover'];
console.log('heads');
for (const act of acts) await frames(act);
const names = tensorNames(96, 100);
await addTensors(page, names);
await page.goto(`http://127.0.0.1:${port}/#/run/gpt2-small%2Fbf16-fa2?signal=tensor_grad_norm`);
await page.waitForSelector('h2:text-is("Every tensor")');
await page.waitForTimeout(3000);
console.log(`${names.length} parameters`);
for (const act of acts) await frames(act);
await page.unrouteAll({ behavior: 'ignoreErrors' });
await browser.close();
child.stdin.end();
