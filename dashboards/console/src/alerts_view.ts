// What was concluded, on what evidence, and what to do.
import { headName, inOrder, isFiring, severityOf } from './alerts';
import { api, num } from './api';
import { stageBadge } from './badges';
import { caller, whyNot } from './caller';
import { Openings, fill, h, sayIfRefused } from './dom';
import { ago, duration, integer, number } from './format';
import { findSignal } from './signals';
import type { Alert, Evidence } from './wire';

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
