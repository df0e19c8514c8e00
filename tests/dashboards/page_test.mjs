// Goal: the page tells in one look which run, layer and head is ill, how badly
// and how long is left; it lives, works by keyboard, says so when the server is
// gone, asks nobody else, and a reader of screens can use it.
// Method: the test server and a headless Chromium; axe on every page. argv[2] is
// the folder of the binaries, argv[3] a folder for pictures (docs/console.md shows
// them; '' = none), argv[4] a part of the names of the checks that run. With BELLWETHER_PAGE the page is the bundle of
// that folder instead of the binary's. Exit code 77: no Chromium, or `npm ci` was not run here.
import { execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import assert from 'node:assert/strict';
import { launch } from './chromium.mjs';
import { committed, digest, openRecorded, wordsOf } from './readme_picture.mjs';
import { addEvidence, addPanels, addRanks, addTensors, tensorNames, valueAt } from './tensor_run.mjs';

const [bin, pictures, only] = process.argv.slice(2);
const browser = await launch();
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core'), 'utf8');

async function start(scenario, port = 0, options = []) {
  const child = spawn(`${bin}/console_test_server`, [`--scenario=${scenario}`, `--port=${port}`, ...options]);
  const line = await new Promise((resolve) => child.stdout.once('data', (d) => resolve(String(d))));
  return {
    port: JSON.parse(line).port,
    say: (text) => child.stdin.write(`${text}\n`),
    stop: () => new Promise((resolve) => { child.once('exit', resolve); child.stdin.end(); }),
  };
}

const faults = [];

async function open(server, hash, options = {}) {
  const page = await browser.newPage({ viewport: { width: 1440, height: 900 }, ...options });
  page.setDefaultTimeout(60000);
  page.on('pageerror', (e) => faults.push(`exception: ${e.message}`));
  page.on('console', (m) => /Content Security Policy/.test(m.text()) && faults.push(m.text()));
  page.on('request', (r) => r.url().startsWith(`http://127.0.0.1:${server.port}/`) || r.url().startsWith('blob:') || faults.push(`asks ${r.url()}`));
  await page.goto(`http://127.0.0.1:${server.port}/${hash}`);
  return page;
}

/** Breaches of WCAG AA that axe finds; evaluated outside the page's policy. */
async function breaches(page) {
  await page.evaluate(axe);
  const result = await page.evaluate(() => globalThis.axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa'] }));
  return result.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target).join(' ')}`);
}

/** What the window shows, or `part`. WebP: a quarter of what a PNG takes, painted by a page of its own, that has no policy. */
async function picture(page, name, part = page) {
  if (!pictures) return;
  await page.evaluate(() => scrollTo(0, 0));
  const png = (await part.screenshot()).toString('base64');
  const painter = await browser.newPage();
  const webp = await painter.evaluate(async (bytes) => {
    const image = new Image();
    image.src = `data:image/png;base64,${bytes}`;
    await image.decode();
    const canvas = Object.assign(document.createElement('canvas'), { width: image.width, height: image.height });
    canvas.getContext('2d').drawImage(image, 0, 0);
    return canvas.toDataURL('image/webp', 0.8).split(',')[1];
  }, png);
  await painter.close();
  writeFileSync(`${pictures}/${name}.webp`, Buffer.from(webp, 'base64'));
}

const checks = {
  async 'the list shows the worst run first'() {
    const server = await start('ill');
    const page = await open(server, '');
    await page.waitForSelector('.runs tbody tr');
    assert.match(await page.textContent('.runs tbody tr:first-child'), /gpt2-small\/bf16-fa2.*2 · ties and bias.*layer 1 head 0.*1,080/s);
    assert.deepEqual(await breaches(page), []);
    assert.deepEqual(await page.locator('.runs tbody tr', { has: page.locator('.badge', { hasText: /^imported$/ }) }).locator('th a').allTextContents(), ['gpt2-small/warmup-test']);
    await picture(page, 'runs');
    await page.click('.runs tbody tr:first-child a');
    await page.waitForSelector('.verdict');
    await server.stop();
  },

  async 'a partly judged run is not called healthy'() {
    const server = await start('partly');
    let page = await open(server, '');
    await page.waitForSelector('.runs tbody tr');
    const rows = await page.$$eval('.runs tbody tr', (all) => all.map((row) => row.textContent));
    const row = (name) => rows.find((text) => text.includes(name));
    assert.match(row('bf16-fa2'), /judged by: leak/);
    assert.doesNotMatch(row('bf16-fa2'), /healthy/);
    assert.match(row('fp32-control'), /healthy/);
    assert.match(row('first-steps'), /nothing found in 50 steps/);
    assert.doesNotMatch(row('first-steps'), /healthy/);
    assert.match(row('warmup-test'), /ended · judged by: loss/);
    const losses = await page.$$eval('.runs tbody tr', (all) => all.map((tr) => [tr.querySelector('th a').textContent, tr.cells[7].innerText.trim()]));
    assert.equal(Object.fromEntries(losses)['gpt2-small/bf16-fa2'], '–', 'this run has reported no loss');
    assert.match(Object.fromEntries(losses)['gpt2-small/fp32-control'], /^\d/);
    assert.deepEqual(await breaches(page), []);
    await page.close();
    page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.verdict');
    const verdict = await page.textContent('.verdict');
    await page.waitForSelector('#beside option:nth-child(2)', { state: 'attached' });
    const others = await page.locator('#beside option').allTextContents();
    for (const other of ['gpt2-small/fp32-control', 'gpt2-small/warmup-test · imported · judged by: loss']) assert.ok(others.includes(other), others);
    for (const part of [/^judged by: leak/, /no alert fires/, /Not judged, since its signals do not arrive: drift, ties, norm, logits, loss\./]) assert.match(verdict, part);
    assert.deepEqual(await breaches(page), []);
    await page.close();
    page = await open(server, '#/run/gpt2-small%2Ffirst-steps');
    await page.waitForSelector('.verdict.info');
    assert.match(await page.textContent('.verdict'), /^Nothing found in 50 steps.*no alert fires/);
    assert.deepEqual(await breaches(page), []);
    await server.stop();
  },

  async 'the list names missing servers and partitions'() {
    let server = await start('ill', 0, ['--absent=b:7070', '--unserved=3']);
    const page = await open(server, '');
    await page.waitForSelector('.missing:not([hidden])');
    const words = await page.textContent('.missing');
    assert.match(words, /^1 server of the cluster did not answer: its runs are missing here \(b:7070\)\./);
    assert.match(words, /3 partitions of the cluster are served by nobody just now: the runs there are missing here\.$/);
    assert.ok(await page.isVisible('.runs tbody tr'), 'what is known is shown');
    assert.deepEqual(await breaches(page), []);
    const { port } = server;
    await server.stop();
    // It goes as soon as all answer.
    server = await start('ill', port);
    await page.waitForSelector('.missing', { state: 'hidden' });
    await server.stop();
    // Where nothing is known, nothing is said of the cluster being new.
    server = await start('empty', 0, ['--absent=b:7070,c:7070']);
    const empty = await open(server, '');
    await empty.waitForSelector('text=2 servers of the cluster did not answer: their runs are missing here (b:7070, c:7070).');
    assert.equal(await empty.isVisible('text=No run has reported yet'), false);
    await server.stop();
  },

  async 'the verdict, the head and its series, in both themes'() {
    const server = await start('ill');
    for (const colorScheme of ['light', 'dark']) {
      const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2', { colorScheme });
      await page.waitForSelector('.chart canvas');
      const verdict = await page.textContent('.verdict');
      for (const part of [/warning/i, /layer 1 head 0/, /87\.6/, /threshold 4/, /1,080 steps/, /820 to 1,400/, /step 1,900/, /center_k/]) assert.match(verdict, part);
      // In time and by the clock: 1,800 steps ago, 1,080 to go, of 1.2 s each.
      assert.match(verdict, /about 21 min, until ([\w ]+ )?\d\d:\d\d/);
      // When people could first know, as the server keeps it: not reckoned from the step.
      assert.match(verdict, /step 1,900first told ([\w ]+ )?\d\d:\d\d, (just now|\d+ s ago)/);
      assert.match(await page.textContent('.alert .evidence'), /Siblings.*0\.31 to 1\.9 \(12\)/s);
      assert.match(await page.textContent('.alert .siblings'), /12 earlier healthy runs/);
      const titles = await page.$$eval('.chart-title', (all) => all.map((e) => e.textContent));
      assert.deepEqual(titles, ['Drift ratio', 'Key-gradient leak', 'Tied rows', 'Delta bias t', 'σ(W_Q)', 'Largest logit', 'Entropy ratio', 'Loss', 'Gradient norm']);
      assert.deepEqual(await breaches(page), []);
      await picture(page, `run-${colorScheme}`);
      await page.close();
    }
    await server.stop();
  },

  async 'the verdict has one button first, and says why'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    const verdict = page.locator('.verdict');
    await verdict.locator('.why li', { hasText: ", now " }).nth(2).waitFor();
    assert.deepEqual(await verdict.locator('button.primary').allTextContents(), ['Approve: centre the keys, layer 1']);
    assert.match(await verdict.locator('.cost').textContent(), /^Cost: up to 8 % of attention time/);
    const lines = await verdict.locator('.why li').allTextContents();
    assert.deepEqual(lines.map((line) => line.split(/ [\d.]/)[0]), ['Drift ratio', 'Key-gradient leak', 'Tied rows']);
    assert.match(lines[1], /^Key-gradient leak 0\.0081 when judged, now 0\.0\d+ · threshold 0\.0012 · healthy 4\.4e−4$/);
    assert.match(await verdict.textContent(), /stage 2 of 5: ties and bias · no damage yet/);
    // The rail: where it stands, and what comes.
    assert.deepEqual(await verdict.locator('.rail .stop').allTextContents(), ['1 drift', '2 ties and bias', '3 norm growth', '4 logits', '5 loss']);
    assert.equal(await verdict.locator('[aria-current=step]').textContent(), '2 ties and bias');
    assert.match(await verdict.locator('.rail li').nth(2).textContent(), /^harm begins here/);
    // The first sentence of the advice; the rest behind a word, that stays open.
    assert.match(await verdict.locator('.do > p').textContent(), /it stops the drift\.$/);
    assert.equal(await verdict.getByText('No work is lost yet.').isVisible(), false);
    await verdict.locator('.more summary').focus();
    await page.keyboard.press('Enter');
    server.say('step');
    await page.waitForFunction(() => /≈ 1,060 steps/.test(document.querySelector('.verdict').textContent));
    assert.ok(await verdict.getByText('No work is lost yet.').isVisible());
    assert.equal(await page.locator('section[aria-label=Alerts] .advice').count(), 0, 'advice is said once');
    assert.deepEqual(await breaches(page), []);
    await server.stop();
  },

  async 'recordings tell no time, centred keys no threshold'() {
    const server = await start('ill');
    const page = await open(server, '');
    const alter = (change) => page.route('**/api/v1/GetRun', async (route) => {
      const response = await route.fetch();
      const run = await response.json();
      await route.fulfill({ response, json: change(run) });
    });
    await alter((run) => ({ ...run, imported: true, ended: true, end_reason: 'finished' }));
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await page.waitForSelector('.chart canvas');
    const verdict = await page.textContent('.verdict');
    assert.match(verdict, /the run has ended.*step 1,900cause: rounding drift/s);
    assert.doesNotMatch(verdict, /about|ago/);
    assert.equal(await page.locator('.verdict button.primary').count(), 0, 'it is over');
    await page.unrouteAll({ behavior: 'wait' });
    await alter((run) => ({ ...run, description: { ...run.description, attention: { ...run.description.attention, centred: true } } }));
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Ffp32-control`);
    await page.waitForSelector('.legend-limit >> text=no threshold');
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'the verdict approves by keyboard under a name'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.locator('.verdict [data-focus=approve]').focus();
    await page.keyboard.press('Enter');
    await page.waitForSelector('#verdict-who');
    assert.equal(await page.evaluate(() => document.activeElement.id), 'verdict-who');
    await page.keyboard.press('Escape');
    assert.equal(await page.evaluate(() => document.activeElement.dataset.focus), 'approve');
    await page.keyboard.press('Enter');
    await page.keyboard.type('bob');
    server.say('step');  // News takes nothing away.
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    assert.equal(await page.inputValue('#verdict-who'), 'bob');
    assert.deepEqual(await breaches(page), []);
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => /approved at step 3,700 by bob/.test(document.body.textContent));
    // One illness goes on through its repair, of which the first screen tells.
    await page.waitForSelector('.verdict >> text=/Approved by bob, .*: centre the keys, layer 1\\. The trainer/');
    assert.deepEqual(await page.locator('.verdict button.primary').allTextContents(), []);
    server.say('apply');
    await page.reload();
    await page.waitForSelector('.verdict >> text=/Repair: centre the keys \\(layer 1\\): applied at step 3,700/');
    assert.match(await page.textContent('.verdict'), /layer 1 head 0.*step 1,900/s);
    await page.click('.verdict button:text-is("Acknowledge")');
    await page.waitForSelector('.verdict >> text=acknowledged by bob');
    await page.locator('.verdict .spans summary').focus();
    await page.keyboard.press('ArrowDown');  // Chooses nothing.
    await page.keyboard.press('Enter');
    await page.keyboard.press('Escape');
    assert.equal(await page.locator('.verdict .spans[open]').count(), 0);
    for (const key of ['Enter', 'Tab', 'Enter']) await page.keyboard.press(key);
    await page.waitForSelector('.verdict >> text=/silenced for another/');
    // What was pressed is gone; the keyboard stays in the verdict.
    await page.waitForSelector('.verdict .deeds:focus');
    await server.stop();
  },

  async 'a refused name says who may, and changes there'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.route('**/api/v1/ApproveAction', (route) => (route.request().postDataJSON().by === 'alice' ? route.continue() : route.fulfill({
      status: 403, contentType: 'application/json', body: `{"message":"${route.request().postDataJSON().by} is not among the policy's approvers: alice, oncall-*"}` })));
    await page.locator('.verdict [data-focus=approve]').click();
    await page.fill('#verdict-who', 'kim');
    await page.keyboard.press('Enter');
    await page.waitForSelector(".verdict-box .asking [role=alert]:text-is(\"Refused: kim is not among the policy's approvers: alice, oncall-*\")");
    assert.equal(await page.inputValue('#verdict-who:focus'), 'kim');
    assert.deepEqual(await breaches(page), []);
    // Without that it is shown, and changed, beside the buttons.
    await page.keyboard.press('Escape');
    await page.click('.verdict button:text-is("as kim")');
    await page.keyboard.type('lee');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.verdict button:text-is("as lee")');
    const actions = page.locator('section[aria-label=Actions]');
    await actions.getByRole('button', { name: 'Approve' }).click();
    await actions.locator('[role=alert]:has-text("lee is not among")').waitFor();
    await page.waitForSelector('#who:focus');
    await page.locator('.verdict [data-focus=approve]').click();
    await page.waitForSelector('.verdict-box .asking [role=alert]:has-text("lee is not among")');
    await page.keyboard.type('alice');
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => /approved at step 3,700 by alice/.test(document.body.textContent));
    await server.stop();
  },

  async 'a name is asked for once, above what it signs'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    const asked = [];
    page.on('request', (r) => /AcknowledgeAlert|SilenceAlert|MarkFalseAlarm/.test(r.url()) && asked.push(r.postDataJSON().by));
    /** The field stands above the button and is read before it. */
    const isAbove = (field, button) => page.evaluate(([a, b]) => {
      const [name, pressed] = [document.querySelector(a), document.querySelector(b)];
      return name.getBoundingClientRect().bottom <= pressed.getBoundingClientRect().top &&
        Boolean(name.compareDocumentPosition(pressed) & Node.DOCUMENT_POSITION_FOLLOWING);
    }, [field, button]);
    for (const [button, field] of [['.verdict [data-focus=approve]', '#verdict-who'], ['.verdict [data-focus=acknowledge]', '#verdict-who'],
      ['.alert.warning [data-focus^=acknowledge]', '#alerts-who'], ['.alert.warning [data-focus^=false-alarm]', '#alerts-who']]) {
      await page.locator(button).focus();
      await page.keyboard.press('Enter');
      await page.waitForSelector(`${field}:focus`);
      assert.ok(await isAbove(field, button), button);
      assert.deepEqual(await breaches(page), []);
      await page.keyboard.press('Escape');
      assert.ok(await page.evaluate((of) => document.activeElement === document.querySelector(of), button), `${button} has the keyboard again`);
    }
    // Not given, nothing is done.
    const silence = async () => {
      await page.click('.verdict .spans summary');
      await page.click('.verdict .spans button:text-is("1 hour")');
    };
    await silence();
    await page.waitForSelector('#verdict-who:focus');
    await page.keyboard.press('Escape');
    await page.waitForSelector('.verdict .spans:not([open]) summary:focus');
    assert.deepEqual(asked, []);
    await page.locator('.verdict [data-focus=acknowledge]').click();
    await page.keyboard.type('dana');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.verdict >> text=acknowledged by dana');
    // And kept: the others do not ask again.
    await silence();
    await page.waitForSelector('.verdict >> text=/silenced for another/');
    assert.deepEqual(asked, ['dana', 'dana']);
    assert.equal(await page.locator('.asking:visible').count(), 0);
    await server.stop();
  },

  async 'the verdict names the checkpoint to go back to'() {
    const server = await start('ill');
    const page = await open(server, '');
    let events = [];
    await page.route('**/api/v1/ListEvents', (route) => route.fulfill({ json: { events, total: String(events.length), next_after: '0' } }));
    await page.route('**/api/v1/ListAlerts', async (route) => {
      const response = await route.fetch();
      const answer = await response.json();
      for (const { last } of answer.alerts) {
        last.do_first = 'Stop, or go back to a checkpoint.';
        last.advice = `${last.do_first} Take the newest one from before step 1900. Then centre the keys.`;
      }
      await route.fulfill({ response, json: answer });
    });
    const says = async (words) => {
      await page.reload();
      await page.waitForFunction((all) => [...document.querySelectorAll('.verdict .do p')].some((p) => p.textContent === all), words);
    };
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await says('Checkpoint: the last one from before step 1,900.');
    const saved = (step, text) => ({ attempt: 0, step: String(step), kind: 'EVENT_KIND_CHECKPOINT_SAVED', value: 0, text, time_unix_ns: '1' });
    events = [saved(500, ''), saved(1800, 'runs/a/step-1800'), saved(1900, 'of the illness'), saved(3000, 'step 3000')];
    await says('Checkpoint: the last one from before step 1,900 was saved at step 1,800 (runs/a/step-1800).');
    events = [saved(1500, 'step 1500')];
    await says('Checkpoint: the last one from before step 1,900 was saved at step 1,500.');
    assert.deepEqual(await breaches(page), []);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await page.close();
    await server.stop();
  },

  async 'an action that the job forbids has no button'() {
    const server = await start('ill');
    const page = await open(server, '');
    await page.route('**/api/v1/ListActions', async (route) => {
      const response = await route.fetch();
      const answer = await response.json();
      for (const action of answer.actions) action.not_allowed = 'rank 0 did not allow it: attach(allow={"attention.center_k"})';
      await route.fulfill({ response, json: answer });
    });
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    const verdict = page.locator('.verdict');
    await verdict.locator('text=/^Cannot be approved: centre the keys, layer 1: rank 0 did not allow it: attach/').waitFor();
    assert.deepEqual(await verdict.locator('button.primary').allTextContents(), ['Acknowledge']);
    assert.equal(await page.locator('button:has-text("Approve")').count(), 0);
    assert.deepEqual(await breaches(page), []);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await page.close();
    await server.stop();
  },

  async 'the verdict links its runbook, in the page'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.click('.verdict a:has-text("Runbook BellwetherDriftGrowing")');
    await page.waitForSelector('h1:text-is("BellwetherDriftGrowing")');
    assert.deepEqual(await page.locator('main h2').allTextContents(), ['Meaning', 'Impact', 'Diagnosis', 'What to do']);
    assert.match(await page.textContent('pre'), /^bellwether run get gpt2-small\/bf16-fa2\n/);
    assert.ok((await page.locator('td strong').allTextContents()).some((words) => words.startsWith('Centre the keys')));
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'runbook');
    await page.click('a:has-text("Back to gpt2-small/bf16-fa2")');
    await page.waitForSelector('.verdict');
    await page.goto(`http://127.0.0.1:${server.port}/#/runbook/constructor`);
    await page.waitForSelector('h1:text-is("No such runbook")');
    await server.stop();
  },

  async 'words are explained by keyboard, touch and in the glossary'() {
    const server = await start('ill');
    const run = '#/run/gpt2-small%2Fbf16-fa2';
    const page = await open(server, run);
    await page.waitForSelector('.chart canvas');
    const box = page.locator('.term-box');
    // By keyboard: news that draw the verdict anew take neither the box nor the way back.
    const stage = page.locator('.verdict-stage button.term');
    assert.equal(await stage.getAttribute('aria-label'), 'What is “Stage”?');
    await stage.focus();
    await page.keyboard.press('Enter');
    assert.match(await box.textContent(), /^StageHow far an illness of rounding has come.*Harm begins with stage 3\./);
    assert.deepEqual(await breaches(page), []);
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    assert.ok(await box.isVisible());
    await page.keyboard.press('Escape');
    assert.equal(await box.count(), 0);
    assert.equal(await page.evaluate(() => document.activeElement.dataset.focus), 'term stage verdict');
    // One stop of Tab leads to all of a group, by arrows.
    const named = () => page.evaluate(() => document.activeElement.getAttribute('aria-label'));
    assert.equal(await page.locator('.verdict button.term[tabindex="0"]').count(), 1);
    await page.keyboard.press('ArrowRight');
    assert.equal(await named(), 'What is “Left”?');
    await page.keyboard.press('End');
    assert.equal(await named(), 'What is “Tied rows”?');
    await page.keyboard.press('Enter');
    assert.match(await box.textContent(), /^Tied rows/);
    await page.keyboard.press('Escape');
    assert.equal(await named(), 'What is “Tied rows”?');
    await page.keyboard.press('Home');
    assert.equal(await named(), 'What is “Stage”?');
    // Of a chart, a piece of evidence, a heading of its table.
    for (const [place, words] of [['.chart:first-child figcaption', /^Drift ratio.*judged against the median head/], ['.why li', /^Drift ratio/],
      ['.evidence th:has-text("Siblings")', /^SiblingsEarlier healthy runs/], ['.rail li:nth-child(2)', /^Ties/]]) {
      await page.locator(`${place} button.term`).first().click();
      assert.match(await box.textContent(), words, place);
    }
    await page.locator('h1').click();
    assert.equal(await box.count(), 0, 'a press elsewhere closes it');
    // On into the glossary, inside the page, and to the next word there.
    await page.locator('.verdict .facts button.term').first().click();
    await box.getByRole('link', { name: 'Glossary' }).click();
    await page.waitForSelector('h1:text-is("Glossary")');
    assert.equal(await box.count(), 0);
    assert.equal(await page.evaluate(() => document.activeElement.id), 'term-left');
    assert.deepEqual(await breaches(page), []);
    await page.locator('dd a[href="#/glossary/delta"]').click();
    await page.waitForFunction(() => document.activeElement.id === 'term-delta');
    await page.locator('dd a[href="#/runbook/bellwetherdriftgrowing"]').click();
    await page.waitForSelector('h1:text-is("BellwetherDriftGrowing")');
    await page.locator('a[href="#/glossary/common-mode"]').click();
    await page.waitForFunction(() => document.activeElement.id === 'term-common-mode');
    await page.goto(`http://127.0.0.1:${server.port}/#/glossary/constructor`);
    await page.waitForSelector('text=The glossary has no word “constructor”.');
    await page.close();
    // By touch, on a small screen: the box is inside the window.
    const small = await open(server, run, { viewport: { width: 390, height: 844 }, hasTouch: true });
    await small.waitForSelector('.chart canvas');
    for (const place of ['.verdict-stage', '.chart:last-child figcaption', '.rail li:last-child']) {
      await small.locator(`${place} button.term`).tap();
      const at = await small.locator('.term-box').boundingBox();
      assert.ok(at.x >= 0 && at.x + at.width <= 390, `${place}: ${JSON.stringify(at)}`);
    }
    await small.close();
    await server.stop();
  },

  async 'no page is wider than its window'() {
    const server = await start('ill');
    const pages = ['#/', '#/alerts', '#/status', '#/glossary', '#/glossary/ties', '#/run/gpt2-small%2Fbf16-fa2', '#/runbook/bellwetherdriftgrowing?run=gpt2-small%2Fbf16-fa2'];
    for (const width of [390, 768, 1440, 2560]) {
      const page = await open(server, '', { viewport: { width, height: 900 } });
      for (const hash of pages) {
        await page.goto(`http://127.0.0.1:${server.port}/${hash}`);
        await page.waitForSelector({ '#/': '.runs tbody tr', '#/alerts': '.runs tbody tr', '#/status': '.facts .fact' }[hash] ?? 'h1:has-text("ellwether"), h1:text-is("Glossary"), .chart canvas');
        if (hash.startsWith('#/run/')) await page.waitForSelector('.chart canvas');
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert.ok(wide <= 0, `${hash} at ${width}: ${wide} px too wide`);
      }
      await page.close();
    }
    await server.stop();
  },

  async 'every page and state is legible in the dark'() {
    const server = await start('ill');
    const [run, other] = ['#/run/gpt2-small%2Fbf16-fa2', 'gpt2-small%2Ffp32-control'];
    const altered = (change) => async (page) => page.route('**/api/v1/GetRun', async (route) => {
      const response = await route.fetch();
      await route.fulfill({ response, json: { ...(await response.json()), ...change } });
    });
    const states = {
      runs: ['#/', '.runs tbody tr'], alerts: ['#/alerts', '.runs tbody tr'], status: ['#/status', '.facts .fact'],
      runbook: ['#/runbook/bellwetherdriftgrowing?run=gpt2-small%2Fbf16-fa2', 'h1:text-is("BellwetherDriftGrowing")'],
      glossary: ['#/glossary/ties', '#term-ties'], run: [run, '.chart canvas'], compare: [`${run}?beside=${other}`, '.chart-legend >> text=beside it'],
      ended: [run, '.title-row >> text=finished', altered({ ended: true, end_reason: 'finished' })],
      imported: [run, '.title-row .badge:text-is("imported")', altered({ ended: true, imported: true, end_reason: 'finished' })],
      unknown: ['#/run/nobody', 'text=no run has this name'],
    };
    const legible = async (page, state) => {
      for (const width of [390, 768, 1400, 2560]) {
        await page.setViewportSize({ width, height: 900 });
        await page.waitForTimeout(150);  // Charts follow the window.
        assert.deepEqual(await breaches(page), [], `${state} at ${width}`);
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert.ok(wide <= 0, `${state} at ${width}: ${wide} px too wide`);
      }
    };
    for (const [state, [hash, sign, prepare]] of Object.entries(states)) {
      const page = await open(server, '', { colorScheme: 'dark' });
      await prepare?.(page);
      await page.goto(`http://127.0.0.1:${server.port}/${hash}`);
      await page.waitForSelector(sign);
      await legible(page, state);
      await page.unrouteAll({ behavior: 'ignoreErrors' });
      await page.close();
    }
    const pages = [];
    for (const hash of ['#/', run, '#/alerts', '#/status']) pages.push(await open(server, hash, { colorScheme: 'dark' }));
    await pages[1].waitForSelector('.chart canvas');
    for (const page of pages) await page.waitForSelector('.conn.live');
    await server.stop();
    for (const page of pages) {
      await page.waitForSelector('.banner:not([hidden])');
      await legible(page, 'disconnected');
      await page.close();
    }
    const empty = await start('empty');
    for (const [hash, sign] of [['#/', 'text=No run has reported yet'], ['#/alerts', 'text=/No alert/']]) {
      const page = await open(empty, hash, { colorScheme: 'dark' });
      await page.waitForSelector(sign);
      await legible(page, 'empty');
      await page.close();
    }
    await empty.stop();
  },

  async 'from an alert to its repair by keyboard alone'() {
    const server = await start('ill');
    const page = await open(server, '#/alerts');
    await page.waitForSelector('.runs tbody tr');
    await page.keyboard.press('j');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.verdict [data-focus=approve]');
    assert.match(page.url(), /#\/run\/gpt2-small%2Fbf16-fa2\?alert=/);
    const at = () => page.evaluate(() => document.activeElement.dataset.focus ?? document.activeElement.id);
    /** How many times Tab is pressed until it is there. */
    const tabsTo = async (wanted) => {
      let tabs = 0;
      for (; tabs < 60 && await at() !== wanted; tabs++) await page.keyboard.press('Tab');
      assert.equal(await at(), wanted, 'Tab leads there');
      return tabs;
    };
    assert.equal(await page.evaluate(() => document.activeElement.textContent.startsWith('gpt2-small/bf16-fa2')), true, 'the keyboard is at the title');
    assert.ok(await tabsTo('approve') <= 3);
    // From a link of a notification: by a key, or past the frame of the page.
    await page.reload();
    await page.waitForSelector('.verdict [data-focus=approve]');
    await page.keyboard.press('Tab');
    await page.keyboard.press('Tab');
    assert.equal(await page.evaluate(() => document.activeElement.textContent), 'Skip to what to do');
    assert.deepEqual(await breaches(page), []);
    await page.keyboard.press('Enter');
    assert.equal(await at(), 'approve');
    await page.reload();
    await page.waitForSelector('.verdict [data-focus=approve]');
    await page.keyboard.press('d');
    assert.equal(await at(), 'approve');
    await page.keyboard.press('Enter');
    assert.equal(await at(), 'verdict-who');
    await page.keyboard.type('carol');
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => /approved at step 3,700 by carol/.test(document.body.textContent));
    await page.waitForSelector('.verdict .under-way:focus >> text=Approved by carol');
    server.say('apply');
    server.say('step');
    await page.waitForFunction(() => /Repair: centre the keys \(layer 1\): applied at step 3,700/.test(document.querySelector('.verdict').textContent));
    await server.stop();
  },

  async 'numbers say whether they are of the alert or now'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.locator('.why li', { hasText: ', now ' }).nth(2).waitFor();
    for (const line of await page.locator('.why li').allTextContents()) assert.match(line, /^[\w -]+ [\d.]+ when judged, now [\d.]+ · threshold /);
    assert.deepEqual(await page.locator('.alert .evidence thead').first().locator('th').allTextContents(),
      ['Evidence', 'Where', 'When judged', 'Threshold', 'Healthy', 'Siblings', 'Since step']);
    assert.match(await page.locator('.alert summary').first().textContent(), /as of step 3,700, /);
    // Where the loss is lost nothing is left, and nothing says otherwise as of now.
    server.say('loss');
    await page.waitForFunction(() => /stage 5 of 5/.test(document.querySelector('.verdict')?.textContent ?? ''));
    assert.match(await page.locator('.verdict .facts').textContent(), /^Leftnone/);
    await server.stop();
  },

  async 'the shared cursor draws no horizontal line'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    const over = page.locator('.chart .u-over').first();
    await over.hover();
    await page.waitForSelector('.charts .tip');
    const shown = (name) => page.locator(name).evaluateAll((all) => all.filter((e) => e.checkVisibility() && e.clientWidth + e.offsetHeight > 0).length);
    assert.ok(await page.locator('.u-cursor-x').count() > 5, 'the check looks in the wrong place');
    assert.equal(await shown('.u-cursor-y'), 0);
    await server.stop();
  },

  async 'no label below a chart is cut at its edge'() {
    const server = await start('ill');
    for (const width of [390, 1400]) {
      const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2?from=0', { viewport: { width, height: 900 } });
      await page.waitForSelector('.zoom-bar >> text=the whole run');
      const strips = await page.locator('.chart canvas').evaluateAll((all) => all.map((canvas) => {
        const high = Math.round(20 * devicePixelRatio);
        const { data, width: wide } = canvas.getContext('2d').getImageData(0, canvas.height - high, canvas.width, high);
        let [words, edge] = [0, 0];
        for (let i = 3; i < data.length; i += 4) {
          if (data[i] < 60) continue;
          words += 1;
          edge += ((i - 3) / 4) % wide >= wide - 2;
        }
        return [words > 40, edge];
      }));
      assert.ok(strips.length > 5);
      for (const [hasWords, edge] of strips) assert.deepEqual([hasWords, edge], [true, 0], `at ${width}`);
      await page.close();
    }
    await server.stop();
  },

  async "the README's picture has the words of today"() {
    const { page, stop } = await openRecorded(browser, bin);
    const [head, ...words] = committed().split('\n');
    const renew = 'node tests/dashboards/readme_picture.mjs build/cpu/bin';
    assert.ok(head.includes(digest()), `the words are of another picture: ${renew}`);
    assert.equal(await wordsOf(page), words.join('\n').trim(), renew);
    await page.close();
    await stop();
  },

  async 'the time left is by seconds that the alert tells'() {
    const server = await start('ill');
    const page = await browser.newPage();
    let told = 2.5;
    await page.route('**/api/v1/ListAlerts', async (route) => {
      const response = await route.fetch();
      const answer = await response.json();
      for (const alert of answer.alerts) alert.last.eta.step_seconds = told;
      await route.fulfill({ response, json: answer });
    });
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await page.waitForSelector('.chart canvas');
    assert.match(await page.textContent('.verdict'), /820 to 1,400 · about 45 min/);
    // One of a server that does not tell it: 1.2 s a step, as the run has gone so far.
    told = 0;
    await page.reload();
    await page.waitForSelector('.chart canvas');
    assert.match(await page.textContent('.verdict'), /820 to 1,400 · about 21 min/);
    await page.unrouteAll({ behavior: 'ignoreErrors' });  // What is asked for again meanwhile has no answer.
    await page.close();
    await server.stop();
  },

  async 'charts begin at the illness, and zoom out'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    const asked = [];
    page.on('request', (r) => r.url().endsWith('/GetSeries') && asked.push(r.postDataJSON()));
    await page.waitForSelector('.zoom-bar button');
    // Since 1,900 and half as much before it, up to where it is expected to be lost.
    assert.match(await page.textContent('.zoom-bar'), /^steps 1,000 to 4,780/);
    assert.match(await page.textContent('.chart-legend'), /mean.*threshold.*alert began.*expected to be lost/);
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    while (!asked.some((body) => body.step_begin === '990' && body.step_end === '4781')) await page.waitForTimeout(50);  // So many points are of what is shown.
    await page.locator('[aria-label="Show the whole run"]').focus();
    await page.keyboard.press('Enter');
    await page.waitForSelector('.zoom-bar >> text=the whole run');
    assert.match(page.url(), /from=0/);
    while (!asked.some((body) => body.step_begin === '0' && body.step_end === '0')) await page.waitForTimeout(50);
    // A stretch that is drawn with the mouse is shown by all charts, and is in the address.
    const over = page.locator('.chart .u-over').nth(1);
    await over.scrollIntoViewIfNeeded();
    const box = await over.boundingBox();
    await page.mouse.move(box.x + box.width / 2, box.y + 40);
    await page.mouse.down();
    await page.mouse.move(box.x + 0.75 * box.width, box.y + 40, { steps: 4 });
    await page.mouse.up();
    await page.waitForFunction(() => /from=2\d\d\d&to=3\d\d\d/.test(location.hash));
    await page.waitForSelector('.zoom-bar >> text=/steps 2,\\d+ to 3,\\d+/');
    for (const name of ['Zoom in', 'Zoom out', 'Show the steps of the illness']) {
      await page.locator(`[aria-label="${name}"]`).focus();
      const before = page.url();
      await page.keyboard.press('Enter');
      await page.waitForFunction((url) => location.href !== url, before);
      await page.waitForTimeout(300);
    }
    await page.waitForSelector('.zoom-bar >> text=/steps 990 to 4,780/');
    assert.deepEqual(await breaches(page), []);
    await server.stop();
  },

  async 'the mouse tells signal, unit, threshold and marker'() {
    const server = await start('ill');
    const page = await open(server, '');
    await page.route('**/api/v1/ListEvents', (route) => route.fulfill({ json: { events: [
      { attempt: 0, step: '3000', kind: 'EVENT_KIND_LEARNING_RATE', value: 3e-4, text: '', time_unix_ns: '1' },
      { attempt: 0, step: '3100', kind: 'EVENT_KIND_CHECKPOINT_SAVED', value: 0, text: '', time_unix_ns: '1' },
    ], total: '2', next_after: '0' } }));
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await page.waitForSelector('.chart-legend >> text=event');
    const hover = async (chart, step) => {  // The window is 1,000 to 4,780.
      const over = page.locator('.chart', { hasText: chart }).locator('.u-over');
      await over.scrollIntoViewIfNeeded();
      const box = await over.boundingBox();
      await page.mouse.move(box.x + ((step - 1000) / 3780) * box.width, box.y + 50, { steps: 2 });
      await page.waitForSelector('.charts .tip');
      return page.textContent('.charts .tip');
    };
    assert.match(await hover('Drift ratio', 1900), /^Drift ratio [\d.]+ · threshold 4 · step 1,(8[89]|9[01])\d · alert: drift$/);
    assert.match(await hover('Largest logit', 3000), /^Largest logit [\d.]+ logits · step (2,9[89]|3,0[01])\d · learning rate 3\.0e−4$/);
    assert.equal(await page.locator('.charts .tip').count(), 1, 'in one chart only');
    // The cursor is a vertical line in all charts, and no horizontal one.
    assert.equal(await page.locator('.u-cursor-y').evaluateAll((all) => all.filter((e) => e.checkVisibility() && e.clientWidth > 0).length), 0);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'warm cells are beyond the threshold, at all steps'() {
    const warm = (page) => page.locator('section[aria-label=Map] .heat-grid canvas').evaluate((canvas) => {
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;  // Pixels that are red rather than blue, without rings, which are darker.
      for (let i = 0; i < data.length; i += 4) found += data[i + 3] > 200 && data[i] - data[i + 2] > 60 && data[i + 1] > 40;
      return found;
    });
    let server = await start('healthy');
    let page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.worst tbody tr');
    assert.equal(await warm(page), 0, 'nothing is warm in a healthy run');
    assert.match(await page.textContent('.legend-limit'), /^warm: beyond 4\.\d+, the threshold$/);  // Four times the median head.
    await page.selectOption('#signal', 'key_leak');
    await page.waitForSelector('.legend-limit >> text=no threshold');
    assert.equal(await warm(page), 0);
    await page.close();
    await server.stop();
    server = await start('ill');
    page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.worst tbody tr');
    assert.equal(await page.textContent('.legend-limit'), 'warm: beyond 4, the threshold');
    assert.ok(await warm(page) > 300, 'the failing head is');
    const ticks = await page.textContent('.legend-ticks');
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2?step=1000`);
    await page.waitForFunction(() => document.querySelector('.step').textContent === 'step 1,000');
    assert.equal(await page.textContent('.legend-ticks'), ticks, 'one scale for all steps');
    assert.ok(await warm(page) < 100, 'before it drifts it is cool');
    await server.stop();
  },

  async 'the map begins with the signal of the alert'() {
    const server = await start('ill');
    const page = await open(server, '');
    await page.route('**/api/v1/ListAlerts', async (route) => {
      const response = await route.fetch();
      const answer = await response.json();
      for (const alert of answer.alerts) alert.last.evidence.shift();
      await route.fulfill({ response, json: answer });
    });
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await page.waitForSelector('.worst >> text=Key-gradient leak');
    assert.equal(await page.inputValue('#signal'), 'key_leak');
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'a link restores its view; keys reach every head'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2?signal=wq_sigma&layer=3&head=4&step=2600');
    await page.waitForFunction(() => document.querySelector('.step')?.textContent === 'step 2,600');
    assert.equal(await page.inputValue('#signal'), 'wq_sigma');
    assert.equal(await page.inputValue('input[type=range]'), '2597');  // The slider's nearest notch.
    assert.match(await page.textContent('#heat-cell'), /^layer 3, head 4: /);
    await page.focus('[role=grid]');
    for (const key of ['ArrowRight', 'ArrowDown', 'ArrowDown', 'Home']) await page.keyboard.press(key);
    assert.match(await page.textContent('#heat-cell'), /^layer 5, head 0: /);
    // What comes meanwhile does not take the keyboard away; series are asked for behind the heads.
    const behind = page.waitForRequest((r) => r.url().endsWith('/GetSeries'));
    server.say('step');
    await behind;
    assert.match(await page.textContent('#heat-cell'), /^layer 5, head 0: /);
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => /Layer 5 head 0/.test(document.body.textContent));
    assert.match(page.url(), /layer=5&head=0&step=2600/);
    await server.stop();
  },

  async 'parameters are a map of blocks and columns'() {
    const server = await start('healthy');
    const page = await open(server, '');
    const names = tensorNames(4, 3);
    await addTensors(page, names);
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2?signal=tensor_grad_norm`);
    await page.waitForSelector('h2:text-is("Every tensor")');
    assert.deepEqual(await page.$$eval('#signal optgroup', (all) => all.map((group) => group.label)), ['Heads', 'Tensors', 'Experts', "The job's own"]);
    assert.equal(await page.getAttribute('[role=grid]', 'aria-rowcount'), '6');  // The embedding, four blocks, norm and lm_head.
    assert.equal(await page.getAttribute('[role=grid]', 'aria-colcount'), '10');
    const cell = page.locator('#heat-cell');
    await page.focus('[role=grid]');
    for (const key of ['PageUp', 'Home']) await page.keyboard.press(key);
    assert.match(await cell.textContent(), /^model\.embed_tokens\.weight: /);
    await page.keyboard.press('ArrowRight');
    assert.equal(await cell.textContent(), 'nothing');
    for (const key of ['ArrowDown', 'ArrowDown', 'ArrowRight']) await page.keyboard.press(key);
    assert.match(await cell.textContent(), /^model\.layers\.1\.self_attn\.v_proj\.weight: /);
    await page.keyboard.press('Home');
    await page.keyboard.press('ArrowUp');
    assert.equal(await cell.textContent(), 'model.layers.0.self_attn.q_proj.weight: 0');  // A zero is a value on a logarithmic scale.
    // The mouse: what lies under it is named, and a click opens its series.
    const row = names.indexOf('model.layers.2.mlp.experts.1.up_proj.weight');
    const places = await page.locator('section[aria-label=Map] .heat-grid canvas').boundingBox();
    const [high, wide] = [Math.min(30, (places.width - 38) / 10 * 0.75), Math.min(60, (places.width - 38) / 10)];
    const [x, y] = [places.x + 34 + 8.5 * wide, places.y + places.height - 4 - 2.5 * high];
    await page.mouse.move(x, y);
    assert.match(await page.textContent('.tip'), new RegExp(`^model\\.layers\\.2\\.mlp\\.experts\\.1\\.up_proj\\.weight: ${Number(valueAt('tensor_grad_norm', row, 3700).toPrecision(3))}$`));
    await page.mouse.click(x, y);
    await page.waitForSelector(`h2:has-text("${names[row]}")`);
    assert.match(page.url(), /row=model\.layers\.2\.mlp\.experts\.1\.up_proj\.weight/);
    const titles = await page.$$eval('.chart-title', (all) => all.map((e) => e.textContent));
    assert.deepEqual(titles, ['Gradient norm', 'Largest gradient', 'Update ratio', 'Second-moment lag', 'Loss', 'Gradient norm']);
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'map');
    const [download] = await Promise.all([page.waitForEvent('download'), page.click('[aria-label="The map as CSV"]')]);
    const csv = readFileSync(await download.path(), 'utf8').trim().split('\n');
    assert.equal(csv.length, 1 + names.length);
    assert.equal(csv[0], 'tensor,tensor_grad_norm');
    // Another of the same kind keeps the row, one of heads does not.
    await page.selectOption('#signal', 'tensor_moment_lag');
    await page.waitForFunction(() => document.querySelectorAll('.legend-ticks span')[1].textContent === '1');  // Its anchor.
    assert.match(page.url(), /row=/);
    await page.selectOption('#signal', 'drift_ratio');
    await page.waitForSelector('h2:has-text("Layer")');
    assert.doesNotMatch(page.url(), /row=/);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'tensors that take turns are shown together'() {
    const server = await start('ill');
    const page = await open(server, '');
    const names = tensorNames(4, 3);
    const answers = await addTensors(page, names);
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2?signal=tensor_update_ratio`);
    const measured = async () => {
      const [download] = await Promise.all([page.waitForEvent('download'), page.click('[aria-label="The map as CSV"]')]);
      return readFileSync(await download.path(), 'utf8').trim().split('\n').filter((line) => !line.endsWith('NaN')).length - 1;
    };
    await page.waitForSelector('.worst tbody tr');
    while (await measured() < names.length) await page.waitForTimeout(100);
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    assert.equal(await measured(), names.length, 'a new sample hides none');
    const earlier = answers.asked.filter((step) => step >= 0);
    assert.equal(earlier.length, 24);
    assert.equal(new Set(earlier).size, earlier.length, 'no earlier sample is asked for twice');
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'experts have a map; a missing tensor has no series'() {
    const server = await start('healthy');
    const page = await open(server, '');
    const run = `http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`;
    await addTensors(page, tensorNames(4, 3));
    await page.goto(`${run}?signal=load`);
    await page.waitForSelector('h2:has-text("Layer 3 expert 7")');  // The largest.
    assert.equal(await page.textContent('.help'), 'Share of the tokens.');
    await page.waitForSelector('.chart-title:text-is("load")');
    await page.click('[aria-label="Show layer 3 expert 5"]');
    await page.waitForSelector('h2:has-text("Layer 3 expert 5")');
    assert.match(page.url(), /signal=load&layer=3&head=5/);
    assert.deepEqual(await breaches(page), []);
    await page.goto(`${run}?signal=expert_share`);
    await page.waitForSelector('h2:has-text("Layer 2 expert 5")');
    const titles = await page.$$eval('.chart-title', (all) => all.map((e) => e.textContent));
    assert.deepEqual(titles, ['Load of experts', 'Entropy of the router', 'Loss', 'Gradient norm']);
    await page.goto(`${run}?signal=tensor_grad_norm&row=no.such.weight`);
    await page.waitForSelector('text=No samples yet.');
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'alerts ring the parameters and experts that they name'() {
    const server = await start('ill');
    const page = await open(server, '');
    const names = tensorNames(4, 3);
    await addTensors(page, names);
    await addEvidence(page, [
      { signal: 'tensor_moved', layer: -1, head: -1, text: `${names[0]}, ${names[1]}` },
      { signal: 'expert_load', layer: 2, head: 5, text: '' },
    ]);
    const run = `http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`;
    const cell = page.locator('#heat-cell');
    await page.goto(`${run}?signal=tensor_grad_norm`);
    await page.waitForSelector('h2:text-is("Every tensor")');
    await page.waitForSelector('.worst tbody tr');
    await page.focus('[role=grid]');
    for (const key of ['PageUp', 'Home']) await page.keyboard.press(key);
    assert.match(await cell.textContent(), /^model\.embed_tokens\.weight: .*, alert$/);
    await page.keyboard.press('ArrowDown');
    assert.match(await cell.textContent(), /^model\.layers\.0\.self_attn\.q_proj\.weight: .*, alert$/);
    await page.keyboard.press('ArrowRight');
    assert.doesNotMatch(await cell.textContent(), /alert/);
    await page.goto(`${run}?signal=expert_share`);
    await page.waitForSelector('h2:has-text("Layer 2 expert 5")');
    await page.focus('[role=grid]');
    assert.match(await cell.textContent(), /^layer 2, expert 5: 4, alert$/);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'panels show optimizer, experts, sequences and rewards'() {
    const server = await start('ill');
    const page = await open(server, '');
    await addPanels(page);
    await addEvidence(page, [
      { signal: 'moment_lag_max', layer: -1, head: -1, text: '', threshold: 2.3 },
      { signal: 'expert_load', layer: 2, head: 3, text: '' },
    ]);
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await page.waitForSelector('.largest tbody tr');
    const panel = (name) => page.locator(`section[aria-label="${name}"]`);
    const titles = (name) => panel(name).locator('.chart-title').allTextContents();
    assert.deepEqual(await titles('Optimizer and steps'), ['Second-moment lag', 'Saturated gradients', 'Skipped steps', 'Clipped to', 'Gradient norm',
      'Loss scale', 'Share of waiting for data', 'Forward, seconds', 'Memory, at most']);
    assert.match(await panel('Optimizer and steps').locator('figure', { hasText: 'Memory, at most' }).textContent(), /\d\d(\.\d)? GiB/);
    assert.deepEqual(await titles('Losses of sequences'), ['Largest loss of a sequence', 'Mean loss of a sequence', 'Repeated labels']);
    assert.deepEqual(await page.$$eval('.largest td', (all) => all.map((e) => e.textContent)), ['11.25', '9af03c5512d07be4', '4.31', 'a book, page 7', 'nan', 'no id']);
    assert.match(await page.textContent('.largest caption'), /step 3,660/);
    assert.deepEqual(await titles('Reinforcement learning'), ['reward', 'kl', 'policy_entropy', 'actor/pg_clipfrac']);
    const notes = await panel('Reinforcement learning').locator('figcaption .muted.small').allTextContents();
    assert.deepEqual(notes, ['at least -1 · a fall is told', 'at most 0.5 · a rise is told', 'a fall is told', 'at least 0 · at most 1 · a rise is told']);
    assert.ok((await titles('What is chosen')).includes('queue_depth'), 'other own signals stay where they were');
    assert.ok(!(await titles('What is chosen')).includes('reward'), 'nothing is drawn twice');
    // Thresholds and limits are lines in the colour of a warning.
    const lines = (name) => panel(name).locator('canvas').evaluateAll((all) => all.map((canvas) => {
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;
      const near = (i, value) => Math.abs(data[i] - value) < 25;
      for (let i = 0; i < data.length; i += 4) found += near(i, 0xa3) && near(i + 1, 0x5c) && near(i + 2, 0) && data[i + 3] > 60;
      return found > 40;
    }));
    assert.deepEqual(await lines('Optimizer and steps'), [true, false, false, false, false, false, false, false, false]);
    assert.deepEqual(await lines('Reinforcement learning'), [false, true, false, false]);
    // What is beyond a threshold is warm, as on the map: the band of a chart, its value, a cell of the table, an expert.
    const late = (name) => panel(name).locator('figure', { has: page.locator('.chart-now.late') }).locator('.chart-title').allTextContents();
    assert.deepEqual(await late('Reinforcement learning'), ['kl'], 'above the 0.5 that the job has declared');
    assert.match(await panel('Reinforcement learning').locator('.chart-legend').textContent(), /threshold.*beyond it/);
    assert.equal(await panel('Experts').locator('.legend-limit').textContent(), 'warm: below 0.1, the threshold');
    assert.deepEqual(await panel('Experts').locator('td.late').allTextContents(), ['0', '1'], 'the dead expert of layer 2');
    const rows = await page.$$eval('.layers tbody tr', (all) => all.map((row) => [...row.children].map((cell) => cell.textContent)));
    assert.deepEqual(rows, [['0', '1.1', '0.9', '0', '0.9', '10'], ['2', '3.5', '0', '1', '0.7', '12'], ['3', '1.1', '0.9', '0', '0.6', '13']]);
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'experts', panel('Experts'));
    await picture(page, 'optimizer', panel('Optimizer and steps'));
    await picture(page, 'learning', panel('Reinforcement learning'));
    // The map of experts goes by keyboard, and its choice is drawn as any other.
    const cell = page.locator('#expert-cell');
    await panel('Experts').locator('[role=grid]').focus();
    for (const key of ['PageUp', 'ArrowDown', 'ArrowDown', 'Home', 'ArrowRight', 'ArrowRight', 'ArrowRight']) await page.keyboard.press(key);
    assert.equal(await cell.textContent(), 'layer 2, expert 3: 0, alert');
    await page.keyboard.press('Enter');
    await page.waitForSelector('h2:has-text("Layer 2 expert 3")');
    await page.click('[aria-label="Show the busiest expert of layer 2"]');
    await page.waitForSelector('h2:has-text("Layer 2 expert 6")');
    assert.match(page.url(), /signal=expert_share&layer=2&head=6/);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'ranks that stand out of thousands are named'() {
    const server = await start('ill');
    const page = await open(server, '');
    const asked = await addRanks(page, 4096);
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    const panel = page.locator('section[aria-label="Gradients of single ranks"]');
    await panel.locator('.chart canvas').nth(2).waitFor();
    assert.match(await panel.locator('h2').textContent(), /step 3,700: 4,095 ranks, median 1\.02/);
    assert.equal(await panel.locator('p').textContent(), 'No number: rank 7.');
    const rows = await panel.locator('tbody tr').allTextContents();
    assert.equal(rows.length, 6, 'a few of 4,096');
    assert.match(rows[0], /^rank 9/);
    assert.match(rows[1], /^rank 5.*of/);
    const far = (await panel.locator('td:last-child').allTextContents()).map((text) => text.split(' of ').map(Number));
    const [[nine, all], [five], [other]] = far;
    assert.deepEqual([nine, other], [all, 0], 'rank 9 always was');
    assert.ok(five > 0 && five < all / 3, 'rank 5 is so since step 3,000');
    assert.deepEqual(await panel.locator('.chart-title').allTextContents(), ['Median of all ranks', 'Rank 9', 'Rank 5']);
    assert.ok(asked.matrices.length <= 40, `${asked.matrices.length} samples of all ranks`);
    assert.deepEqual([...new Set(asked.series)], ['9,5']);
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'ranks', panel);
    // The past is not asked for again.
    const before = asked.matrices.length;
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    await page.waitForTimeout(1000);
    assert.ok(asked.matrices.length - before <= 4, `${asked.matrices.length - before} more`);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'a run without such signals has no such panels'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    const asked = [];
    page.on('request', (r) => asked.push(r.url().split('/').pop()));
    await page.waitForSelector('.chart canvas');
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    for (const name of ['Gradients of single ranks', 'Optimizer and steps', 'Experts', 'Losses of sequences', 'Reinforcement learning']) {
      assert.equal(await page.isVisible(`section[aria-label="${name}"]`), false, name);
    }
    assert.ok(asked.filter((name) => name === 'ListEvents').length <= 1, 'events are asked for rarely');
    await server.stop();
  },

  async '10,000 parameters are displayed'() {
    const server = await start('healthy');
    const page = await open(server, '');
    const names = tensorNames(96, 100);
    assert.ok(names.length > 10000);
    await addTensors(page, names, (run) => ({ ...run, description: { ...run.description, layout: { ...run.description.layout, layers: 0, heads: 0 } } }));
    // A run without attention begins with its parameters.
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await page.waitForSelector('h2:has-text("lm_head.weight")');
    assert.equal(await page.getAttribute('[role=grid]', 'aria-rowcount'), '98');
    await page.focus('[role=grid]');
    for (const key of ['ArrowUp', 'ArrowRight']) await page.keyboard.press(key);
    assert.match(await page.textContent('#heat-cell'), /^model\.layers\.95\./);
    await picture(page, 'map-huge');
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'alerts of all runs: filters, keys, an owner'() {
    const server = await start('ill');
    const page = await open(server, '#/alerts');
    await page.waitForSelector('.conn.live');
    await page.waitForSelector('.runs >> text=centre the keys, layer 1');  // What waits for a word.
    const row = await page.textContent('.runs tbody tr');
    for (const part of [/^warning/, /gpt2-small\/bf16-fa2/, /drift in layer 1 head 0, stage 2 of 5: ties and bias/, /cause: rounding drift/,
      /step 1,900first told .*(just now|s ago)/, /≈ 1,080 steps.*about 21 min, until/, /Acknowledge/]) assert.match(row, part);
    assert.equal(await page.title(), 'Alerts · Bellwether');
    assert.equal(await page.getAttribute('nav a:has-text("Alerts")', 'aria-current'), 'page');
    server.say('alert');
    await page.waitForFunction(() => document.querySelectorAll('.runs tbody tr').length === 2);
    const severities = () => page.locator('.runs tbody .badge').allTextContents();
    assert.deepEqual(await severities(), ['critical', 'warning'], 'the worst first');
    assert.match(await page.textContent('.title-row'), /2 firing, 2 unacknowledged/);
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'alerts');
    // By keyboard: to a row, and on it.
    for (const key of ['j', 'j', 'k']) await page.keyboard.press(key);
    await page.keyboard.press('a');
    await page.waitForSelector('#alerts-who:focus');
    assert.deepEqual(await breaches(page), []);
    await page.keyboard.type('erin');
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => /1 unacknowledged/.test(document.querySelector('.title-row').textContent));
    assert.match(await page.textContent('.runs tbody tr:has-text("critical")'), /erin/);
    assert.equal(await page.evaluate(() => document.activeElement.className), 'row', 'the keyboard stays');
    // Filters stand in the address, and do not take the keyboard away.
    await page.focus('#only-unacknowledged');
    await page.keyboard.press('Space');
    await page.waitForFunction(() => document.querySelectorAll('.runs tbody tr').length === 1);
    assert.match(page.url(), /#\/alerts\?unacknowledged=1$/);
    assert.equal(await page.evaluate(() => document.activeElement.id), 'only-unacknowledged');
    await page.selectOption('#least-severity', 'critical');
    await page.waitForSelector('text=No alert is left by these filters.');
    assert.deepEqual(await breaches(page), []);
    await page.goto(`http://127.0.0.1:${server.port}/#/alerts?severity=critical`);
    await page.waitForFunction(() => document.querySelectorAll('.runs tbody tr').length === 1);
    assert.deepEqual(await severities(), ['critical']);
    await page.keyboard.press('?');
    await page.waitForSelector('dialog[open] >> text=acknowledge the alert of the row');
    assert.deepEqual(await breaches(page), []);
    await page.keyboard.press('Escape');
    await page.waitForSelector('dialog[open]', { state: 'detached' });
    await page.evaluate(() => document.activeElement.blur());
    await page.keyboard.press('j');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.verdict');
    assert.match(page.url(), /#\/run\/gpt2-small%2Fbf16-fa2\?alert=/);
    await server.stop();
  },

  async 'the runs are sorted and filtered by the address'() {
    const server = await start('ill');
    const page = await open(server, '');
    const names = () => page.locator('.runs tbody a.row').allTextContents();
    await page.waitForSelector('.runs tbody tr');
    const first = page.locator('.runs tbody tr').first();
    assert.match(await first.textContent(), /1,900(just now|\d+ s ago)≈ 1,080about 21 min/);
    // A course of what the alert is about, or of the loss, where it can be seen.
    await page.waitForSelector('.spark[aria-label^="Drift ratio from"]');
    await page.waitForFunction(() => document.querySelectorAll('.spark[aria-label^="Loss from"]').length === 3);
    assert.match(await page.locator('.runs tr:has-text("warmup-test")').getAttribute('class'), /^ended$/);
    await page.click('th button:has-text("Step"):not(:has-text("left"))');
    await page.waitForFunction(() => /sort=step$/.test(location.hash));
    assert.equal((await names())[0], 'gpt2-small/warmup-test');
    await page.locator('[data-focus="sort step"]').focus();
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => /sort=step&down=1$/.test(location.hash));
    assert.equal((await names())[0], 'llama-1b/sweep-lr-3e-4');
    assert.equal(await page.getAttribute('th[aria-sort]', 'aria-sort'), 'descending');
    assert.equal(await page.evaluate(() => document.activeElement.dataset.focus), 'sort step', 'the keyboard stays');
    assert.deepEqual(await breaches(page), []);
    await page.check('#firing-runs');
    await page.waitForFunction(() => document.querySelectorAll('.runs tbody tr').length === 1);
    await page.goto(`http://127.0.0.1:${server.port}/#/?name=llama`);
    await page.reload();
    await page.waitForSelector('.runs tbody tr');
    assert.deepEqual(await names(), ['llama-1b/sweep-lr-3e-4']);
    await page.evaluate(() => document.activeElement.blur());
    await page.keyboard.press('j');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.verdict');
    await server.stop();
  },

  async 'an empty list gives lines with its address'() {
    const server = await start('empty');
    const page = await open(server, '');
    await page.context().grantPermissions(['clipboard-read', 'clipboard-write']);
    await page.route('**/api/v1/GetServerInfo', async (route) => {
      const response = await route.fetch();
      await route.fulfill({ response, json: { ...(await response.json()), grpc_address: '0.0.0.0:7170' } });
    });
    await page.reload();
    const line = 'BELLWETHER_SERVER=127.0.0.1:7170 python -m bellwether run train.py';
    await page.locator(`[aria-label="Copy: ${line}"]`).focus();
    await page.keyboard.press('Enter');
    await page.waitForSelector('button:text-is("Copied")');
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), line);
    assert.deepEqual(await breaches(page), []);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await server.stop();
  },

  async 'live changes appear without a reload'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.conn.live');
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    server.say('alert');
    await page.waitForSelector('.verdict.critical');
    assert.match(await page.textContent('.verdict'), /stage 3 of 5: norm growth/);
    await picture(page, 'critical');
    await page.click('.alert.critical button:has-text("Acknowledge")');
    await page.fill('#alerts-who', 'erin');
    await page.keyboard.press('Enter');
    await page.waitForSelector('text=acknowledged by erin');
    await server.stop();
  },

  async 'a false alarm is marked and undone by keyboard'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.conn.live');
    const focused = () => page.evaluate(() => document.activeElement?.textContent || document.activeElement?.id);
    await page.locator('.alert.warning').getByRole('button', { name: 'False alarm', exact: true }).focus();
    await page.keyboard.press('Enter');
    assert.equal(await focused(), 'alerts-who', 'the name first');
    await page.keyboard.type('erin');
    await page.keyboard.press('Enter');
    assert.equal(await focused(), 'false-alarm-reason', 'then the reason');
    await page.keyboard.press('Escape');
    assert.equal(await focused(), 'False alarm', 'and not, by Escape');
    await page.keyboard.press('Enter');
    await page.keyboard.type('the data');
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    await page.waitForTimeout(500);  // What follows the title.
    await page.keyboard.type(' mix changed');
    assert.equal(await page.inputValue('#false-alarm-reason'), 'the data mix changed', 'news takes nothing away');
    assert.deepEqual(await breaches(page), []);
    await page.keyboard.press('Enter');
    await page.waitForSelector('.alert.false-alarm');
    assert.match(await page.textContent('.alert.false-alarm'), /false alarm.*false alarm, by erin: the data mix changed/s);
    await page.waitForSelector('.verdict >> text=no alert fires but 1 false alarm');
    // No green word for what a person has muted.
    assert.match(await page.textContent('.verdict.muted .verdict-stage'), /^Muted/);
    assert.deepEqual(await breaches(page), []);
    await page.goto(`http://127.0.0.1:${server.port}/#/`);
    await page.waitForSelector('.runs tbody tr');
    assert.equal(await page.locator('.runs tr.ill:has-text("gpt2-small/bf16-fa2")').count(), 0, 'the list does not count it');
    await page.goBack();
    await page.locator('.alert.false-alarm > summary').click();
    await page.getByRole('button', { name: 'Undo false alarm' }).focus();
    await page.keyboard.press('Enter');
    await page.waitForSelector('section[aria-label=Alerts] .alert.warning');
    await page.waitForSelector('.verdict.warning');
    // The verdict leads there, too.
    await page.click('.verdict button:text-is("False alarm")');
    await page.waitForSelector('#false-alarm-reason:focus');
    await server.stop();
  },

  async 'a run is renamed, and deleted once it has ended'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fwarmup-test');
    const menu = page.locator('.changes > summary');
    await menu.focus();
    await page.keyboard.press('Enter');
    assert.deepEqual(await breaches(page), []);
    await page.locator('#run-name').fill('gpt2-small/bf16-fa2');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.changes >> text=another run has it');
    await page.locator('#run-name').fill('first try');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.changes >> text=must match');
    await page.locator('#run-name').fill('first-try');
    await page.keyboard.press('Enter');
    await page.waitForSelector('h1:has-text("first-try")');
    assert.match(page.url(), /#\/run\/first-try/);
    await menu.click();
    await page.getByRole('button', { name: 'Delete this run' }).focus();
    await page.keyboard.press('Enter');
    assert.match(await page.evaluate(() => document.activeElement.textContent), /^Delete first-try for good$/, 'it asks');
    await page.keyboard.press('Enter');
    await page.waitForSelector('.runs tbody tr');
    assert.equal(await page.locator('.runs tr:has-text("first-try")').count(), 0);
    await page.goto(`http://127.0.0.1:${server.port}/#/run/gpt2-small%2Fbf16-fa2`);
    await menu.click();
    await page.waitForSelector('.changes >> text=can be deleted once it has ended');
    assert.equal(await page.getByRole('button', { name: 'Delete this run' }).isDisabled(), true);
    await server.stop();
  },

  async 'news do not move a slider that is held'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.conn.live');
    const slider = page.locator('input[type=range]');
    await slider.scrollIntoViewIfNeeded();
    const box = await slider.boundingBox();
    const middle = [box.x + box.width / 2, box.y + box.height / 2];
    await page.mouse.move(...middle);
    await page.mouse.down();
    const text = () => page.textContent('.step');
    await page.waitForFunction(() => /^step 1,8\d\d$/.test(document.querySelector('.step').textContent), undefined, { polling: 50 });
    const [held, at] = [await text(), await slider.inputValue()];
    server.say('step');
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    await page.waitForTimeout(500);  // What follows the title.
    assert.deepEqual([await text(), await slider.inputValue()], [held, at], 'the map and the slider stay');
    await page.mouse.up();
    await page.waitForFunction(() => /step=1\d\d\d/.test(location.hash));
    assert.equal(await text(), held);
    // Back where it was there is no change: the page lives again.
    await page.click('button:text-is("Newest")');
    await page.waitForFunction(() => /newest/.test(document.querySelector('.step').textContent));
    const end = [box.x + box.width - 1, middle[1]];
    await page.mouse.move(...end);
    await page.mouse.down();
    await page.mouse.move(...middle, { steps: 3 });
    await page.mouse.move(...end, { steps: 3 });
    await page.mouse.up();
    server.say('step');
    await page.waitForFunction(() => /step 3,740/.test(document.querySelector('.title-row')?.textContent ?? ''));
    await page.waitForFunction(() => /^step 3,740/.test(document.querySelector('.step').textContent));
    await server.stop();
  },

  async 'a loss alert does not hide the ill head'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.conn.live');
    server.say('loss');
    await page.waitForSelector('.verdict.critical');
    assert.match(await page.textContent('.verdict'), /stage 5 of 5: loss.*layer 1 head 0.*none.*cause: rounding drift/s);
    assert.deepEqual(await page.$$eval('section[aria-label=Alerts] .alert-summary', (all) => all.map((e) => e.textContent.split(' ')[0])), ['drift', 'loss']);
    await page.goto(`http://127.0.0.1:${server.port}/#/`);
    await page.waitForSelector('.runs tbody tr');
    assert.match(await page.textContent('.runs tbody tr:first-child'), /5 · loss.*layer 1 head 0/s);
    assert.match(await page.textContent('.title-row'), /4 in all, 3 live, 1 of them ill/);
    await server.stop();
  },

  async 'the status page shows the server and its refusals'() {
    const server = await start('ill');
    const page = await open(server, '');
    await page.click('nav a:has-text("Status")');
    await page.waitForSelector('.facts .fact');
    assert.match(await page.textContent('main'), /0\.1\.0.*Detectors on.*cpu.*runs_live.*1,000/s);
    // One line of health in words; amounts as people read them; zeros under their number.
    const answer = (change) => page.route('**/api/v1/GetServerInfo', async (route) => {
      const response = await route.fetch();
      const info = await response.json();
      await route.fulfill({ response, json: { ...info, options: { ...info.options, 'storage.free_bytes_min': '1073741824', 'ingest.idle_ms_max': '30000',
        'grpc.connection_age_seconds': '7200', 'storage.free_ratio_min': '0.05', 'retention.raw_days': '7', 'web.external_url': '', 'access_file': '' },
      counters: { bellwether_ingest_streams: 12, bellwether_store_free_bytes: 64948867072, bellwether_config_last_reload_successful: 1,
        'bellwether_degraded{reason=disk}': 0, 'bellwether_degraded{reason=log}': 0, 'bellwether_ingest_frames_total{result=refused}': 0,
        bellwether_ingest_values_total: 18957047, bellwether_wal_unapplied_frames: 0, bellwether_alerts_waiting: 0, ...change } } });
    });
    const health = page.locator('p.health');
    for (const [change, mood, words] of [
      [{}, 'ok', /^Healthy: nothing was refused, dropped or failed since the start\. 12 ranks send, 60\.5 GiB are free\.$/],
      [{ 'bellwether_ingest_frames_total{result=refused}': 3 }, 'warning', /^Works, but a counter of .* is not zero: ingest frames\{result=refused\}\./],
      [{ bellwether_config_last_reload_successful: 0 }, 'warning', /^Works, but the last reload failed/],
      [{ 'bellwether_degraded{reason=disk}': 1 }, 'critical', /^Degraded: the disk is nearly full, so nothing is acknowledged\.$/],
    ]) {
      await answer(change);
      await page.reload();
      await page.waitForFunction(({ source, was }) => new RegExp(source).test(document.querySelector('p.health')?.textContent ?? '') &&
        document.querySelector('p.health').className === `health ${was}`, { source: words.source, was: mood });
      assert.deepEqual(await breaches(page), []);
      if (mood === 'ok') {
        const cell = (name) => page.locator('tr', { has: page.locator(`code:text-is("${name}")`) }).locator('td').evaluate((e) => e.firstChild.textContent);
        assert.deepEqual(await Promise.all(['storage.free_bytes_min', 'ingest.idle_ms_max', 'grpc.connection_age_seconds', 'storage.free_ratio_min',
          'retention.raw_days', 'bellwether_ingest_values_total'].map(cell)), ['1 GiB', '30 s', '2 h', '5 %', '7 d', '18,957,047']);
        const counters = page.locator('section[aria-label=Counters]');
        assert.equal(await counters.locator('summary').textContent(), '4 counters at zero');
        assert.equal(await counters.getByText('bellwether_wal_unapplied_frames').isVisible(), false);
        await counters.locator('summary').focus();
        await page.keyboard.press('Enter');
        assert.ok(await counters.getByText('bellwether_wal_unapplied_frames').isVisible());
        assert.match(await page.locator('section[aria-label="Options in force"] summary').textContent(), /^\d+ options that are not set$/);
      }
      await page.unrouteAll({ behavior: 'wait' });
    }
    assert.equal(await health.count(), 1);
    await page.reload();
    await page.waitForSelector('.facts .fact');
    assert.equal(await page.getAttribute('nav a:has-text("Status")', 'aria-current'), 'page');
    assert.equal(await page.title(), 'Status · Bellwether');
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'status');
    await server.stop();
  },

  async 'a second run is drawn; views download as files'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.chart canvas');
    await page.selectOption('#beside', 'gpt2-small/fp32-control');
    await page.waitForSelector('text=dashed: gpt2-small/fp32-control');
    assert.match(page.url(), /beside=gpt2-small%2Ffp32-control/);
    await picture(page, 'beside', page.locator('section[aria-label="What is chosen"]'));
    const saved = async (label) => {
      const [download] = await Promise.all([page.waitForEvent('download'), page.click(`[aria-label="${label}"]`)]);
      return { name: download.suggestedFilename(), bytes: readFileSync(await download.path()) };
    };
    const csv = await saved('The map as CSV');
    assert.equal(csv.name, 'drift_ratio_step3700.csv');
    assert.match(String(csv.bytes), /^layer,head,drift_ratio\n0,0,[\d.]+\n/);
    assert.equal(String(csv.bytes).trim().split('\n').length, 1 + 12 * 12);
    const series = await saved('Drift ratio as CSV');
    assert.equal(series.name, 'drift_ratio_layer1_head0.csv');
    assert.match(String(series.bytes), /^step,min,mean,max\n\d+,/);
    for (const label of ['The map as PNG', 'Drift ratio as PNG']) {
      const { bytes } = await saved(label);
      assert.deepEqual([...bytes.subarray(1, 4)].map((b) => String.fromCharCode(b)).join(''), 'PNG');
    }
    assert.deepEqual(await breaches(page), []);
    await server.stop();
  },

  async 'an alert is silenced for a while'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.click('section[aria-label=Alerts] .spans summary');
    await page.click('section[aria-label=Alerts] .spans button:text-is("8 hours")');
    await page.fill('#alerts-who', 'erin');
    await page.keyboard.press('Enter');
    await page.waitForSelector('text=/silenced for another (8 h 0|7 h 59) min/');
    await picture(page, 'silenced', page.locator('section[aria-label=Alerts]'));
    assert.deepEqual(await breaches(page), []);
    await server.stop();
  },

  async 'a proposal is approved by name, applied and undone'() {
    const server = await start('ill');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    const actions = page.locator('section[aria-label=Actions]');
    await actions.waitFor();
    assert.match(await actions.textContent(), /Policy: propose.*proposed.*centre the keys · layer 1.*by alice/s);
    await actions.getByRole('button', { name: 'Approve' }).click();
    await page.waitForSelector('text=Say who you are first');
    await page.fill('#who', 'bob');
    await actions.getByRole('button', { name: 'Approve' }).click();
    await page.waitForFunction(() => /approved at step 3,700 by bob/.test(document.body.textContent));
    server.say('apply');
    await page.reload();
    await page.waitForSelector('.alert .badge:text-is("applied")');
    await actions.locator('summary').first().click();
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'actions', actions);
    server.say('step');  // What was opened stays open when the page is drawn anew.
    await page.waitForFunction(() => /step 3,720/.test(document.querySelector('.title-row')?.textContent ?? ''));
    await actions.getByRole('button', { name: 'Undo' }).click();
    await page.waitForSelector('text=take back: centre the keys');
    await actions.getByRole('button', { name: 'Undo' }).click();
    await page.waitForSelector('section[aria-label=Actions] [role=alert]:has-text("Refused")');
    await page.reload();
    await page.waitForSelector('text=Audit: 1 refused request or change of policy');
    await server.stop();
  },

  async 'readers get no actions; actors act under their name'() {
    const folder = mkdtempSync(`${tmpdir()}/who-`);
    writeFileSync(`${folder}/access.yml`, 'identities:\n- {name: alice, roles: [read], runs: ["*"]}\n- {name: bob, roles: [read, act], runs: ["*"]}\n', { mode: 0o600 });
    const tokens = Object.fromEntries(['alice', 'bob'].map((name) => {
      execFileSync(`${bin}/bellwether`, ['token', 'create', name, '--file', `${folder}/tokens`, '--out', `${folder}/${name}`]);
      return [name, readFileSync(`${folder}/${name}`, 'utf8').trim()];
    }));
    const server = await start('ill', 0, [`--access-file=${folder}/access.yml`, `--tokens-file=${folder}/tokens`]);
    const run = '#/run/gpt2-small%2Fbf16-fa2';
    const alice = await open(server, `?token=${tokens.alice}${run}`);
    await alice.waitForSelector('header >> text=alice (reads)');
    await alice.waitForSelector('text=You are alice, who may read. To approve, reject or undo takes the role act.');
    await alice.waitForSelector('text=To acknowledge or silence an alert, or call it a false alarm, takes the role act.');
    assert.match(await alice.textContent('.verdict'), /Proposed: centre the keys, layer 1/);
    for (const name of ['Acknowledge', 'False alarm', 'Approve', 'Reject', 'Undo']) assert.equal(await alice.getByRole('button', { name }).count(), 0);
    assert.equal(await alice.locator('.spans, #who:visible').count(), 0);
    assert.deepEqual(await breaches(alice), []);
    await picture(alice, 'reader');
    await alice.close();
    const bob = await open(server, `?token=${tokens.bob}${run}`);
    await bob.waitForSelector('header >> text=bob (reads and acts)');
    assert.equal(await bob.locator('#who:visible').count(), 0);
    await bob.locator('.verdict').getByRole('button', { name: 'Approve' }).click();  // Whom the server knows is not asked.
    await bob.waitForFunction(() => /approved at step 3,700 by bob/.test(document.body.textContent));
    await bob.click('.alert.warning button:has-text("Acknowledge")');
    await bob.waitForSelector('text=acknowledged by bob');
    // A refusal that the page could not foresee is told.
    await bob.route('**/api/v1/SilenceAlert', (route) => route.fulfill({ status: 403, contentType: 'application/json', body: '{"message":"bob lacks the role act"}' }));
    await bob.click('section[aria-label=Alerts] .spans summary');
    await bob.click('section[aria-label=Alerts] .spans button:text-is("8 hours")');
    await bob.waitForSelector('section[aria-label=Alerts] [role=alert]:has-text("Refused: bob lacks the role act")');
    await server.stop();
  },

  async 'a link opens its alert; ended runs offer no actions'() {
    const server = await start('ill');
    const page = await open(server, '');
    const run = '#/run/gpt2-small%2Fbf16-fa2';
    const alerts = page.locator('section[aria-label=Alerts]');
    const actions = page.locator('section[aria-label=Actions]');
    await page.goto(`http://127.0.0.1:${server.port}/${run}`);
    await actions.getByRole('button', { name: 'Approve' }).waitFor();
    await alerts.locator('details').first().waitFor();
    const keys = await alerts.locator('.alert > summary').evaluateAll((all) => all.map((e) => e.lastElementChild.textContent.split(' · ')[0]));
    assert.equal(new Set(keys).size, keys.length, 'each alert says its key');
    // As a server of before left it: the run has ended, the proposal has not.
    await page.route('**/api/v1/GetRun', async (route) => {
      const response = await route.fetch();
      await route.fulfill({ response, json: { ...(await response.json()), ended: true, end_reason: 'finished' } });
    });
    const key = keys[keys.length - 1];
    await page.goto(`http://127.0.0.1:${server.port}/${run}?alert=${encodeURIComponent(key)}`);
    await page.reload();
    await page.waitForSelector('text=finished');
    await actions.locator('summary').first().waitFor();
    for (const name of ['Approve', 'Reject', 'Undo']) assert.equal(await actions.getByRole('button', { name }).count(), 0);
    const opened = await alerts.locator('details[open] > summary').allTextContents();
    assert.equal(opened.length, 1);
    assert.ok(opened[0].includes(key));
    assert.deepEqual(await breaches(page), []);
    await page.unrouteAll({ behavior: 'ignoreErrors' });
    await page.close();
    await server.stop();
  },

  async 'the page reports a lost server and reconnects'() {
    let server = await start('ill');
    const { port } = server;
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    await page.waitForSelector('.conn.live');
    await server.stop();
    await page.waitForSelector('.banner:not([hidden])');
    assert.match(await page.textContent('.banner'), /does not answer.*what you see is old/);
    assert.equal(await page.textContent('.conn'), 'Disconnected');
    await picture(page, 'disconnected');
    server = await start('ill', port);
    await page.waitForSelector('.banner', { state: 'hidden' });
    await server.stop();
  },

  async 'loading and a failed answer look different'() {
    const server = await start('ill');
    const page = await open(server, '');
    await page.waitForSelector('.runs tbody tr');
    await page.route('**/api/v1/ListRuns', () => undefined);
    await page.reload();
    await page.waitForSelector('text=Loading runs…');
    await picture(page, 'loading');
    await page.unroute('**/api/v1/ListRuns');
    await page.route('**/api/v1/ListRuns', (route) => route.fulfill({ status: 503, contentType: 'application/json', body: '{"message":"the store is being opened"}' }));
    await page.reload();
    await page.waitForSelector('text=/Cannot load the runs: .*the store is being opened/');
    assert.deepEqual(await breaches(page), []);
    await picture(page, 'error');
    await server.stop();
  },

  async 'untrusted text is never markup or a link'() {
    const server = await start('hostile');
    const hostile = 'onerror="window.pwned=1"';
    for (const hash of ['', '#/status', 'run']) {
      const page = await open(server, hash === 'run' ? '' : hash);
      if (hash !== '#/status') await page.waitForSelector('.runs tbody tr');
      if (hash === '') assert.ok((await page.textContent('.runs tbody')).includes(hostile));
      if (hash === 'run') {
        await page.click('.runs tbody tr:first-child a');
        await page.waitForSelector('.verdict');
        assert.ok((await page.textContent('.alert')).includes(hostile));
        const actions = page.locator('section[aria-label=Actions]');
        await actions.getByRole('textbox').first().fill(hostile);
        await actions.getByRole('button', { name: 'Approve' }).click();
        await page.waitForFunction((text) => document.querySelector('section[aria-label=Actions]').textContent.includes(text), hostile);
        server.say('loss');
        await page.waitForSelector('text=/loss/i');
      }
      if (hash === '#/status') await page.waitForSelector('text=synthetic');
      assert.equal(await page.evaluate(() => window.pwned), undefined);
      assert.equal(await page.locator('img, main script, a[href^=javascript]').count(), 0);
      await page.close();
    }
    await server.stop();
  },

  async '126 layers and a million steps are displayed'() {
    const server = await start('huge');
    const page = await open(server, '#/run/gpt2-small%2Fbf16-fa2');
    // Made up on the fly from a million steps: seconds of both cores.
    await page.waitForSelector('.chart canvas', { timeout: 180000 });
    assert.match(await page.textContent('.verdict'), /layer 70 head 100/);
    await page.focus('[role=grid]');
    for (const key of ['ArrowRight', 'ArrowDown']) await page.keyboard.press(key);
    assert.match(await page.textContent('#heat-cell'), /^layer 71, head 101: /);
    await page.fill('input[type=range]', '500000');
    await page.waitForFunction(() => /step (499|500),\d{3}/.test(document.querySelector('.step')?.textContent ?? ''));
    await picture(page, 'huge');
    await server.stop();
  },

  async 'empty, unknown and many'() {
    let server = await start('empty');
    let page = await open(server, '');
    await page.waitForSelector('text=No run has reported yet');
    await picture(page, 'empty');
    assert.deepEqual(await breaches(page), []);
    await page.goto(`http://127.0.0.1:${server.port}/#/run/nobody`);
    await page.waitForSelector('text=no run has this name');
    await picture(page, 'unknown');
    await server.stop();
    server = await start('many');
    page = await open(server, '');
    await page.waitForFunction(() => document.querySelectorAll('.runs tbody tr').length === 1000);
    await picture(page, 'many');
    await page.fill('input[type=search]', 'run-777');
    await page.waitForFunction(() => document.querySelectorAll('.runs tbody tr').length === 1);
    await server.stop();
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  if (only && !name.includes(only)) continue;
  try {
    await check();
    console.log(`ok    ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL  ${name}\n${error.stack}`);
  }
  // A page that stays open goes on drawing, beside all checks that follow.
  for (const context of browser.contexts()) await context.close();
}
for (const fault of faults) console.log(`FAIL  ${fault}`);
await browser.close();
process.exit(failed + faults.length > 0 ? 1 : 0);
