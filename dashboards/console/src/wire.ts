// Made from proto/ by wire_types.py: do not edit. The meaning of each field is in its .proto.
//
// Messages as JSON. 64-bit integers are strings, bytes are base64, enums are their names.

/** JSON knows finite numbers only. */
export type Real = number | 'NaN' | 'Infinity' | '-Infinity';

export type Granularity =
  'GRANULARITY_UNSPECIFIED' | 'GRANULARITY_RUN' | 'GRANULARITY_HEAD' | 'GRANULARITY_KV_HEAD' |
  'GRANULARITY_LAYER' | 'GRANULARITY_EXPERT' | 'GRANULARITY_RANK' | 'GRANULARITY_TENSOR' | 'GRANULARITY_MODULE'
  | 'GRANULARITY_OWN';

export type Merge =
  'MERGE_UNSPECIFIED' | 'MERGE_SUM' | 'MERGE_MAX' | 'MERGE_MEAN' | 'MERGE_EQUAL';

export interface LayerHead {
  layer: number;
  head: number;
}

export interface RunDescription {
  name: string;
  uuid: string;
  attempt: number;
  world: number;
  reporters: number;
  layout: Layout;
  attention?: Attention;
  parallelism?: Parallelism;
  framework: string;
  model: string;
  weight_decay: Real;
  step_origin: StepOrigin;
  labels: Record<string, string>;
  launch_unix_ms: string;
}

export interface Layout {
  layers: number;
  heads: number;
  kv_heads: number;
  head_dim: number;
  seq_len: number;
  experts: number;
  ranks: number;
}

export interface Attention {
  kernel: string;
  score_dtype: string;
  centred: boolean;
  qk_norm: boolean;
  softcap: Real;
  window: number;
  causal: boolean;
}

export interface Parallelism {
  data: number;
  tensor: number;
  pipeline: number;
  context: number;
}

export interface Event {
  attempt: number;
  step: string;
  kind: EventKind;
  value: Real;
  text: string;
  time_unix_ns: string;
}

export interface Run {
  description: RunDescription;
  step: string;
  stage: number;
  ended: boolean;
  end_reason: string;
  started_unix_ns: string;
  last_report_unix_ns: string;
  ranks_reporting: number;
  frames: string;
  frames_dropped: string;
  alerts_firing: number;
  eta?: Eta;
  loss: Real;
  steps_recorded: string;
  signals: string[];
  frames_stripped: string;
  imported: boolean;
  import_notifies: boolean;
  judged?: Judged;
  own_signals: OwnSignal[];
}

export interface OwnSignal {
  name: string;
  granularity: Granularity;
  merge: Merge;
  unit: string;
  help: string;
  low?: Real;
  high?: Real;
  layers: number;
  heads: number;
  past: OwnPast;
}

export interface Judged {
  whole: boolean;
  text: string;
  families: JudgedFamily[];
}

export interface JudgedFamily {
  name: string;
  layers: number;
  of: number;
}

export interface Eta {
  known: boolean;
  steps: Real;
  lower_steps: Real;
  upper_steps: Real;
  step_seconds: Real;
}

export type StepOrigin =
  'STEP_ORIGIN_UNSPECIFIED' | 'STEP_ORIGIN_TRAINER' | 'STEP_ORIGIN_ATTACH';

export type EventKind =
  'EVENT_KIND_UNSPECIFIED' | 'EVENT_KIND_LEARNING_RATE' | 'EVENT_KIND_RESTORE' | 'EVENT_KIND_CHECKPOINT_SAVED' |
  'EVENT_KIND_EVALUATION' | 'EVENT_KIND_ATTACH' | 'EVENT_KIND_DETACH' | 'EVENT_KIND_CENTRING_ON' |
  'EVENT_KIND_CENTRING_OFF' | 'EVENT_KIND_ATTENTION_MODE' | 'EVENT_KIND_DATA' | 'EVENT_KIND_BATCH_SIZE' |
  'EVENT_KIND_SEQUENCE_LENGTH' | 'EVENT_KIND_ANNOTATION';

export type OwnPast =
  'OWN_PAST_UNSPECIFIED' | 'OWN_PAST_FALLS' | 'OWN_PAST_RISES';

export interface ActionScope {
  layers: number[];
  heads: LayerHead[];
}

export interface Action {
  id: string;
  run_uuid: string;
  attempt: number;
  kind: ActionKind;
  scope?: ActionScope;
  mode: string;
  value: Real;
  apply_at_step: string;
  expires_unix_ns: string;
  expected_effect: string;
  cost: string;
  asked_by: string;
  alert_key: string;
  state: ActionState;
  history: ActionChange[];
  undoes: string;
  not_allowed: string;
}

export interface ActionChange {
  state: ActionState;
  time_unix_ns: string;
  by: string;
  reason: string;
  step: string;
}

export type ActionKind =
  'ACTION_KIND_UNSPECIFIED' | 'ACTION_KIND_ATTENTION_MODE' | 'ACTION_KIND_CENTER_K' | 'ACTION_KIND_QK_CLIP' |
  'ACTION_KIND_LR_SCALE' | 'ACTION_KIND_CHECKPOINT_NOW' | 'ACTION_KIND_BATCH_SKIP' |
  'ACTION_KIND_SAMPLING_DEEPEN' | 'ACTION_KIND_STOP' | 'ACTION_KIND_ROLLBACK_SUGGEST';

export type ActionState =
  'ACTION_STATE_UNSPECIFIED' | 'ACTION_STATE_PROPOSED' | 'ACTION_STATE_APPROVED' | 'ACTION_STATE_SENT' |
  'ACTION_STATE_APPLIED' | 'ACTION_STATE_REFUSED' | 'ACTION_STATE_EXPIRED' | 'ACTION_STATE_HELPED' |
  'ACTION_STATE_DID_NOT_HELP' | 'ACTION_STATE_KEPT' | 'ACTION_STATE_UNDONE' | 'ACTION_STATE_ESCALATED';

export interface SiblingBand {
  runs: number;
  step_begin: string;
  step_end: string;
  min: Real;
  p01: Real;
  p50: Real;
  p99: Real;
  max: Real;
}

export interface Evidence {
  signal: string;
  layer: number;
  head: number;
  value: Real;
  threshold: Real;
  baseline: Real;
  first_step: string;
  detector: string;
  text: string;
  siblings?: SiblingBand;
}

export interface Transition {
  id: string;
  run_uuid: string;
  run: string;
  attempt: number;
  key: string;
  k: number;
  state: AlertState;
  severity: Severity;
  rule: string;
  stage: number;
  step: string;
  first_step: string;
  layer: number;
  head: number;
  heads: LayerHead[];
  heads_total: number;
  eta?: Eta;
  evidence: Evidence[];
  cause: string;
  summary: string;
  advice: string;
  time_unix_ns: string;
  siblings: string;
  imported: boolean;
  do_first: string;
}

export interface Alert {
  last: Transition;
  history: Transition[];
  acknowledged: boolean;
  acknowledged_by: string;
  comment: string;
  silenced_until_unix_ns: string;
  false_alarm?: FalseAlarm;
  muted: boolean;
  false_alarm_history: FalseAlarm[];
  first_time_unix_ns: string;
  proposed: Action[];
}

export interface FalseAlarm {
  key: string;
  by: string;
  reason: string;
  time_unix_ns: string;
  severity: Severity;
  step: string;
  cause: string;
  undone: boolean;
}

export type Severity =
  'SEVERITY_UNSPECIFIED' | 'SEVERITY_INFO' | 'SEVERITY_WARNING' | 'SEVERITY_CRITICAL';

export type AlertState =
  'ALERT_STATE_UNSPECIFIED' | 'ALERT_STATE_FIRING' | 'ALERT_STATE_RESOLVED';

export interface ListRunsRequest {
  live_only: boolean;
  limit: number;
  name_contains: string;
}

export interface ListRunsResponse {
  runs: Run[];
  total: number;
  unanswered: string[];
  partitions_unserved: number;
}

export interface GetRunRequest {
  run: string;
}

export interface DeleteRunRequest {
  run: string;
}

export interface DeleteRunResponse {
  name: string;
  uuid: string;
}

export interface RenameRunRequest {
  run: string;
  name: string;
}

export interface GetSeriesRequest {
  run: string;
  series: SeriesId[];
  step_begin: string;
  step_end: string;
  points_max: number;
  attempt: number;
}

export interface SeriesId {
  signal: string;
  layer: number;
  head: number;
  name: string;
}

export interface GetSeriesResponse {
  series: Series[];
}

export interface Series {
  id: SeriesId;
  step: string[];
  min: Real[];
  mean: Real[];
  max: Real[];
  downsampled: boolean;
  values: string;
}

export interface GetMatrixRequest {
  run: string;
  signal: string;
  step: string;
}

export interface GetMatrixResponse {
  signal: string;
  step: string;
  layers: number;
  heads: number;
  values: Real[];
  names: string[];
}

export interface TopHeadsRequest {
  run: string;
  signal: string;
  limit: number;
  step: string;
}

export interface TopHeadsResponse {
  signal: string;
  step: string;
  heads: TopHead[];
}

export interface TopHead {
  layer: number;
  head: number;
  value: Real;
  median: Real;
  peer_score: Real;
  stage: number;
  name: string;
  step: string;
}

export interface CompareRunsRequest {
  run: string;
  baseline: string;
  signal: string;
  limit: number;
}

export interface CompareRunsResponse {
  heads: HeadDifference[];
  heads_differing: number;
  step_end: string;
}

export interface HeadDifference {
  layer: number;
  head: number;
  first_step: string;
  ratio: Real;
  band: Real;
  name: string;
}

export interface ListBaselinesRequest {
}

export interface ListBaselinesResponse {
  baselines: Baseline[];
  unanswered: string[];
}

export interface Baseline {
  kind: string;
  runs: BaselineRun[];
}

export interface BaselineRun {
  run: string;
  run_uuid: string;
  step: string;
  learned_unix_ns: string;
}

export interface GetBaselineRequest {
  run: string;
  signal: string;
}

export interface GetBaselineResponse {
  baseline?: Baseline;
  bands: BaselineBand[];
}

export interface BaselineBand {
  signal: string;
  band?: SiblingBand;
  run?: SiblingBand;
}

export interface ListAlertsRequest {
  run: string;
  firing_only: boolean;
  severity_min: Severity;
  limit: number;
}

export interface ListAlertsResponse {
  alerts: Alert[];
  unanswered: string[];
}

export interface GetAlertRequest {
  run: string;
  key: string;
}

export interface GetAlertResponse {
  alert?: Alert;
  window: Series[];
  actions: Action[];
}

export interface AcknowledgeAlertRequest {
  run: string;
  key: string;
  by: string;
  comment: string;
}

export interface SilenceAlertRequest {
  run: string;
  key: string;
  seconds: number;
  by: string;
  comment: string;
}

export interface MarkFalseAlarmRequest {
  run: string;
  key: string;
  by: string;
  reason: string;
  undo: boolean;
}

export interface AnnotateRequest {
  run: string;
  event?: Event;
}

export interface AnnotateResponse {
}

export interface ListEventsRequest {
  run: string;
  limit: number;
  after: string;
}

export interface ListEventsResponse {
  events: Event[];
  total: string;
  next_after: string;
}

export interface ListActionsRequest {
  run: string;
}

export interface ListActionsResponse {
  actions: Action[];
  audit: AuditEntry[];
}

export interface AuditEntry {
  time_unix_ns: string;
  step: string;
  by: string;
  what: string;
  action_id: string;
  kind: ActionKind;
  refused: string;
  detail: string;
}

export interface ProposeActionRequest {
  run: string;
  action?: Action;
  by: string;
  approve: boolean;
  reason: string;
}

export interface DecideActionRequest {
  run: string;
  id: string;
  by: string;
  reason: string;
}

export interface GetPolicyRequest {
  run: string;
}

export interface SetPolicyRequest {
  run: string;
  policy?: Policy;
  by: string;
}

export interface Policy {
  mode: PolicyMode;
  yaml: string;
  own: boolean;
}

export type PolicyMode =
  'MODE_UNSPECIFIED' | 'MODE_OBSERVE' | 'MODE_PROPOSE' | 'MODE_ENFORCE';

export interface GetServerInfoRequest {
}

export interface Caller {
  name: string;
  may_act: boolean;
  may_admin: boolean;
}

export interface ServerInfo {
  version: string;
  revision: string;
  grpc_version: string;
  backend: string;
  started_unix_ns: string;
  options: Record<string, string>;
  limits: Record<string, Real>;
  counters: Record<string, Real>;
  storage_path: string;
  http_address: string;
  grpc_address: string;
  caller?: Caller;
  partitions: HeldPartition[];
}

export interface HeldPartition {
  number: number;
  epoch: string;
}

/** The calls that have one answer. */
export interface Query {
  ListRuns: { request: ListRunsRequest; response: ListRunsResponse };
  GetRun: { request: GetRunRequest; response: Run };
  GetSeries: { request: GetSeriesRequest; response: GetSeriesResponse };
  GetMatrix: { request: GetMatrixRequest; response: GetMatrixResponse };
  TopHeads: { request: TopHeadsRequest; response: TopHeadsResponse };
  CompareRuns: { request: CompareRunsRequest; response: CompareRunsResponse };
  ListBaselines: { request: ListBaselinesRequest; response: ListBaselinesResponse };
  GetBaseline: { request: GetBaselineRequest; response: GetBaselineResponse };
  ListAlerts: { request: ListAlertsRequest; response: ListAlertsResponse };
  GetAlert: { request: GetAlertRequest; response: GetAlertResponse };
  AcknowledgeAlert: { request: AcknowledgeAlertRequest; response: Alert };
  SilenceAlert: { request: SilenceAlertRequest; response: Alert };
  MarkFalseAlarm: { request: MarkFalseAlarmRequest; response: Alert };
  Annotate: { request: AnnotateRequest; response: AnnotateResponse };
  ListEvents: { request: ListEventsRequest; response: ListEventsResponse };
  ListActions: { request: ListActionsRequest; response: ListActionsResponse };
  ProposeAction: { request: ProposeActionRequest; response: Action };
  ApproveAction: { request: DecideActionRequest; response: Action };
  RejectAction: { request: DecideActionRequest; response: Action };
  UndoAction: { request: DecideActionRequest; response: Action };
  GetPolicy: { request: GetPolicyRequest; response: Policy };
  SetPolicy: { request: SetPolicyRequest; response: Policy };
  DeleteRun: { request: DeleteRunRequest; response: DeleteRunResponse };
  RenameRun: { request: RenameRunRequest; response: Run };
  GetServerInfo: { request: GetServerInfoRequest; response: ServerInfo };
}
