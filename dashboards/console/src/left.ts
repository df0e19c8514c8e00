// When an alert was first told, how long is left, and when that ends: in steps, in time and by the clock.
import { num } from './api';
import { ago, clock, duration, integer } from './format';
import type { Alert, Run } from './wire';

/** Seconds of a step as the run has gone so far; 0 = not known. */
export function meanStepSeconds(run: Run): number {
  const elapsed = num(run.last_report_unix_ns) - num(run.started_unix_ns);
  return num(run.step) > 0 && elapsed > 0 ? elapsed / 1e9 / num(run.step) : 0;
}

/** When a step was, or will be, in ms since 1970. */
function timeOf(run: Run, step: number, secondsPerStep: number): number {
  return num(run.last_report_unix_ns) / 1e6 + (step - num(run.step)) * 1000 * secondsPerStep;
}

/** "first told 20:08, 36 min ago": when people could first know. '' of a recording, whose alerts are of when it was imported. */
export function toldWords(run: Run, { first_time_unix_ns }: Alert): string {
  const at = num(first_time_unix_ns);
  return at <= 0 || run.imported ? '' : `first told ${clock(at / 1e6)}, ${ago(at)}`;
}

export interface Left { steps: string; interval: string; time: string; until: string }

/** What is left of the steps that the alert told; null = it tells of none. Steps that have passed since are taken off. */
export function leftOf(run: Run, { last }: Alert, secondsPerStep: number): Left | null {
  const { eta } = last;
  if (!eta?.known) return null;
  const passed = Math.max(0, num(run.step) - num(last.step));
  const [steps, low, high] = [eta.steps, eta.lower_steps, eta.upper_steps].map((value) => Math.max(0, num(value) - passed));
  const seconds = num(eta.step_seconds) || secondsPerStep;
  return {
    steps: integer(steps), interval: `${integer(low)} to ${integer(high)}`,
    time: seconds > 0 ? duration(Math.max(1, steps * seconds)) : '',
    until: seconds > 0 ? clock(timeOf(run, num(run.step) + steps, seconds)) : '',
  };
}
