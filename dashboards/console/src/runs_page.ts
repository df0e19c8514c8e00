// All runs: those that live before those that ended, worst first.
import { headName, leading, worstSeverity } from './alerts';
import { api, num } from './api';
import { importedBadge, runBadge, silentFor } from './badges';
import { fill, h, tableHead } from './dom';
import { ago, integer, number } from './format';
import { formatRoute, routeOf } from './route';
import type { Alert, Run } from './wire';

/** "2 servers", "1 server". */
function count(amount: number, one: string, more: string): string {
  return `${amount} ${amount === 1 ? one : more}`;
}

/** Of a cluster: whose runs are not in the list; "" if none is missing. */
function missingWords(unanswered: string[], unserved: number): string {
  const servers = count(unanswered.length, 'server', 'servers');
  const whose = unanswered.length === 1 ? 'its' : 'their';
  const partitions = count(unserved, 'partition of the cluster is', 'partitions of the cluster are');
  return [
    unanswered.length === 0 ? ''
      : `${servers} of the cluster did not answer: ${whose} runs are missing here (${unanswered.join(', ')}).`,
    unserved === 0 ? '' : `${partitions} served by nobody just now: the runs there are missing here.`,
  ].filter((line) => line !== '').join(' ');
}

function nameCell(run: Run, link: string): HTMLElement {
  const { name, model, layout, attention } = run.description;
  const shape = `${model || 'model'} · ${layout.layers} × ${layout.heads} heads · ${attention?.score_dtype ?? ''}`;
  return h('th', { scope: 'row' }, h('a', { href: link }, name), ' ', importedBadge(run), h('div', { class: 'muted small' }, shape));
}

function lastReportCell(run: Run): HTMLElement {
  const when = ago(num(run.last_report_unix_ns));
  const silent = silentFor(run) !== null;
  return h('td', { class: `right ${silent ? 'late' : ''}` }, silent ? `silent, ${when}` : when);
}

function numberCell(text: string): HTMLElement {
  return h('td', { class: 'right' }, text);
}

/** One row of the list. */
function row(run: Run, alerts: Alert[]): HTMLElement {
  const last = leading(alerts)?.last;
  const severity = worstSeverity(alerts);
  const where = last && last.layer >= 0 ? headName(last.layer, last.head) : null;
  const link = formatRoute(routeOf(run.description.name));
  return h('tr', { class: run.stage > 0 ? `ill ${severity}` : '', onclick: () => (location.hash = link) },
    nameCell(run, link),
    h('td', {}, runBadge(run, severity)),
    h('td', {}, where ? h('strong', {}, where) : '–'),
    numberCell(run.eta?.known ? `≈ ${integer(num(run.eta.steps))}` : '–'),
    numberCell(integer(num(run.step))),
    numberCell(number(num(run.loss))),
    numberCell(run.ended ? run.end_reason || 'ended' : `${run.ranks_reporting}/${run.description.reporters}`),
    lastReportCell(run));
}

export class RunsPage {
  readonly element: HTMLElement;
  private readonly body = h('tbody');
  private readonly count = h('span', { class: 'muted' });
  private readonly missing = h('p', { class: 'missing', role: 'status', hidden: true });
  private readonly state = h('p', { class: 'state' }, 'Loading runs…');
  private readonly filter = h('input', {
    type: 'search', placeholder: 'Filter by name', 'aria-label': 'Filter runs by name', oninput: () => this.draw(),
  });
  private readonly table: HTMLElement;
  private runs: Run[] = [];
  private alerts = new Map<string, Alert[]>();  // Of each run.
  private loaded = false;

  constructor() {
    this.table = h('table', { class: 'runs', hidden: true },
      tableHead(['Run', 'Stage', 'Worst head', 'Steps left', 'Step', 'Loss', 'Ranks', 'Last report'], 3), this.body);
    this.element = h('main', { class: 'page' },
      h('div', { class: 'title-row' }, h('h1', {}, 'Runs'), this.count, this.filter),
      this.missing, this.state, h('div', { class: 'scroll' }, this.table));
  }

  async refresh(): Promise<void> {
    const [runs, alerts] = await Promise.all([api.runs(), api.alerts('')]);
    // Worst first as the server has it, but what can still be saved before what is over.
    this.runs = runs.runs.sort((a, b) => Number(a.ended) - Number(b.ended));
    this.alerts.clear();
    for (const alert of alerts.alerts) {
      const { run } = alert.last;
      this.alerts.set(run, [...(this.alerts.get(run) ?? []), alert]);
    }
    this.loaded = true;
    this.missing.textContent = missingWords(runs.unanswered, runs.partitions_unserved);
    this.missing.hidden = this.missing.textContent === '';
    this.draw();
  }

  fail(message: string): void {
    if (!this.loaded) fill(this.state, `Cannot load the runs: ${message}`);
  }

  private countWords(): string {
    if (this.runs.length === 0) return '';
    const amount = (n: number) => (n === 0 ? 'none' : integer(n));
    const live = this.runs.filter((r) => !r.ended);
    const ill = live.length === 0 ? '' : `, ${amount(live.filter((r) => r.stage > 0).length)} of them ill`;
    return `${integer(this.runs.length)} in all, ${amount(live.length)} live${ill}`;
  }

  private draw(): void {
    if (!this.loaded) return;
    this.count.textContent = this.countWords();
    this.table.hidden = this.runs.length === 0;
    this.state.hidden = this.runs.length > 0 || !this.missing.hidden;
    if (this.runs.length === 0) {
      fill(this.state, 'No run has reported yet. In the training script: ', h('code', {}, 'bellwether.attach(model)'),
        ' with ', h('code', {}, 'BELLWETHER_SERVER'), ' set to this server.');
    }
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = this.runs.filter((r) => r.description.name.toLowerCase().includes(wanted));
    fill(this.body, ...shown.map((r) => row(r, this.alerts.get(r.description.name) ?? [])));
  }
}
