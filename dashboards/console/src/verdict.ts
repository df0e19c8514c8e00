// The state of a run in one look: how bad it is, which head, since when, how long is left, and what to press.
import { actionTitle, expiryWords, notAllowedWords, repairWords, scopeOf, underWay, underWayWords, waiting } from './action_words';
import { alertName, counts, firstAndRest, headName, isFiring, isMuted, leading, severityOf, worstSeverity } from './alerts';
import { api, num } from './api';
import { partlyJudged, silentFor, soundWords } from './badges';
import { caller } from './caller';
import { Openings, h, labelled, replaceIfOther } from './dom';
import { duration, integer, number, stageName, stageNames } from './format';
import { leftOf, toldWords } from './left';
import type { Checkpoint } from './run_events';
import { findSignal, termOf } from './signals';
import { Signing } from './signing';
import { silencer } from './silences';
import { info, oneStop, term } from './terms';
import { whoName } from './who';
import type { Action, Alert, Evidence, Run } from './wire';

/** What the verdict is made of. */
export interface VerdictFacts {
  run: Run;
  alerts: Alert[];
  actions: Action[];
  /** Seconds of a step, for an alert of which the server does not tell them. */
  secondsPerStep: number;
  /** The newest value of a piece of evidence, by evidenceKey(). */
  newest: Map<string, number>;
  /** The newest checkpoint of which the run has told, of before a step. */
  checkpoint: (step: number) => Checkpoint | null;
}

const evidenceMax = 4;
const roundingRules = new Set(['drift', 'ties', 'norm']);
/** Weights are pushed from this stage on. */
const harmBegins = 3;

export function evidenceKey({ signal, layer, head }: Evidence): string {
  return `${signal} ${layer} ${head}`;
}

/** What stands in the verdict: of the strongest head, and of a loss that is lost, or else of all, each signal of a place once. */
export function shownEvidence({ last }: Alert): Evidence[] {
  const found = new Map<string, Evidence>();
  const isLoss = (e: Evidence) => last.stage === 5 && e.signal === 'loss';
  const ofStrongest = last.evidence.filter((e) => (e.layer === last.layer && e.head === last.head) || isLoss(e));
  for (const piece of ofStrongest.length > 0 ? ofStrongest : last.evidence) {
    if (!found.has(evidenceKey(piece))) found.set(evidenceKey(piece), piece);
  }
  return [...found.values()].slice(0, evidenceMax);
}

function headline(stage: string, about: HTMLElement | null, ...what: (string | HTMLElement | null)[]): HTMLElement {
  return h('div', { class: 'verdict-main' },
    h('div', { class: 'verdict-stage' }, stage, about),
    h('div', { class: 'verdict-head' }, ...what));
}

function box(mood: string, ...children: (HTMLElement | null)[]): HTMLElement {
  return h('section', { class: `verdict ${mood}`, 'aria-label': 'Verdict' }, ...children);
}

function fact(name: string, about: HTMLElement | null, value: string, ...notes: (string | HTMLElement)[]): HTMLElement {
  const shown = notes.filter((note) => note !== '').map((note) => h('dd', { class: 'note' }, note));
  return h('div', {}, h('dt', {}, name, about), h('dd', {}, value), ...shown);
}

const railTerms = ['drift', 'ties', 'norm-growth', 'logits', 'loss-off-its-course'];

/** How far an illness of rounding has come, and where its harm begins. */
function rail(stage: number): HTMLElement {
  const stop = (name: string, i: number) => h('li', {
    class: i < stage ? 'passed' : i === stage ? 'here' : '', 'aria-current': i === stage ? 'step' : undefined,
  }, i === harmBegins ? h('span', { class: 'harm' }, 'harm begins here') : null,
  h('span', { class: 'stop' }, `${i} ${name}`, term(railTerms[i - 1], 'rail')));
  return h('ol', { class: 'rail', 'aria-label': 'Stages of the illness' }, ...stageNames.slice(1).map((name, i) => stop(name, i + 1)));
}

function harmWords(stage: number): string {
  if (stage === 0) return '';
  return stage < harmBegins ? 'no damage yet' : stage < 5 ? 'weights are damaged' : 'the loss is damaged';
}

/** "Drift ratio 87.6 when judged, now 91 · threshold 4 · healthy 1.02". */
function evidenceLine(e: Evidence, { last }: Alert, newest: number | undefined): HTMLElement {
  const [where, healthy] = [headName(e.layer, e.head), num(e.baseline)];
  const parts = [
    `${number(num(e.value))} when judged${newest === undefined ? '' : `, now ${number(newest)}`}`,
    `threshold ${number(num(e.threshold))}`,
    Number.isNaN(healthy) ? '' : `healthy ${number(healthy)}`,
    e.layer === last.layer && e.head === last.head ? '' : where,
  ];
  const { label, help } = findSignal(e.signal);
  const about = help ? info(label, help, termOf(e.signal), `why ${where}`) : null;
  return h('li', {}, h('strong', {}, label), about,
    ` ${parts.filter((part) => part !== '').join(' · ')}`);
}

/** Of the alert that ended last: what it was, and what was done about it. */
function before(alerts: Alert[], actions: Action[]): HTMLElement | null {
  const over = alerts.filter((a) => !isFiring(a) && severityOf(a) !== 'info');
  const [alert] = over.sort((a, b) => num(b.last.step) - num(a.last.step));
  if (!alert) return null;
  const { last } = alert;
  const repair = repairWords(actions, last.key, num(last.first_step));
  const words = `${last.rule} in ${headName(last.layer, last.head)} since step ${integer(num(last.first_step))}, ` +
    `over at step ${integer(num(last.step))}${repair ? `. Done: ${repair}` : ''}.`;
  return h('p', {}, h('strong', {}, 'Before: '), words);
}

/** No alert counts: the run is healthy, young, silent, ended, or judged in part. */
function calm({ run, alerts, actions }: VerdictFacts): HTMLElement {
  const silent = silentFor(run);
  if (silent !== null) {
    const why = 'A silent run is not a healthy run: it has stopped, it hangs, or its client has disabled itself.';
    return box('warning', headline('Silent', term('silent'), `no report for ${duration(silent)}`), h('p', {}, why), notJudged(run));
  }
  const partly = partlyJudged(run);
  const muted = alerts.filter(isFiring).length;
  const noAlert = muted === 0 ? 'no alert fires' : `no alert fires but ${muted} false alarm${muted === 1 ? '' : 's'}`;
  const sound = soundWords(run);
  const said = partly ?? (run.ended ? sound : sound[0].toUpperCase() + sound.slice(1));
  const hidden = isMuted(alerts);
  const words = [run.ended ? 'Ended' : '', hidden ? 'Muted' : said].filter((word) => word !== '');
  const isHealthy = !hidden && (run.judged === undefined || run.judged.text === 'healthy');
  const about = hidden ? term('false-alarm', 'verdict') : isHealthy ? null : term('judged');
  return box(hidden ? 'muted' : isHealthy ? 'healthy' : 'info', headline(words.join(' · '), about, noAlert),
    before(alerts, actions), notJudged(run));
}

/** What no rule can find in this run, since its signals do not arrive. */
function notJudged(run: Run): HTMLElement | null {
  if (partlyJudged(run) === null) return null;
  const missing = (run.judged?.families ?? []).filter((f) => f.layers < f.of)
    .map((f) => (f.name === 'loss' || f.layers === 0 ? f.name : `${f.name} in ${f.of - f.layers} of ${f.of} layers`));
  return h('p', {}, `Not judged, since its signals do not arrive: ${missing.join(', ')}. “python -m bellwether doctor” says why.`);
}

function leftFact(run: Run, stage: number, alert: Alert, secondsPerStep: number): HTMLElement {
  if (stage === 5) return fact('Left', term('left'), 'none', 'the loss has left its course');
  if (run.ended) return fact('Left', term('left'), '–', 'the run has ended');
  const left = leftOf(run, alert, secondsPerStep);
  if (!left) return fact('Left', term('left'), 'unknown', 'no steady growth to go by');
  const time = left.time ? ` · about ${left.time}, until ${left.until}` : '';
  return fact('Left', term('left'), `≈ ${left.steps} steps`, `80 %: ${left.interval}${time}`);
}

/** Which checkpoint an advice means that speaks of one; "" where it speaks of none but one to be saved. */
function checkpointWords({ last }: Alert, newest: (step: number) => Checkpoint | null): string {
  if (!last.advice.replace(/save a checkpoint/gi, '').includes('checkpoint')) return '';
  const told = /from before step ([\d,]+)/.exec(last.advice);
  const step = told ? Number(told[1].replace(/,/g, '')) : num(last.first_step);
  const found = newest(step);
  const which = `the last one from before step ${integer(step)}`;
  return found ? `${which} was saved at step ${integer(found.step)}${found.text ? ` (${found.text})` : ''}.` : `${which}.`;
}

export class VerdictView {
  readonly element: HTMLElement;
  private readonly place = h('div', { 'aria-live': 'polite' }, h('p', { class: 'state' }, 'Loading the run…'));
  private readonly signing: Signing;
  private readonly openings = new Openings();

  /** `judge`: asks why an alert is a false alarm. */
  constructor(private readonly name: string, private readonly judge: (key: string) => void, changed: () => void) {
    this.signing = new Signing('verdict-who', changed);
    this.element = h('div', { class: 'verdict-box' }, this.signing.element, this.place);
  }

  /** What is said instead. */
  say(...words: (string | HTMLElement)[]): void {
    replaceIfOther(this.place, h('p', { class: 'state error' }, ...words));
  }

  draw(facts: VerdictFacts): void {
    const alert = leading(facts.alerts);
    replaceIfOther(this.place, alert ? this.card(facts, alert) : calm(facts));
  }

  /** To what can be done first; false where nothing can. */
  toDeed(): boolean {
    const first = this.place.querySelector<HTMLElement>('.deeds button.primary') ??
      this.place.querySelector<HTMLElement>('.deeds > :is(button, a, p[tabindex]):not(.term), .deeds > details > summary');
    first?.focus();
    return first !== null;
  }

  private card({ run, alerts, actions, secondsPerStep, newest, checkpoint }: VerdictFacts, alert: Alert): HTMLElement {
    const { last } = alert;
    const severity = worstSeverity(alerts);
    const stage = Math.max(...alerts.filter(counts).map((a) => a.last.stage));
    const more = last.heads_total - 1;
    const others = more > 0 ? h('span', { class: 'small' }, ` + ${more} other head${more === 1 ? '' : 's'} in this alert`) : null;
    const title = [severity, stage > 0 ? `stage ${stage} of 5: ${stageName(stage)}` : '', harmWords(stage)];
    const isRounding = stage > 0 && (roundingRules.has(last.rule) || last.cause === 'rounding drift');
    return oneStop(box(`${severity}${run.ended ? ' ended' : ''}`,
      headline(title.filter((word) => word !== '').join(' · '), term(stage > 0 ? 'stage' : 'severity', 'verdict'),
        headName(last.layer, last.head), others),
      h('dl', { class: 'facts' },
        leftFact(run, stage, alert, secondsPerStep),
        fact('Since', null, `step ${integer(num(last.first_step))}`, toldWords(run, alert),
          h('span', {}, `cause: ${last.cause || 'unknown'}`, term('cause', 'verdict')))),
      isRounding ? rail(stage) : null,
      this.deeds(run, alert, actions),
      h('ul', { class: 'why', 'aria-label': 'Evidence of the verdict' },
        ...shownEvidence(alert).map((e) => evidenceLine(e, alert, newest.get(evidenceKey(e))))),
      this.advice(alert, checkpointWords(alert, checkpoint)),
      notJudged(run)));
  }

  /** What comes first; the rest when it is asked for. */
  private advice({ last }: Alert, checkpoint: string): HTMLElement | null {
    const [first, rest] = firstAndRest(last);
    if (first === '') return null;
    const line = h('p', { class: 'advice' }, h('strong', {}, 'Do: '), first);
    const which = labelled('Checkpoint', checkpoint);
    if (rest === '') return h('div', { class: 'do' }, line, which);
    const more = this.openings.details(`advice ${last.key}`, false, { class: 'more' },
      h('summary', { 'data-focus': 'advice' }, 'more'), h('p', { class: 'advice' }, rest));
    return h('div', { class: 'do' }, line, which, more);
  }

  /** What can be done from here: one thing first. */
  private deeds(run: Run, alert: Alert, actions: Action[]): HTMLElement {
    const { key } = alert.last;
    const proposal = run.ended ? undefined : waiting(actions, key);
    const repair = repairWords(actions, key, num(alert.last.first_step));
    const mayAct = caller.may_act;
    // What is proposed stops the push; where the advice is to stop, it is too late for that alone.
    const isLate = alert.last.advice.startsWith('Stop');
    const refused = proposal ? notAllowedWords(proposal) : '';
    const approve = proposal && mayAct && refused === '' ? this.approver(proposal, !isLate) : null;
    const approved = run.ended ? undefined : underWay(actions, key);
    const proposed = refused !== '' ? h('p', { class: 'refused' }, refused)
      : proposal && !mayAct ? h('span', {}, `Proposed: ${actionTitle(proposal)}, ${scopeOf(proposal)}`) : null;
    const expiry = proposal ? expiryWords(proposal) : '';
    const price = `Cost: ${proposal?.cost ?? ''}${expiry ? ` · ${expiry}` : ''}`;
    const cost = proposal?.cost && refused === '' ? h('span', { class: 'cost' }, price) : null;
    const name = alertName(alert);
    const silence = (seconds: number) =>
      this.signing.sign('Silence', () => api.silence(this.name, key, seconds));
    return h('div', { class: 'deeds', 'data-alert': key, 'data-home': 'verdict', tabindex: -1 },
      repair ? h('p', {}, h('strong', {}, 'Repair: '), repair, term('under-repair', 'verdict')) : null,
      approved ? h('p', { class: 'under-way', tabindex: -1, 'data-focus': 'approve' }, underWayWords(approved)) : null,
      approve ?? proposed, proposal ? term('proposal', 'verdict') : null, cost,
      this.acknowledger(alert, (approve === null || isLate) && !approved && !run.ended),
      silencer(alert, mayAct, this.openings, silence),
      mayAct ? h('button', { 'data-focus': 'false alarm', onclick: () => this.judge(key) }, 'False alarm') : null,
      this.signing.shown(),
      h('a', { href: `#/runbook/${name.toLowerCase()}?run=${encodeURIComponent(this.name)}` }, `Runbook ${name}`));
  }

  private approver(action: Action, isFirst: boolean): HTMLElement {
    return h('button', {
      class: isFirst ? 'primary' : '', 'data-focus': 'approve', 'data-action': action.id, onclick: () =>
        this.signing.sign(`Approve: ${actionTitle(action)}`, () => api.decide('Approve', this.name, action.id, whoName())),
    }, `Approve: ${actionTitle(action)}, ${scopeOf(action)}`);
  }

  private acknowledger(alert: Alert, isFirst: boolean): HTMLElement | null {
    if (alert.acknowledged) return h('span', { class: 'muted' }, `acknowledged by ${alert.acknowledged_by}`);
    if (!caller.may_act) return null;
    const isPrimary = isFirst && severityOf(alert) !== 'info';
    return h('button', {
      class: isPrimary ? 'primary' : '', 'data-focus': 'acknowledge',
      onclick: () => this.signing.sign('Acknowledge', () => api.acknowledge(this.name, alert.last.key)),
    }, 'Acknowledge');
  }
}
