// The JSON calls of service Query. Protobuf's mapping: 64-bit integers are
// strings, and NaN and infinities too; num() takes them all.

export type Num = number | string;

export function num(value: Num | undefined | null): number {
  if (value === undefined || value === null) return 0;
  return typeof value === 'number' ? value : Number(value);
}

export interface Layout { layers: number; heads: number; kv_heads: number; head_dim: number; seq_len: number }
export interface Eta { known: boolean; steps: Num; lower_steps: Num; upper_steps: Num }
/** What the run can be judged by; `text` is what is said of stage 0: "healthy" if `whole`. */
export interface Judged { whole: boolean; text: string; families: { name: string; layers: number; of: number }[] }
export interface Run {
  description: {
    name: string; attempt: number; world: number; reporters: number; layout: Layout;
    attention?: { kernel: string; score_dtype: string; centred: boolean }; framework: string; model: string;
  };
  step: Num; stage: number; ended: boolean; end_reason: string;
  started_unix_ns: Num; last_report_unix_ns: Num; ranks_reporting: number;
  frames: Num; frames_dropped: Num; alerts_firing: number; eta?: Eta; loss: Num; signals: string[];
  imported?: boolean;
  judged?: Judged;  // Absent: of a server of before.
}
/** How a signal lay in earlier healthy runs of the same kind, at the same stage of training. */
export interface SiblingBand { runs: number; step_begin: Num; step_end: Num; min: Num; p01: Num; p50: Num; p99: Num; max: Num }
export interface Evidence {
  signal: string; layer: number; head: number; value: Num; threshold: Num; baseline: Num; first_step: Num; detector: string; text: string;
  siblings?: SiblingBand;
}
export interface Transition {
  id: Num; run: string; key: string; state: string; severity: string; rule: string; stage: number; step: Num; first_step: Num;
  layer: number; head: number; heads: { layer: number; head: number }[]; heads_total: number; eta?: Eta;
  evidence: Evidence[]; cause: string; summary: string; advice: string; time_unix_ns: Num; siblings: string;
}
export interface Alert { last: Transition; acknowledged: boolean; acknowledged_by: string; comment: string; silenced_until_unix_ns: Num }
export interface Matrix { signal: string; step: Num; layers: number; heads: number; values: Num[] }
export interface Series { id: { signal: string; layer: number; head: number }; step: Num[]; min: Num[]; mean: Num[]; max: Num[]; downsampled: boolean }
export interface ServerInfo {
  version: string; revision: string; grpc_version: string; backend: string; started_unix_ns: Num;
  options?: Record<string, string>; limits?: Record<string, Num>; counters?: Record<string, Num>;
  storage_path: string; http_address: string; grpc_address: string; caller?: Caller;
}
/** Whom the server takes us for; no name: nobody in particular. */
export interface Caller { name: string; may_act: boolean; may_admin: boolean }
export interface ActionChange { state: string; time_unix_ns: Num; by: string; reason: string; step: Num }
/** Something to do in the training job: actions.proto. */
export interface Action {
  id: string; attempt: number; kind: string; scope?: { layers?: number[]; heads?: { layer: number; head: number }[] };
  mode: string; value: Num; apply_at_step: Num; expected_effect: string; cost: string; asked_by: string; alert_key: string;
  undoes: string; state: string; history?: ActionChange[];
}
/** A request that was refused, or a change of policy. */
export interface AuditEntry { time_unix_ns: Num; step: Num; by: string; what: string; action_id: string; refused: string; detail: string }
export interface Policy { mode: string; yaml: string }

export class ApiError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
}

/** When the server last answered, ms since 1970; 0 = not yet. Rejections by the server count as answers. */
export let answeredAt = 0;

async function call<T>(method: string, request: object): Promise<T> {
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
  return JSON.parse(text) as T;
}

export const api = {
  runs: () => call<{ runs?: Run[]; total: number; unanswered?: string[]; partitions_unserved?: number }>('ListRuns', { limit: 1000 }),
  run: (run: string) => call<Run>('GetRun', { run }),
  alerts: (run: string) => call<{ alerts?: Alert[] }>('ListAlerts', run ? { run, limit: 100 } : { firing_only: true, limit: 1000 }),
  matrix: (run: string, signal: string, step: number) => call<Matrix>('GetMatrix', { run, signal, step }),
  series: (run: string, series: { signal: string; layer: number; head: number }[], points: number) =>
    call<{ series?: Series[] }>('GetSeries', { run, series, points_max: points, attempt: -1 }),
  acknowledge: (run: string, key: string) => call<Alert>('AcknowledgeAlert', { run, key, by: 'console', comment: '' }),
  silence: (run: string, key: string, seconds: number) => call<Alert>('SilenceAlert', { run, key, seconds, by: 'console', comment: '' }),
  actions: (run: string) => call<{ actions?: Action[]; audit?: AuditEntry[] }>('ListActions', { run }),
  policy: (run: string) => call<Policy>('GetPolicy', { run }),
  decide: (verb: 'Approve' | 'Reject' | 'Undo', run: string, id: string, by: string) => call<Action>(`${verb}Action`, { run, id, by, reason: '' }),
  info: () => call<ServerInfo>('GetServerInfo', {}),
};
