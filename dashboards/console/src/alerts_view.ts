// What was concluded, on what evidence, and what to do.
import { api, num } from './api';
import { caller, whyNot } from './caller';
import { Openings, fill, h, sayIfRefused } from './dom';
import { ago, duration, integer, number, stageName } from './format';
import { partlyJudged, stageBadge } from './runs_page';
import { findSignal } from './signals';
import type { Alert, Evidence, Run } from './wire';

export function isFiring(alert: Alert): boolean {
  return alert.last.state === 'ALERT_STATE_FIRING';
}

export function severityOf(alert: Alert): string {
  return alert.last.severity.replace('SEVERITY_', '').toLowerCase();
}

export function headName(layer: number, head: number): string {
  if (layer < 0) return 'the run as a whole';
  return head < 0 ? `layer ${layer}` : `layer ${layer} head ${head}`;
}

function etaText(run: Run, stage: number, alert: Alert, secondsPerStep: number): { steps: string; detail: string } {
  if (stage === 5) return { steps: 'none', detail: 'the loss has left its course' };
  if (run.ended) return { steps: '–', detail: 'the run has ended' };
  const eta = alert.last.eta;
  if (!eta?.known) return { steps: 'unknown', detail: 'no steady growth to go by' };
  const time = secondsPerStep > 0 ? ` · about ${duration(num(eta.steps) * secondsPerStep)}` : '';
  return { steps: `≈ ${integer(num(eta.steps))} steps`, detail: `80 %: ${integer(num(eta.lower_steps))} to ${integer(num(eta.upper_steps))}${time}` };
}

const severities = ['info', 'warning', 'critical'];

function rankOf(alert: Alert): number {
  return severities.indexOf(severityOf(alert));
}

/**
 * The firing alert that tells what to look at: one that names a head before one that does not, for a loss that
 * leaves its course is what the head has done to it; then the worst, then the earliest.
 */
export function leading(alerts: Alert[]): Alert | undefined {
  const names = (a: Alert) => Number(a.last.head >= 0 && rankOf(a) > 0);
  return alerts.filter(isFiring).sort((a, b) =>
    names(b) - names(a) || rankOf(b) - rankOf(a) || num(a.last.first_step) - num(b.last.first_step))[0];
}

/** Of the firing ones; 'info' if none fires. */
export function worstSeverity(alerts: Alert[]): string {
  return severities[Math.max(0, ...alerts.filter(isFiring).map(rankOf))];
}

/** Firing ones first and in the order in which they began: cause, then consequence. */
function inOrder(alerts: Alert[]): Alert[] {
  return [...alerts].sort((a, b) => Number(isFiring(b)) - Number(isFiring(a)) ||
    (isFiring(a) ? num(a.last.first_step) - num(b.last.first_step) : num(b.last.id) - num(a.last.id)));
}

/** The five-second answer: how ill, which head, how bad, how long left. */
export function verdict(run: Run, alerts: Alert[], secondsPerStep: number): HTMLElement {
  const firing = alerts.filter(isFiring);
  const worst = leading(alerts);
  if (!worst) {
    const silent = !run.ended && Date.now() / 1000 - num(run.last_report_unix_ns) / 1e9 > 600;
    const partly = partlyJudged(run);
    const well = [run.ended ? 'Ended' : '', partly ?? (run.ended ? '' : 'Healthy')].filter((word) => word !== '').join(' · ');
    return h('section', { class: `verdict ${silent ? 'warning' : partly !== null ? 'info' : 'healthy'}`, 'aria-label': 'Verdict' },
      h('div', { class: 'verdict-main' },
        h('div', { class: 'verdict-stage' }, silent ? 'Silent' : well),
        h('div', { class: 'verdict-head' }, silent ? `no report for ${duration(Date.now() / 1000 - num(run.last_report_unix_ns) / 1e9)}` : 'no alert fires')),
      silent ? h('p', {}, 'A silent run is not a healthy run: it has stopped, it hangs, or its client has disabled itself.') : null,
      notJudged(run));
  }
  const severity = worstSeverity(alerts);
  const stage = Math.max(...firing.map((a) => a.last.stage));
  const strongest = worst.last.evidence[0] as Evidence | undefined;
  const left = etaText(run, stage, worst, secondsPerStep);
  const more = worst.last.heads_total > 1 ? `+ ${worst.last.heads_total - 1} other heads` : '';
  return h('section', { class: `verdict ${severity}`, 'aria-label': 'Verdict' },
    h('div', { class: 'verdict-main' },
      h('div', { class: 'verdict-stage' }, stage > 0 ? `${severity} · stage ${stage} of 5: ${stageName(stage)}` : severity),
      h('div', { class: 'verdict-head' }, headName(worst.last.layer, worst.last.head), more ? h('span', { class: 'small' }, ` ${more}`) : null)),
    h('dl', { class: 'facts' },
      strongest ? h('div', {}, h('dt', {}, findSignal(strongest.signal).label), h('dd', {}, number(num(strongest.value))),
        h('dd', { class: 'note' }, `threshold ${number(num(strongest.threshold))}`)) : null,
      h('div', {}, h('dt', {}, 'Left'), h('dd', {}, left.steps), h('dd', { class: 'note' }, left.detail)),
      h('div', {}, h('dt', {}, 'Since'), h('dd', {}, `step ${integer(num(worst.last.first_step))}`),
        h('dd', { class: 'note' }, `cause: ${worst.last.cause || 'unknown'}`))),
    worst.last.advice ? h('p', { class: 'advice' }, h('strong', {}, 'Do: '), worst.last.advice) : null,
    notJudged(run));
}

/** What no rule can find in this run, since its signals do not arrive. */
function notJudged(run: Run): HTMLElement | null {
  if (partlyJudged(run) === null) return null;
  const missing = (run.judged?.families ?? []).filter((f) => f.layers < f.of)
    .map((f) => (f.name === 'loss' || f.layers === 0 ? f.name : `${f.name} in ${f.of - f.layers} of ${f.of} layers`));
  return h('p', {}, `Not judged, since its signals do not arrive: ${missing.join(', ')}. “python -m bellwether doctor” says why.`);
}

function evidenceTable(alert: Alert): HTMLElement {
  return h('table', { class: 'evidence' },
    h('thead', {}, h('tr', {}, ...['Evidence', 'Where', 'Value', 'Threshold', 'Healthy', 'Siblings', 'Since step']
      .map((t, i) => h('th', { scope: 'col', class: i >= 2 ? 'right' : '' }, t)))),
    h('tbody', {}, ...alert.last.evidence.map((e) => h('tr', {},
      h('th', { scope: 'row' }, findSignal(e.signal).label, h('div', { class: 'muted small' }, `${e.detector}${e.text ? `: ${e.text}` : ''}`)),
      h('td', {}, headName(e.layer, e.head)),
      h('td', { class: 'right' }, h('strong', {}, number(num(e.value)))),
      h('td', { class: 'right' }, number(num(e.threshold))),
      h('td', { class: 'right' }, Number.isNaN(num(e.baseline)) ? '–' : number(num(e.baseline))),
      h('td', { class: 'right' }, siblings(e)),
      h('td', { class: 'right' }, integer(num(e.first_step)))))));
}

/** What 98 % of the values of healthy runs of this kind lay between. */
function siblings({ siblings: band }: Evidence): string {
  return band ? `${number(num(band.p01))} to ${number(num(band.p99))} (${band.runs})` : '–';
}

export class AlertsView {
  readonly element = h('section', { class: 'panel alerts', 'aria-label': 'Alerts' });

  private readonly trouble = h('p', { class: 'state error', role: 'alert', hidden: true });
  private readonly list = h('div');
  private readonly openings = new Openings();

  constructor(private readonly show: (layer: number, head: number) => void, private readonly changed: () => void) {
    this.element.append(h('h2', {}, 'Alerts'), this.trouble, this.list);
  }

  draw(run: string, alerts: Alert[], asked: string | null): void {
    const why = alerts.some(isFiring) ? whyNot('acknowledge or silence an alert') : '';
    fill(this.list, why ? h('p', { class: 'muted' }, why) : null,
      alerts.length === 0 ? h('p', { class: 'state' }, 'No alert so far.') : null,
      ...inOrder(alerts).filter((a, i) => i < 50 || a.last.key === asked).map((a) => this.card(run, a, asked)));
  }

  private async ask(call: Promise<unknown>): Promise<void> {
    await sayIfRefused(this.trouble, call);
    this.changed();
  }

  /** Notifications stop; the alert stays. */
  private silencer(run: string, alert: Alert): HTMLElement | null {
    const until = num(alert.silenced_until_unix_ns) / 1e9;
    const left = until - Date.now() / 1000;
    if (left > 0) return h('span', { class: 'muted' }, `silenced for another ${duration(left)}`);
    if (!caller.may_act) return null;
    const picker = h('select', { 'aria-label': 'Silence this alert', onchange: () => {
      const seconds = Number(picker.value);
      if (seconds > 0) void this.ask(api.silence(run, alert.last.key, seconds));
    } }, ...([[0, 'Silence for…'], [3600, '1 hour'], [28800, '8 hours'], [86400, '1 day'], [604800, '1 week']] as const)
      .map(([seconds, words]) => h('option', { value: seconds }, words)));
    return picker;
  }

  private card(run: string, alert: Alert, asked: string | null): HTMLElement {
    const { last } = alert;
    const firing = isFiring(alert);
    return this.openings.details(`${run} ${last.key} ${firing}`, asked === null ? firing : last.key === asked, { class: `alert ${firing ? severityOf(alert) : 'resolved'}` },
      h('summary', {}, h('span', { class: `badge sev-${firing ? severityOf(alert) : 'resolved'}` }, firing ? severityOf(alert) : 'resolved'),
        last.stage > 0 ? stageBadge(last.stage, firing ? severityOf(alert) : 'resolved') : null,
        h('span', { class: 'alert-summary' }, last.summary.replace(`${run}: `, '')),
        h('span', { class: 'muted small' }, `${last.key} · ${ago(num(last.time_unix_ns))}`)),
      last.evidence.length > 0 ? h('div', { class: 'scroll' }, evidenceTable(alert)) : null,
      last.siblings ? h('p', { class: 'siblings' }, h('strong', {}, 'Siblings: '), last.siblings) : null,
      last.advice ? h('p', { class: 'advice' }, h('strong', {}, 'Do: '), last.advice) : null,
      h('div', { class: 'buttons' },
        last.layer >= 0 && last.head >= 0 ? h('button', { onclick: () => this.show(last.layer, last.head) }, `Show layer ${last.layer} head ${last.head}`) : null,
        alert.acknowledged
          ? h('span', { class: 'muted' }, `acknowledged by ${alert.acknowledged_by}`)
          : firing && caller.may_act ? h('button', { onclick: () => void this.ask(api.acknowledge(run, last.key)) }, 'Acknowledge') : null,
        firing ? this.silencer(run, alert) : null));
  }
}
