// The alerts of all runs: what fires, for how long, how long is left, who is on it, and what waits for a word.
import { actionTitle, scopeOf, waiting } from './action_words';
import { counts, headName, isFiring, severityOf } from './alerts';
import { api, num } from './api';
import { caller, whyNot } from './caller';
import { fill, focusIn, h, tableHead } from './dom';
import { ago, integer, stageName } from './format';
import { stepRows } from './keys';
import { leftOf, meanStepSeconds, toldWords } from './left';
import { Route, formatRoute, routeOf } from './route';
import { Signing } from './signing';
import { silencedWords } from './silences';
import { oneStop, term } from './terms';
import type { Alert, Run } from './wire';

const severities = ['info', 'warning', 'critical'];
const leastWords: Record<string, string> = { info: 'every severity', warning: 'warning or worse', critical: 'critical' };
const shownMax = 500;

interface Filters { firing: boolean; unacknowledged: boolean; severity: string }

function filtersOf(query: string): Filters {
  const values = new URLSearchParams(query);
  const severity = values.get('severity') ?? '';
  return {
    firing: values.get('firing') !== '0', unacknowledged: values.get('unacknowledged') === '1',
    severity: severities.includes(severity) ? severity : 'info',
  };
}

function addressOf({ firing, unacknowledged, severity }: Filters): string {
  const query = new URLSearchParams();
  if (!firing) query.set('firing', '0');
  if (unacknowledged) query.set('unacknowledged', '1');
  if (severity !== 'info') query.set('severity', severity);
  return query.size > 0 ? `#/alerts?${query.toString()}` : '#/alerts';
}

function whatWords({ last }: Alert): string {
  const stage = last.stage > 0 ? `, stage ${last.stage} of 5: ${stageName(last.stage)}` : '';
  return `${last.rule} in ${headName(last.layer, last.head)}${last.heads_total > 1 ? ` + ${last.heads_total - 1}` : ''}${stage}`;
}

export class AlertsPage {
  readonly element: HTMLElement;
  private readonly body = h('tbody');
  private readonly count = h('span', { class: 'muted', role: 'status' });
  private readonly state = h('p', { class: 'state' }, 'Loading alerts…');
  private readonly why = h('p', { class: 'muted', hidden: true });
  private readonly missing = h('p', { class: 'missing', role: 'status', hidden: true });
  private readonly firing = h('input', { type: 'checkbox', id: 'only-firing', onchange: () => this.filter() });
  private readonly unacknowledged = h('input', { type: 'checkbox', id: 'only-unacknowledged', onchange: () => this.filter() });
  private readonly severity = h('select', { id: 'least-severity', onchange: () => this.filter() },
    ...severities.map((name) => h('option', { value: name }, leastWords[name])));
  private readonly table: HTMLElement;
  private readonly signing: Signing;
  private alerts: Alert[] = [];
  private runs = new Map<string, Run>();
  private filters: Filters;
  private loaded = false;

  constructor(route: Route, private readonly changed: () => void) {
    this.filters = filtersOf(route.query);
    this.signing = new Signing('alerts-who', changed);
    this.table = h('table', { class: 'runs alerts-table', hidden: true },
      oneStop(tableHead([
        ['Severity', term('severity', 'column')], 'Run', ['What', term('cause', 'column')], 'Since', ['Left', term('left', 'column')],
        'Owner', 'Last notified', 'Waiting for approval',
      ])), this.body);
    const label = (id: string, words: string) => h('label', { for: id }, words);
    this.element = h('main', { class: 'page' },
      h('div', { class: 'title-row' }, h('h1', {}, 'Alerts'), this.count,
        h('div', { class: 'filters' },
          h('span', {}, this.firing, label('only-firing', ' firing')),
          h('span', {}, this.unacknowledged, label('only-unacknowledged', ' unacknowledged')),
          label('least-severity', 'Severity '), this.severity)),
      this.missing, this.why, this.signing.element, this.state,
      h('div', { class: 'scroll', role: 'group', tabindex: 0, 'aria-label': 'Alerts of all runs' }, this.table));
    this.showFilters();
  }

  /** The address changed. */
  navigate(route: Route): void {
    this.filters = filtersOf(route.query);
    this.showFilters();
    this.changed();
  }

  private showFilters(): void {
    this.firing.checked = this.filters.firing;
    this.unacknowledged.checked = this.filters.unacknowledged;
    this.severity.value = this.filters.severity;
  }

  private filter(): void {
    const [firing, unacknowledged] = [this.firing.checked, this.unacknowledged.checked];
    location.replace(addressOf({ firing, unacknowledged, severity: this.severity.value }));
  }

  async refresh(): Promise<void> {
    const { filters } = this;
    const [runs, alerts] = await Promise.all([api.runs(), api.allAlerts(filters.firing, severities.indexOf(filters.severity) + 1)]);
    this.runs = new Map(runs.runs.map((run) => [run.description.uuid, run]));
    this.alerts = alerts.alerts.filter((alert) => (!filters.firing || counts(alert)) && (!filters.unacknowledged || !alert.acknowledged));
    this.alerts.sort((a, b) => this.rank(b) - this.rank(a) || num(b.last.time_unix_ns) - num(a.last.time_unix_ns));
    this.loaded = true;
    this.missing.hidden = alerts.unanswered.length === 0;
    this.missing.textContent = `Did not answer, so who is on their alerts is not known: ${alerts.unanswered.join(', ')}.`;
    this.draw();
  }

  fail(message: string): void {
    if (!this.loaded) fill(this.state, `Cannot load the alerts: ${message}`);
  }

  /** j, k: rows; a: acknowledge. */
  onKey(key: string): boolean {
    if (stepRows(this.body, key)) return true;
    const row = document.activeElement?.closest('tr');
    if (key !== 'a' || !row || !this.body.contains(row)) return false;
    row.querySelector<HTMLElement>('[data-acknowledge]')?.click();
    return true;
  }

  private runOf({ last }: Alert): Run | undefined {
    return this.runs.get(last.run_uuid);
  }

  /** What can still be saved before what is over, then the worst, then what nobody is on. */
  private rank(alert: Alert): number {
    const lives = 4 * Number(counts(alert)) + 2 * Number(isFiring(alert)) + Number(this.runOf(alert)?.ended === false);
    return 10 * lives + 2 * severities.indexOf(severityOf(alert)) + Number(!alert.acknowledged);
  }

  private draw(): void {
    if (!this.loaded) return;
    const { alerts, filters } = this;
    const firing = alerts.filter(counts).length;
    const free = alerts.filter((alert) => counts(alert) && !alert.acknowledged).length;
    this.count.textContent = `${integer(firing)} firing, ${integer(free)} unacknowledged`;
    this.why.textContent = whyNot('acknowledge an alert');
    this.why.hidden = this.why.textContent === '' || alerts.length === 0;
    this.table.hidden = alerts.length === 0;
    this.state.hidden = alerts.length > 0;
    const isNarrow = filters.unacknowledged || filters.severity !== 'info';
    fill(this.state, isNarrow ? 'No alert is left by these filters. ' : filters.firing ? 'No alert fires. ' : 'No alert so far. ',
      filters.firing ? h('a', { href: addressOf({ ...filters, firing: false }) }, 'Show those that are over') : null);
    const focus = focusIn(this.body);
    fill(this.body, ...alerts.slice(0, shownMax).map((alert) => this.row(alert)));
    focus();
  }

  private row(alert: Alert): HTMLElement {
    const { last } = alert;
    const run = this.runOf(alert);
    const [severity, isQuiet] = [severityOf(alert), !counts(alert) || run?.ended !== false];
    const mood = !isFiring(alert) ? 'over' : alert.muted ? 'false alarm' : severity;
    const seconds = run ? meanStepSeconds(run) : 0;
    const since = run ? toldWords(run, alert) : '';
    const left = run && !run.ended && counts(alert) && last.stage < 5 ? leftOf(run, alert, seconds) : null;
    const proposal = isQuiet ? undefined : waiting(alert.proposed, last.key);
    const link = formatRoute({ ...routeOf(last.run), alert: last.key });
    const allowed = proposal?.not_allowed ? ' (not allowed by the job)' : '';
    const waits = proposal ? h('a', { href: link }, `${actionTitle(proposal)}, ${scopeOf(proposal)}${allowed}`) : '–';
    const small = (words: string) => h('div', { class: 'muted small' }, words);
    return h('tr', { class: isQuiet ? 'ended' : `ill ${severity}` },
      h('td', {}, h('span', { class: `badge ${isQuiet ? 'stage-ended' : `sev-${severity}`}` }, mood)),
      h('th', { scope: 'row' }, h('a', { class: 'row', href: link, 'data-focus': `${last.run_uuid} ${last.key}` }, last.run),
        small(`${last.key}${run?.ended ? ' · ended' : ''}${last.imported ? ' · imported' : ''}`)),
      h('td', { class: 'what' }, whatWords(alert), small(`cause: ${last.cause || 'unknown'}`)),
      h('td', {}, `step ${integer(num(last.first_step))}`, since ? small(since) : null),
      h('td', {}, left ? `≈ ${left.steps} steps` : '–', left?.time ? small(`about ${left.time}, until ${left.until}`) : null),
      h('td', {}, this.owner(alert, isQuiet)),
      h('td', {}, ago(num(last.time_unix_ns))),
      h('td', { class: 'what' }, waits));
  }

  private owner(alert: Alert, isQuiet: boolean): HTMLElement {
    const { run, run_uuid, key } = alert.last;
    const silenced = silencedWords(alert);
    const note = silenced ? h('div', { class: 'muted small' }, silenced) : null;
    if (alert.acknowledged) return h('span', {}, alert.acknowledged_by || 'somebody', note);
    if (isQuiet || !caller.may_act) return h('span', {}, 'nobody', note);
    return h('span', {}, h('button', {
      'data-acknowledge': true, 'data-focus': `acknowledge ${run_uuid} ${key}`, 'aria-label': `Acknowledge ${key} of ${run}`,
      onclick: () => this.signing.sign('Acknowledge', () => api.acknowledge(run, key)),
    }, 'Acknowledge'), note);
  }
}
