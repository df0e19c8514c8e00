// The state of a run in one look.
import { headName, isFiring, leading, worstSeverity } from './alerts';
import { num } from './api';
import { partlyJudged } from './badges';
import { h } from './dom';
import { duration, integer, number, stageName } from './format';
import { findSignal } from './signals';
import type { Alert, Evidence, Run } from './wire';

function etaText(run: Run, stage: number, alert: Alert, secondsPerStep: number): { steps: string; detail: string } {
  if (stage === 5) return { steps: 'none', detail: 'the loss has left its course' };
  if (run.ended) return { steps: '–', detail: 'the run has ended' };
  const eta = alert.last.eta;
  if (!eta?.known) return { steps: 'unknown', detail: 'no steady growth to go by' };
  const time = secondsPerStep > 0 ? ` · about ${duration(num(eta.steps) * secondsPerStep)}` : '';
  return { steps: `≈ ${integer(num(eta.steps))} steps`, detail: `80 %: ${integer(num(eta.lower_steps))} to ${integer(num(eta.upper_steps))}${time}` };
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
