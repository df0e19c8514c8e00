// Alerts by their state and severity, and which of them to look at first.
import { num } from './api';
import type { Alert } from './wire';

export function isFiring(alert: Alert): boolean {
  return alert.last.state === 'ALERT_STATE_FIRING';
}

/** It fires, and nobody has called it a false alarm: it counts in what is said of the run. */
export function counts(alert: Alert): boolean {
  return isFiring(alert) && !alert.muted;
}

/** All that fires was called a false alarm, and something does: no run is called healthy for that. */
export function isMuted(alerts: Alert[]): boolean {
  return alerts.some(isFiring) && !alerts.some(counts);
}

export function severityOf(alert: Alert): string {
  return alert.last.severity.replace('SEVERITY_', '').toLowerCase();
}

export function headName(layer: number, head: number): string {
  if (layer < 0) return 'the run as a whole';
  return head < 0 ? `layer ${layer}` : `layer ${layer} head ${head}`;
}

/** As notifications and runbooks name them (a test compares). */
const names: Record<string, string> = {
  drift: 'BellwetherDriftGrowing', ties: 'BellwetherTiesAndBiasRising', norm: 'BellwetherSpectralNormGrowing',
  logits: 'BellwetherLogitsGrowing', loss: 'BellwetherDiverging', gradient: 'BellwetherGradientJump',
  nonfinite: 'BellwetherNonFinite', disagreement: 'BellwetherWeightsDisagree', silent: 'BellwetherRanksMissing',
  overhead: 'BellwetherHookOverBudget', kernel: 'BellwetherKernelWrong', arithmetic: 'BellwetherArithmeticWrong',
  own: 'BellwetherOwnSignal', frozen: 'BellwetherParametersFrozen', experts: 'BellwetherExpertsDead',
  sequences: 'BellwetherSequencesOdd', parameters: 'BellwetherParametersOutOfPast', corruption: 'BellwetherCorruption',
  learning: 'BellwetherNotLearning',
};

export function alertName(alert: Alert): string {
  return names[alert.last.rule] ?? 'BellwetherAlert';
}

/** What to do first, and what more the advice says. */
export function firstAndRest({ do_first, advice }: Alert['last']): [first: string, rest: string] {
  if (do_first === '') return [advice, ''];  // A server of before says its advice only.
  return advice.startsWith(do_first) ? [do_first, advice.slice(do_first.length).trim()] : [do_first, advice];
}

/** What alerts hold a signal against, firing ones first; undefined = nothing. */
export function toldThreshold(alerts: Alert[], signal: string): number | undefined {
  const all = [...alerts.filter(counts), ...alerts].flatMap((a) => a.last.evidence);
  const told = all.find((e) => e.signal === signal && Number.isFinite(num(e.threshold)) && num(e.threshold) !== 0);
  return told && Math.abs(num(told.threshold));
}

const severities = ['info', 'warning', 'critical'];

function rankOf(alert: Alert): number {
  return severities.indexOf(severityOf(alert));
}

/**
 * The alert that counts and tells what to look at: one that names a head before one that does not, for a loss that
 * leaves its course is what the head has done to it; then the worst, then the earliest.
 */
export function leading(alerts: Alert[]): Alert | undefined {
  const names = (a: Alert) => Number(a.last.head >= 0 && rankOf(a) > 0);
  return alerts.filter(counts).sort((a, b) =>
    names(b) - names(a) || rankOf(b) - rankOf(a) || num(a.last.first_step) - num(b.last.first_step))[0];
}

/** Of those that count; 'info' if none does. */
export function worstSeverity(alerts: Alert[]): string {
  return severities[Math.max(0, ...alerts.filter(counts).map(rankOf))];
}

/** Firing ones first and in the order in which they began: cause, then consequence. False alarms stand behind them. */
export function inOrder(alerts: Alert[]): Alert[] {
  return [...alerts].sort((a, b) => Number(counts(b)) - Number(counts(a)) || Number(isFiring(b)) - Number(isFiring(a)) ||
    (isFiring(a) ? num(a.last.first_step) - num(b.last.first_step) : num(b.last.id) - num(a.last.id)));
}
