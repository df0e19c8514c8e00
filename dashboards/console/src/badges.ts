// What is said of a run wherever one is listed: its stage, what it is judged by, that it was imported.
import { num } from './api';
import { h } from './dom';
import { number, stageName } from './format';
import type { Run } from './wire';

/** A recording: it tells of the past, and its alerts notified no one. */
export function importedBadge(run: Run): HTMLElement | null {
  return run.imported ? h('span', { class: 'badge stage-ended', title: 'A recording that was imported' }, 'imported') : null;
}

/** In the colour of the alerts that say so; `stage` is above 0. */
export function stageBadge(stage: number, severity: string): HTMLElement {
  return h('span', { class: `badge sev-${severity}` }, `${stage} · ${stageName(stage)}`);
}

/** "Healthy" only if everything is judged, behind the first steps, and nothing fires that was called a false alarm. */
export function runBadge(run: Run, severity: string, isMuted: boolean): HTMLElement {
  if (run.stage > 0) return stageBadge(run.stage, severity);
  const partly = partlyJudged(run);
  const words = [run.ended ? 'ended' : '', isMuted ? 'muted' : partly ?? soundWords(run)].filter((word) => word !== '');
  if (isMuted) return h('span', { class: 'badge stage-ended', title: 'What fires was called a false alarm' }, words.join(' · '));
  const isHealthy = partly === null && soundWords(run) === 'healthy';
  return h('span', { class: `badge ${run.ended ? 'stage-ended' : isHealthy ? 'stage-0' : 'sev-info'}` }, words.join(' · '));
}

/** What is said in place of "healthy": "judged by: leak"; null if the run is judged in full. */
export function partlyJudged(run: Run): string | null {
  return run.judged && !run.judged.whole ? run.judged.text : null;
}

/** What is said of a run that is judged in full and has no alert: "healthy", "nothing found in 5 steps"; '' once it has ended so. */
export function soundWords(run: Run): string {
  const said = run.judged?.text || 'healthy';
  return run.ended && said === 'healthy' ? '' : said;
}

/** The run in a list that holds text alone: "name · imported · judged by: leak". */
export function runWords(run: Run): string {
  const judged = run.stage > 0 ? null : partlyJudged(run);
  return [run.description.name, run.imported ? 'imported' : null, judged].filter(Boolean).join(' · ');
}

/** NaN is a loss that was so; one that the run has never reported is a dash. */
export function lossWords(run: Run): string {
  const isKnown = !Number.isNaN(num(run.loss)) || run.signals.includes('loss');
  return isKnown ? number(num(run.loss)) : '–';
}

const silentAfterSeconds = 600;

/** For how many seconds a run that has not ended has been silent; null if it reports. */
export function silentFor(run: Run): number | null {
  const seconds = Date.now() / 1000 - num(run.last_report_unix_ns) / 1e9;
  return !run.ended && seconds > silentAfterSeconds ? seconds : null;
}
