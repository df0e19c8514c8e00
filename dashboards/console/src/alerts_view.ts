// What was concluded, on what evidence, and what to do.
import { counts, firstAndRest, headName, inOrder, isFiring, leading, severityOf } from './alerts';
import { api, num } from './api';
import { stageBadge } from './badges';
import { caller, whyNot } from './caller';
import { Openings, fill, focusIn, h, labelled, tableHead } from './dom';
import { ago, integer, number } from './format';
import { findSignal, termOf } from './signals';
import { Signing } from './signing';
import { silencer } from './silences';
import { info, oneStop, term } from './terms';
import type { Alert, Evidence } from './wire';

const shownMax = 50;

function evidenceRow(key: string, e: Evidence): HTMLElement {
  const detector = `${e.detector}${e.text ? `: ${e.text}` : ''}`;
  const baseline = num(e.baseline);
  const { label, help } = findSignal(e.signal);
  const about = help ? info(label, help, termOf(e.signal), `${key} ${e.layer} ${e.head} ${e.detector}`) : null;
  return h('tr', {},
    h('th', { scope: 'row' }, label, about, h('div', { class: 'muted small' }, detector)),
    h('td', {}, headName(e.layer, e.head)),
    h('td', { class: 'right' }, h('strong', {}, number(num(e.value)))),
    h('td', { class: 'right' }, number(num(e.threshold))),
    h('td', { class: 'right' }, Number.isNaN(baseline) ? '–' : number(baseline)),
    h('td', { class: 'right' }, siblings(e)),
    h('td', { class: 'right' }, integer(num(e.first_step))));
}

function evidenceTable(key: string, evidence: Evidence[]): HTMLElement | null {
  if (evidence.length === 0) return null;
  const head = tableHead([
    ['Evidence', term('evidence', key)], 'Where', 'When judged', ['Threshold', term('threshold', key)],
    ['Healthy', term('healthy-value', key)], ['Siblings', term('siblings', key)], 'Since step',
  ], 2);
  const table = h('table', { class: 'evidence' }, head, h('tbody', {}, ...evidence.map((e) => evidenceRow(key, e))));
  return h('div', { class: 'scroll', role: 'group', tabindex: 0, 'aria-label': 'Evidence' }, table);  // Scrolled by keyboard, too.
}

/** The interval that held 98 % of the values of healthy runs of this kind. */
function siblings({ siblings: band }: Evidence): string {
  return band ? `${number(num(band.p01))} to ${number(num(band.p99))} (${band.runs})` : '–';
}

/** The line that stays when the alert is closed. */
function summary(run: string, alert: Alert): HTMLElement {
  const { last } = alert;
  const mood = moodOf(alert);
  return h('summary', {},
    h('span', { class: `badge sev-${mood}` }, mood.replace('-', ' ')),
    last.stage > 0 ? stageBadge(last.stage, mood) : null,
    h('span', { class: 'alert-summary' }, last.summary.replace(`${run}: `, '')),
    h('span', { class: 'muted small' }, `${last.key} · as of step ${integer(num(last.step))}, ${ago(num(last.time_unix_ns))}`));
}

function moodOf(alert: Alert): string {
  return !isFiring(alert) ? 'resolved' : alert.muted ? 'false-alarm' : severityOf(alert);
}

export class AlertsView {
  readonly element = h('section', { class: 'panel alerts', 'aria-label': 'Alerts' });

  private readonly signing: Signing;
  private readonly list = h('div');
  private readonly openings = new Openings();
  // Of the alert that is being called a false alarm. One form, so that news does not take away what is typed.
  private readonly reason = h('input', { id: 'false-alarm-reason', type: 'text', maxlength: 256, required: true, autocomplete: 'off' });
  private readonly form = h('form', { class: 'buttons', onsubmit: (event) => this.mark(event), onkeydown: (event) => this.escape(event) },
    h('label', { for: 'false-alarm-reason' }, 'Why is it a false alarm?'), this.reason,
    h('button', { type: 'submit' }, 'Mark'), h('button', { type: 'button', onclick: () => this.judge('') }, 'Cancel'));
  private judged = '';  // Its key; '' = none.
  private drawn: [run: string, alerts: Alert[], asked: string | null] = ['', [], null];

  constructor(private readonly show: (layer: number, head: number) => void, changed: () => void) {
    this.signing = new Signing('alerts-who', changed);
    this.element.append(h('h2', {}, 'Alerts'), this.signing.element, this.list);
  }

  /** `asked`: the key of the alert that is shown open. */
  draw(run: string, alerts: Alert[], asked: string | null): void {
    if (run !== this.drawn[0]) this.judged = '';
    this.drawn = [run, alerts, asked];
    const focus = focusIn(this.list);
    const why = alerts.some(isFiring) ? whyNot('acknowledge or silence an alert, or call it a false alarm,') : '';
    const shown = inOrder(alerts).filter((a, i) => i < shownMax || a.last.key === asked);
    fill(this.list,
      why ? h('p', { class: 'muted' }, why) : null,
      alerts.length === 0 ? h('p', { class: 'state' }, 'No alert so far.') : null,
      ...shown.map((a) => this.card(run, a, asked)));
    focus();
  }

  private silencer(run: string, alert: Alert): HTMLElement | null {
    const silence = (seconds: number) =>
      this.signing.sign('Silence', () => api.silence(run, alert.last.key, seconds));
    return silencer(alert, caller.may_act, this.openings, silence);
  }

  private acknowledger(run: string, alert: Alert): HTMLElement | null {
    if (alert.acknowledged) return h('span', { class: 'muted' }, `acknowledged by ${alert.acknowledged_by}`);
    if (!isFiring(alert) || !caller.may_act) return null;
    const { key } = alert.last;
    const acknowledge = () => this.signing.sign('Acknowledge', () => api.acknowledge(run, key));
    return h('button', { 'data-focus': `acknowledge ${key}`, onclick: acknowledge }, 'Acknowledge');
  }

  /** What was said of it, and the way to say it or to take it back. */
  private falseAlarm(run: string, { last: { key }, false_alarm: said, muted }: Alert): HTMLElement | null {
    const button = (words: string, onclick: () => void) =>
      (caller.may_act ? h('button', { 'data-focus': `false-alarm ${key}`, onclick }, words) : null);
    if (said && muted) {
      const words = `false alarm${said.by ? `, by ${said.by}` : ''}: ${said.reason}`;
      const undo = button('Undo false alarm', () => this.signing.sign('Undo false alarm', () => api.undoFalseAlarm(run, key)));
      return h('span', { class: 'pair' }, h('span', { class: 'muted' }, words), undo);
    }
    return key === this.judged ? this.form : button('False alarm', () => this.signing.named('Go on', () => this.judge(key)));
  }

  /** What a milder one was called is no judgment of this one. */
  private calledBefore({ false_alarm: said, muted }: Alert): HTMLElement | null {
    if (!said || muted) return null;
    const severity = said.severity.replace('SEVERITY_', '').toLowerCase();
    const by = said.by ? ` by ${said.by}` : '';
    return labelled('False alarm', `it was called one as ${severity}${by} (${said.reason}), and is worse now`);
  }

  /** Opens the alert's card with the form that asks why it is a false alarm; asks for a name before. */
  judgeFirst(key: string): void {
    this.signing.named('Go on', () => {
      const card = this.list.querySelector<HTMLDetailsElement>(`[data-home="${CSS.escape(key)}"]`);
      if (card) card.open = true;
      this.judge(key);
    });
  }

  /** Opens the form in the alert's card, or closes it. */
  private judge(key: string): void {
    const before = this.judged;
    this.judged = key;
    this.reason.value = '';
    this.draw(...this.drawn);
    if (key) this.reason.focus();
    else this.list.querySelector<HTMLElement>(`[data-focus="false-alarm ${CSS.escape(before)}"]`)?.focus();
  }

  private mark(event: Event): void {
    event.preventDefault();
    const [run] = this.drawn;
    const key = this.judged;
    const reason = this.reason.value.trim();
    if (reason === '') return;
    this.judge('');
    this.signing.sign('Mark', () => api.markFalseAlarm(run, key, reason));
  }

  private escape(event: Event): void {
    if ((event as KeyboardEvent).key === 'Escape') this.judge('');
  }

  /** What to do; of the alert in the verdict that is said there. */
  private advice(alert: Alert): (HTMLElement | null)[] {
    if (alert === leading(this.drawn[1])) return [];
    const [first, rest] = firstAndRest(alert.last);
    if (rest === '') return [labelled('Do', first)];
    const more = this.openings.details(`advice ${alert.last.key}`, false, { class: 'more' },
      h('summary', {}, 'more'), h('p', { class: 'advice' }, rest));
    return [labelled('Do', first), more];
  }

  private shower({ last: { layer, head } }: Alert): HTMLElement | null {
    if (layer < 0 || head < 0) return null;
    return h('button', { onclick: () => this.show(layer, head) }, `Show layer ${layer} head ${head}`);
  }

  private card(run: string, alert: Alert, asked: string | null): HTMLElement {
    const { last } = alert;
    const firing = isFiring(alert);
    const open = asked === null ? counts(alert) : last.key === asked;
    const falseAlarm = this.falseAlarm(run, alert);
    return oneStop(this.openings.details(`${run} ${last.key} ${firing}`, open, { class: `alert ${moodOf(alert)}`, 'data-home': last.key },
      summary(run, alert),
      evidenceTable(last.key, last.evidence),
      labelled('Siblings', last.siblings, 'siblings'),
      ...this.advice(alert),
      this.calledBefore(alert),
      h('div', { class: 'buttons' },
        this.shower(alert), this.acknowledger(run, alert), firing && !alert.muted ? this.silencer(run, alert) : null,
        falseAlarm, falseAlarm ? term('false-alarm', last.key) : null)));
  }
}
