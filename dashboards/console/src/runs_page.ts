// All runs: those that live before those that ended, worst first.
import { headName, leading, worstSeverity } from './alerts';
import { api, num } from './api';
import { importedBadge, runBadge } from './badges';
import { fill, h } from './dom';
import { ago, integer, number } from './format';
import { formatRoute, routeOf } from './route';
import type { Alert, Run } from './wire';

export class RunsPage {
  readonly element: HTMLElement;
  private readonly body = h('tbody');
  private readonly count = h('span', { class: 'muted' });
  private readonly missing = h('p', { class: 'missing', role: 'status', hidden: true });
  private readonly state = h('p', { class: 'state' }, 'Loading runs…');
  private readonly filter = h('input', { type: 'search', placeholder: 'Filter by name', 'aria-label': 'Filter runs by name', oninput: () => this.draw() });
  private readonly table: HTMLElement;
  private runs: Run[] = [];
  private alerts = new Map<string, Alert[]>();  // Of each run.
  private loaded = false;

  constructor() {
    this.table = h('table', { class: 'runs', hidden: true },
      h('thead', {}, h('tr', {}, ...['Run', 'Stage', 'Worst head', 'Steps left', 'Step', 'Loss', 'Ranks', 'Last report']
        .map((t, i) => h('th', { scope: 'col', class: i >= 3 ? 'right' : '' }, t)))),
      this.body);
    this.element = h('main', { class: 'page' }, h('div', { class: 'title-row' }, h('h1', {}, 'Runs'), this.count, this.filter), this.missing, this.state,
      h('div', { class: 'scroll' }, this.table));
  }

  async refresh(): Promise<void> {
    const [runs, alerts] = await Promise.all([api.runs(), api.alerts('')]);
    // Worst first as the server has it, but what can still be saved before what is over.
    this.runs = runs.runs.sort((a, b) => Number(a.ended) - Number(b.ended));
    this.alerts.clear();
    for (const alert of alerts.alerts) this.alerts.set(alert.last.run, [...(this.alerts.get(alert.last.run) ?? []), alert]);
    this.loaded = true;
    this.sayMissing(runs.unanswered, runs.partitions_unserved);
    this.draw();
  }

  fail(message: string): void {
    if (!this.loaded) fill(this.state, `Cannot load the runs: ${message}`);
  }

  /** Of a cluster: whose runs are not in the list. */
  private sayMissing(unanswered: string[], unserved: number): void {
    const one = unanswered.length === 1;
    const lines = [
      unanswered.length === 0 ? '' : `${unanswered.length} ${one ? 'server' : 'servers'} of the cluster did not answer: ${one ? 'its' : 'their'} runs are missing here (${unanswered.join(', ')}).`,
      unserved === 0 ? '' : `${unserved} ${unserved === 1 ? 'partition of the cluster is' : 'partitions of the cluster are'} served by nobody just now: the runs there are missing here.`,
    ];
    this.missing.textContent = lines.filter((line) => line !== '').join(' ');
    this.missing.hidden = this.missing.textContent === '';
  }

  private draw(): void {
    if (!this.loaded) return;
    const live = this.runs.filter((r) => !r.ended);
    const amount = (n: number) => (n === 0 ? 'none' : integer(n));
    const ill = live.length === 0 ? '' : `, ${amount(live.filter((r) => r.stage > 0).length)} of them ill`;
    this.count.textContent = this.runs.length === 0 ? '' : `${integer(this.runs.length)} in all, ${amount(live.length)} live${ill}`;
    this.table.hidden = this.runs.length === 0;
    this.state.hidden = this.runs.length > 0 || !this.missing.hidden;
    if (this.runs.length === 0) {
      fill(this.state, 'No run has reported yet. In the training script: ', h('code', {}, 'bellwether.attach(model)'),
        ' with ', h('code', {}, 'BELLWETHER_SERVER'), ' set to this server.');
    }
    const wanted = this.filter.value.trim().toLowerCase();
    fill(this.body, ...this.runs.filter((r) => r.description.name.toLowerCase().includes(wanted)).map((r) => this.row(r)));
  }

  private row(run: Run): HTMLElement {
    const name = run.description.name;
    const alerts = this.alerts.get(name) ?? [];
    const last = leading(alerts)?.last;
    const severity = worstSeverity(alerts);
    const where = last && last.layer >= 0 ? headName(last.layer, last.head) : null;
    const link = formatRoute(routeOf(name));
    const late = !run.ended && Date.now() / 1000 - num(run.last_report_unix_ns) / 1e9 > 600;
    const eta = run.eta?.known ? `≈ ${integer(num(run.eta.steps))}` : '–';
    return h('tr', { class: run.stage > 0 ? `ill ${severity}` : '', onclick: () => (location.hash = link) },
      h('th', { scope: 'row' }, h('a', { href: link }, name), ' ', importedBadge(run), h('div', { class: 'muted small' },
        `${run.description.model || 'model'} · ${run.description.layout.layers} × ${run.description.layout.heads} heads · ${run.description.attention?.score_dtype ?? ''}`)),
      h('td', {}, runBadge(run, severity)),
      h('td', {}, where ? h('strong', {}, where) : '–'),
      h('td', { class: 'right' }, eta),
      h('td', { class: 'right' }, integer(num(run.step))),
      h('td', { class: 'right' }, number(num(run.loss))),
      h('td', { class: 'right' }, run.ended ? run.end_reason || 'ended' : `${run.ranks_reporting}/${run.description.reporters}`),
      h('td', { class: `right ${late ? 'late' : ''}` }, late ? `silent, ${ago(num(run.last_report_unix_ns))}` : ago(num(run.last_report_unix_ns))));
  }
}
