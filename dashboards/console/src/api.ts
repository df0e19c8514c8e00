// The calls of service Query that the page makes, as JSON.
import { whoName } from './who';
import type { Query, Real, SeriesId, Severity } from './wire';

/** A number as JSON has it: 64-bit integers, NaN and infinities are strings there. */
export function num(value: Real | string | undefined): number {
  return Number(value ?? 0);
}

export class ApiError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
}

/** Numbers of an answer: nearly all of them are numbers already. */
export function nums(values: Real[]): number[] {
  return values.map((value) => (typeof value === 'number' ? value : Number(value)));
}

/** When the server last answered, ms since 1970; 0 = not yet. Rejections by the server count as answers. */
export let answeredAt = 0;

type Method = keyof Query;

async function call<M extends Method>(method: M, request: Partial<Query[M]['request']>): Promise<Query[M]['response']> {
  const response = await fetch(`api/v1/${method}`, {
    method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(request),
  });
  answeredAt = Date.now();
  const text = await response.text();
  if (!response.ok) {
    let message = text.trim();
    try {
      message = (JSON.parse(text) as { message: string }).message;
    } catch {
      // Not every error is JSON: a token is refused in plain words.
    }
    throw new ApiError(response.status, message || `error ${response.status}`);
  }
  return JSON.parse(text) as Query[M]['response'];
}

/** What a person decides about an action. */
export type Decision = 'Approve' | 'Reject' | 'Undo';

const severityOf: Severity[] = ['SEVERITY_UNSPECIFIED', 'SEVERITY_INFO', 'SEVERITY_WARNING', 'SEVERITY_CRITICAL'];

export const api = {
  runs: () => call('ListRuns', { limit: 1000 }),
  run: (run: string) => call('GetRun', { run }),
  alerts: (run: string) => call('ListAlerts', run ? { run, limit: 100 } : { firing_only: true, limit: 1000 }),
  /** Of all runs; `least`: a severity's number, 1 is information. */
  allAlerts: (firing: boolean, least: number) => call('ListAlerts', { firing_only: firing, severity_min: severityOf[least], limit: 1000 }),
  matrix: (run: string, signal: string, step: number) => call('GetMatrix', { run, signal, step: String(step) }),
  /** Steps from `begin` up to `end`, without it; 0, 0 = all. */
  series: (run: string, series: SeriesId[], points: number, begin = 0, end = 0) =>
    call('GetSeries', { run, series, points_max: points, attempt: -1, step_begin: String(begin), step_end: String(end) }),
  events: (run: string, after: string) => call('ListEvents', { run, limit: 1000, after }),
  acknowledge: (run: string, key: string) => call('AcknowledgeAlert', { run, key, by: whoName(), comment: '' }),
  silence: (run: string, key: string, seconds: number) => call('SilenceAlert', { run, key, seconds, by: whoName(), comment: '' }),
  markFalseAlarm: (run: string, key: string, reason: string) => call('MarkFalseAlarm', { run, key, by: whoName(), reason, undo: false }),
  undoFalseAlarm: (run: string, key: string) => call('MarkFalseAlarm', { run, key, by: whoName(), reason: '', undo: true }),
  actions: (run: string) => call('ListActions', { run }),
  policy: (run: string) => call('GetPolicy', { run }),
  decide: (decision: Decision, run: string, id: string, by: string) => call(`${decision}Action`, { run, id, by, reason: '' }),
  rename: (run: string, name: string) => call('RenameRun', { run, name }),
  deleteRun: (run: string) => call('DeleteRun', { run }),
  info: () => call('GetServerInfo', {}),
};
