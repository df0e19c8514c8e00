// All runs: those that live before those that ended, worst first.
import { headName, isMuted, leading, worstSeverity } from './alerts';
import { api, num } from './api';
import { importedBadge, lossWords, runBadge, silentFor } from './badges';
import { pasteLine } from './copying';
import { fill, focusIn, h } from './dom';
import { ago, counted, integer } from './format';
import { stepRows } from './keys';
import { leftOf, meanStepSeconds, toldWords } from './left';
import { Route, formatRoute, routeOf } from './route';
import { headSignals } from './signals';
import { Sparklines } from './sparkline';
import { oneStop, term } from './terms';
import type { Alert, Run, SeriesId } from './wire';

/** Of a cluster: whose runs are not in the list; "" if none is missing. */
function missingWords(unanswered: string[], unserved: number): string {
  const servers = counted(unanswered.length, 'server');
  const whose = unanswered.length === 1 ? 'its' : 'their';
  const partitions = counted(unserved, 'partition of the cluster is', 'partitions of the cluster are');
  return [
    unanswered.length === 0 ? ''
      : `${servers} of the cluster did not answer: ${whose} runs are missing here (${unanswered.join(', ')}).`,
    unserved === 0 ? '' : `${partitions} served by nobody just now: the runs there are missing here.`,
  ].filter((line) => line !== '').join(' ');
}

function nameCell(run: Run, link: string): HTMLElement {
  const { name, model, layout, attention } = run.description;
  const shape = `${model || 'model'} · ${layout.layers} × ${layout.heads} heads · ${attention?.score_dtype ?? ''}`;
  const address = h('a', { class: 'row', href: link, 'data-focus': `run ${run.description.uuid}` }, name);
  return h('th', { scope: 'row' }, address, ' ', importedBadge(run), h('div', { class: 'muted small' }, shape));
}

function lastReportCell(run: Run): HTMLElement {
  const when = ago(num(run.last_report_unix_ns));
  const silent = silentFor(run) !== null;
  return h('td', { class: `right ${silent ? 'late' : ''}` }, silent ? `silent, ${when}` : when);
}

function numberCell(text: string, note = ''): HTMLElement {
  return h('td', { class: 'right' }, text, note ? h('div', { class: 'muted small' }, note) : null);
}

/** What a row is made of, and what the list is sorted by. */
interface Entry { run: Run; alerts: Alert[]; alert: Alert | undefined; since: number; left: number }

function entryOf(run: Run, alerts: Alert[]): Entry {
  const alert = leading(alerts);
  const isLive = run.eta?.known && !run.ended;
  return { run, alerts, alert, since: alert ? num(alert.last.first_step) : NaN, left: isLive ? num(run.eta?.steps) : NaN };
}

/** By the name that the address has; those without a number stand last. */
const columns: { name: string; title: string; about?: string; right?: boolean; value?: (entry: Entry) => number | string }[] = [
  { name: 'run', title: 'Run', value: ({ run }) => run.description.name },
  { name: 'course', title: 'Course' },
  { name: 'stage', title: 'Stage', about: 'stage', value: ({ run }) => run.stage },
  { name: 'head', title: 'Worst head' },
  { name: 'since', title: 'Since', right: true, value: ({ since }) => since },
  { name: 'left', title: 'Steps left', about: 'left', right: true, value: ({ left }) => left },
  { name: 'step', title: 'Step', right: true, value: ({ run }) => num(run.step) },
  { name: 'loss', title: 'Loss', right: true, value: ({ run }) => num(run.loss) },
  { name: 'ranks', title: 'Ranks', about: 'rank', right: true },
  { name: 'report', title: 'Last report', right: true, value: ({ run }) => num(run.last_report_unix_ns) },
];

interface Order { name: string; firing: boolean; sort: string; down: boolean }

function orderOf(query: string): Order {
  const values = new URLSearchParams(query);
  const sort = columns.find(({ name, value }) => value && name === values.get('sort'))?.name ?? '';
  return { name: values.get('name') ?? '', firing: values.get('firing') === '1', sort, down: values.get('down') === '1' };
}

/** What is drawn of a run: the signal of its alert, else the loss. */
function courseOf({ run, alert }: Entry): SeriesId {
  const told = run.ended ? undefined : alert?.last.evidence.find(({ signal, layer, head }) =>
    layer >= 0 && head >= 0 && headSignals.some((s) => s.name === signal && !s.kvHeads));
  if (!told) return { signal: 'loss', layer: 0, head: 0, name: '' };
  return { signal: told.signal, layer: told.layer, head: told.head, name: '' };
}

export class RunsPage {
  readonly element: HTMLElement;
  private readonly body = h('tbody');
  private readonly head = h('tr');
  private readonly count = h('span', { class: 'muted' });
  private readonly missing = h('p', { class: 'missing', role: 'status', hidden: true });
  private readonly state = h('div', { class: 'state' }, 'Loading runs…');
  private readonly filter = h('input', {
    type: 'search', placeholder: 'Filter by name', 'aria-label': 'Filter runs by name', oninput: () => this.narrow(),
  });
  private readonly firing = h('input', { type: 'checkbox', id: 'firing-runs', onchange: () => this.narrow() });
  private readonly table: HTMLElement;
  private readonly courses = new Sparklines();
  private entries: Entry[] = [];
  private order: Order;
  private loaded = false;
  private hasBegun = false;

  constructor(route: Route, private readonly changed: () => void) {
    this.order = orderOf(route.query);
    this.table = h('table', { class: 'runs', hidden: true }, h('thead', {}, this.head), this.body);
    this.element = h('main', { class: 'page' },
      h('div', { class: 'title-row' }, h('h1', {}, 'Runs'), this.count,
        h('div', { class: 'filters' }, h('span', {}, this.firing, h('label', { for: 'firing-runs' }, ' firing')), this.filter)),
      this.missing, this.state, h('div', { class: 'scroll', role: 'group', tabindex: 0, 'aria-label': 'All runs' }, this.table));
    this.showOrder();
  }

  /** The address changed. */
  navigate(route: Route): void {
    this.order = orderOf(route.query);
    this.showOrder();
    this.draw();
    this.changed();
  }

  private showOrder(): void {
    const { name, firing, sort, down } = this.order;
    if (this.filter.value.trim() !== name) this.filter.value = name;
    this.firing.checked = firing;
    const focus = focusIn(this.head);
    fill(this.head, ...columns.map((column) => {
      const isSorted = column.name === sort;
      const press = () => this.sortBy(column.name);
      const mark = isSorted ? h('span', { 'aria-hidden': 'true' }, down ? ' ↓' : ' ↑') : null;
      const button = h('button', { class: 'head', 'data-focus': `sort ${column.name}`, onclick: press }, column.title, mark);
      const title = column.value ? button : column.title;
      return h('th', {
        scope: 'col', class: column.right ? 'right' : '', 'aria-sort': isSorted ? (down ? 'descending' : 'ascending') : undefined,
      }, title, column.about ? term(column.about, 'column') : null);
    }));
    oneStop(this.head);
    focus();
  }

  /** Up, then down, then as the server has it: the worst first. */
  private sortBy(name: string): void {
    const { sort, down } = this.order;
    this.go(sort !== name ? { sort: name, down: false } : down ? { sort: '', down: false } : { down: true });
  }

  private narrow(): void {
    this.go({ name: this.filter.value.trim(), firing: this.firing.checked });
  }

  private go(change: Partial<Order>): void {
    const { name, firing, sort, down } = { ...this.order, ...change };
    const query = new URLSearchParams();
    if (name) query.set('name', name);
    if (firing) query.set('firing', '1');
    if (sort) query.set('sort', sort);
    if (sort && down) query.set('down', '1');
    location.replace(query.size > 0 ? `#/?${query.toString()}` : '#/');
  }

  async refresh(): Promise<void> {
    const [runs, alerts] = await Promise.all([api.runs(), api.alerts('')]);
    const of = new Map<string, Alert[]>();
    for (const alert of alerts.alerts) {
      const { run } = alert.last;
      const all = of.get(run);
      if (all) all.push(alert);
      else of.set(run, [alert]);
    }
    // Worst first as the server has it, but what can still be saved before what is over.
    const sorted = runs.runs.sort((a, b) => Number(a.ended) - Number(b.ended));
    this.entries = sorted.map((run) => entryOf(run, of.get(run.description.name) ?? []));
    this.loaded = true;
    this.missing.textContent = missingWords(runs.unanswered, runs.partitions_unserved);
    this.missing.hidden = this.missing.textContent === '';
    this.draw();
    if (this.entries.length === 0 && this.missing.hidden) await this.begin();
    void this.courses.pump();
  }

  fail(message: string): void {
    if (!this.loaded) fill(this.state, `Cannot load the runs: ${message}`);
  }

  /** j, k: from run to run. */
  onKey(key: string): boolean {
    return stepRows(this.body, key);
  }

  redraw(): void {
    this.courses.redraw();
  }

  private countWords(): string {
    if (this.entries.length === 0) return '';
    const amount = (n: number) => (n === 0 ? 'none' : integer(n));
    const live = this.entries.filter(({ run }) => !run.ended);
    const ill = live.length === 0 ? '' : `, ${amount(live.filter(({ run }) => run.stage > 0).length)} of them ill`;
    return `${integer(this.entries.length)} in all, ${amount(live.length)} live${ill}`;
  }

  /** Those that are shown, in their order. */
  private chosen(): Entry[] {
    const { name, firing, sort, down } = this.order;
    const wanted = name.toLowerCase();
    const shown = this.entries.filter(({ run, alert }) =>
      run.description.name.toLowerCase().includes(wanted) && (!firing || (alert !== undefined && !run.ended)));
    const value = columns.find((column) => column.name === sort)?.value;
    if (!value) return shown;
    const lacks = (x: number | string) => Number(typeof x === 'number' && Number.isNaN(x));
    return shown.map((entry) => ({ entry, by: value(entry) })).sort((a, b) =>
      lacks(a.by) - lacks(b.by) || (a.by < b.by ? -1 : a.by > b.by ? 1 : 0) * (down ? -1 : 1)).map(({ entry }) => entry);
  }

  private draw(): void {
    if (!this.loaded) return;
    this.count.textContent = this.countWords();
    const shown = this.chosen();
    this.table.hidden = this.entries.length === 0;
    this.state.hidden = shown.length > 0 || !this.missing.hidden;
    if (this.entries.length > 0 && shown.length === 0) fill(this.state, 'No run is left by these filters.');
    if (this.entries.length > 0) this.hasBegun = false;
    const focus = focusIn(this.body);
    fill(this.body, ...shown.map((entry) => this.row(entry)));
    focus();
  }

  /** How a run comes here, with this server's own address. */
  private async begin(): Promise<void> {
    if (this.hasBegun) return;
    this.hasBegun = true;
    const { grpc_address } = await api.info();
    // A server that listens on all addresses is reached by the one that the browser uses.
    const [, host, port] = /^(.*):(\d+)$/.exec(grpc_address) ?? [undefined, '', '7070'];
    const address = `${/^(|0\.0\.0\.0|\[?::\]?)$/.test(host) ? location.hostname : host}:${port}`;
    fill(this.state,
      h('p', {}, 'No run has reported yet. A script as it is, watched from outside:'),
      pasteLine(`BELLWETHER_SERVER=${address} python -m bellwether run train.py`),
      h('p', {}, 'In the script itself, before it is compiled or distributed; ', h('code', {}, 'BELLWETHER_SERVER'), ' as above:'),
      pasteLine('import bellwether; mon = bellwether.attach(model)'),
      h('p', {}, 'A recording of before:'), pasteLine(`bellwether --server ${address} run import FILE`));
  }

  /** One row of the list. */
  private row(entry: Entry): HTMLElement {
    const { run, alerts, alert } = entry;
    const last = alert?.last;
    const severity = worstSeverity(alerts);
    const where = last && last.layer >= 0 ? headName(last.layer, last.head) : null;
    const link = formatRoute(routeOf(run.description.name));
    const seconds = meanStepSeconds(run);
    const left = alert && !run.ended && run.eta?.known ? leftOf(run, alert, seconds) : null;
    return h('tr', { class: run.ended ? 'ended' : run.stage > 0 ? `ill ${severity}` : '', onclick: () => (location.hash = link) },
      nameCell(run, link),
      this.courses.cell(run, courseOf(entry)),
      h('td', { class: 'at-stage' }, runBadge(run, severity, isMuted(alerts))),
      h('td', { class: 'at-head' }, where ? h('strong', {}, where) : '–'),
      numberCell(last ? integer(num(last.first_step)) : '–', alert ? toldWords(run, alert).replace(/^.*, /, '') : ''),
      numberCell(run.eta?.known && !run.ended ? `≈ ${integer(num(run.eta.steps))}` : '–', left?.time ? `about ${left.time}` : ''),
      h('td', { class: 'right at-step' }, integer(num(run.step))),
      numberCell(lossWords(run)),
      numberCell(run.ended ? run.end_reason || 'ended' : `${run.ranks_reporting}/${run.description.reporters}`),
      lastReportCell(run));
  }
}
