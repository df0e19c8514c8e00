// The state of a run in one look: how bad it is, which head, and how long is left.
import { counts, headName, isFiring, leading, worstSeverity } from './alerts';
import { num } from './api';
import { partlyJudged, silentFor } from './badges';
import { h, labelled } from './dom';
import { duration, integer, number, stageName } from './format';
import { findSignal } from './signals';
import type { Alert, Evidence, Run } from './wire';

/** `measured`: seconds of a step, for an alert of which the server does not tell them. */
function stepsLeft(run: Run, stage: number, alert: Alert, measured: number): { steps: string; detail: string } {
  if (stage === 5) return { steps: 'none', detail: 'the loss has left its course' };
  if (run.ended) return { steps: '–', detail: 'the run has ended' };
  const eta = alert.last.eta;
  if (!eta?.known) return { steps: 'unknown', detail: 'no steady growth to go by' };
  const secondsPerStep = num(eta.step_seconds) || measured;
  const time = secondsPerStep > 0 ? ` · about ${duration(num(eta.steps) * secondsPerStep)}` : '';
  const interval = `${integer(num(eta.lower_steps))} to ${integer(num(eta.upper_steps))}`;
  return { steps: `≈ ${integer(num(eta.steps))} steps`, detail: `80 %: ${interval}${time}` };
}

function headline(stage: string, ...what: (string | HTMLElement | null)[]): HTMLElement {
  return h('div', { class: 'verdict-main' },
    h('div', { class: 'verdict-stage' }, stage),
    h('div', { class: 'verdict-head' }, ...what));
}

function box(mood: string, ...children: (HTMLElement | null)[]): HTMLElement {
  return h('section', { class: `verdict ${mood}`, 'aria-label': 'Verdict' }, ...children);
}

function fact(name: string, value: string, note: string): HTMLElement {
  return h('div', {}, h('dt', {}, name), h('dd', {}, value), h('dd', { class: 'note' }, note));
}

function evidenceFact(strongest: Evidence | undefined): HTMLElement | null {
  if (!strongest) return null;
  const threshold = `threshold ${number(num(strongest.threshold))}`;
  return fact(findSignal(strongest.signal).label, number(num(strongest.value)), threshold);
}

/** No alert counts: the run is healthy, silent, ended, or judged in part. */
function calm(run: Run, alerts: Alert[]): HTMLElement {
  const silent = silentFor(run);
  if (silent !== null) {
    const why = 'A silent run is not a healthy run: it has stopped, it hangs, or its client has disabled itself.';
    return box('warning', headline('Silent', `no report for ${duration(silent)}`), h('p', {}, why), notJudged(run));
  }
  const partly = partlyJudged(run);
  const muted = alerts.filter(isFiring).length;
  const noAlert = muted === 0 ? 'no alert fires' : `no alert fires but ${muted} false alarm${muted === 1 ? '' : 's'}`;
  const words = [run.ended ? 'Ended' : '', partly ?? (run.ended ? '' : 'Healthy')].filter((word) => word !== '');
  return box(partly !== null ? 'info' : 'healthy', headline(words.join(' · '), noAlert), notJudged(run));
}

export function verdict(run: Run, alerts: Alert[], measured: number): HTMLElement {
  const alert = leading(alerts);
  if (!alert) return calm(run, alerts);
  const { last } = alert;
  const severity = worstSeverity(alerts);
  const stage = Math.max(...alerts.filter(counts).map((a) => a.last.stage));
  const left = stepsLeft(run, stage, alert, measured);
  const others = last.heads_total > 1 ? h('span', { class: 'small' }, ` + ${last.heads_total - 1} other heads`) : null;
  return box(severity,
    headline(stage > 0 ? `${severity} · stage ${stage} of 5: ${stageName(stage)}` : severity, headName(last.layer, last.head), others),
    h('dl', { class: 'facts' },
      evidenceFact(last.evidence[0]),
      fact('Left', left.steps, left.detail),
      fact('Since', `step ${integer(num(last.first_step))}`, `cause: ${last.cause || 'unknown'}`)),
    labelled('Do', last.advice),
    notJudged(run));
}

/** What no rule can find in this run, since its signals do not arrive. */
function notJudged(run: Run): HTMLElement | null {
  if (partlyJudged(run) === null) return null;
  const missing = (run.judged?.families ?? []).filter((f) => f.layers < f.of)
    .map((f) => (f.name === 'loss' || f.layers === 0 ? f.name : `${f.name} in ${f.of - f.layers} of ${f.of} layers`));
  return h('p', {}, `Not judged, since its signals do not arrive: ${missing.join(', ')}. “python -m bellwether doctor” says why.`);
}
