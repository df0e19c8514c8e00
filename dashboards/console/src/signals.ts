// What the page shows of a signal: its place in the causal chain, its words and
// its colours. Names and meanings are those of the server's catalogue.

import type { OwnSignal, Run } from './wire';

export interface Signal {
  name: string;
  label: string;
  help: string;
  scale: 'log' | 'linear' | 'signed';
  /** Low values are the alarming ones. */
  lowIsBad?: boolean;
  /** What is below the threshold is warm, though a list of the worst begins with the largest. */
  warmBelow?: boolean;
  kvHeads?: boolean;
  /** A value is a number of bytes. */
  bytes?: boolean;
  /** What a value is measured in, if it has a unit: the catalogue's. */
  unit?: string;
  /** Where the colours turn from cold to warm, unless an alert has a threshold: the rules', or of the median head so many times. */
  anchor?: number;
  ofMedian?: number;
}

/** A signal of named rows. */
export interface RowSignal extends Signal {
  of: 'tensor' | 'module';
  /** What a run that has it reports: itself, or what it is derived from. */
  part: string;
  /** In how many samples each row has had its turn. */
  turns: number;
}

/** Cause first, loss last: what is above comes before what is below. */
export const headSignals: Signal[] = [
  { name: 'drift_ratio', label: 'Drift ratio', scale: 'log', ofMedian: 4,
    help: 'Common mode of the scores over their spread, judged against the median head of the run: 4 times it and growing is a drift.' },
  { name: 'common_mode', label: 'Common mode', scale: 'log', unit: 'logits',
    help: "Mean size of what a row's scores have in common, in logits. From 128 on bf16 holds whole numbers only." },
  { name: 'key_leak', label: 'Key-gradient leak', scale: 'log', kvHeads: true,
    help: 'The part of the key gradients that must be zero and is not: pure kernel error.' },
  { name: 'tied_fraction_bf16', label: 'Tied rows', scale: 'linear', anchor: 0.3,
    help: 'Share of rows whose bf16 maximum is repeated, because a large offset eats the mantissa. More than 30 % is told.' },
  { name: 'delta_bias_t', label: 'Delta bias t', scale: 'signed', anchor: 4,
    help: 't statistic of the error of delta. Far from zero means biased, not noisy.' },
  { name: 'qk_increment_rank', label: 'QK increment rank', scale: 'linear', lowIsBad: true,
    help: 'Effective rank of the change of W_Q^T W_K. A collapse means the weights are pushed in one direction.' },
  { name: 'wq_sigma', label: 'σ(W_Q)', scale: 'log', ofMedian: 2,
    help: "Largest singular value of the head's W_Q: the weights are being pushed." },
  { name: 'logit_max', label: 'Largest logit', scale: 'log', unit: 'logits', anchor: 1000,
    help: 'Largest attention score. Above 1,000 in a head, or above 200 in the median head with its entropy gone, attention fails.' },
  { name: 'entropy_ratio', label: 'Entropy ratio', scale: 'linear', lowIsBad: true, help: '1 is uniform attention, 0 is one key.' },
  { name: 'saturated_fraction', label: 'Saturated rows', scale: 'linear', help: 'Share of rows in which one key takes all.' },
  { name: 'wk_sigma', label: 'σ(W_K)', scale: 'log', kvHeads: true, help: "Largest singular value of the key head's W_K." },
  { name: 'wq_stable_rank', label: 'Stable rank of W_Q', scale: 'linear', lowIsBad: true,
    help: 'Trace of the Gram matrix over its largest eigenvalue.' },
  { name: 'gram_effective_rank', label: 'Effective rank of W_Q', scale: 'linear', lowIsBad: true,
    help: 'Over how many directions W_Q is spread, of the full spectrum; told for a few heads at a time.' },
  { name: 'gram_top2_ratio', label: 'Second σ(W_Q) over first', scale: 'linear', lowIsBad: true,
    help: 'Near 0 one direction has it all; told for a few heads at a time.' },
  { name: 'gram_increment_rank', label: 'QK increment rank, of Grams', scale: 'linear', lowIsBad: true,
    help: 'Effective rank of the change of W_Q^T W_K, of the full spectrum; told for a few heads at a time.' },
  { name: 'sink_ratio', label: 'Sink ratio', scale: 'linear', help: 'Mean probability of the first key.' },
  { name: 'law_a3_z', label: 'Law A3, z', scale: 'signed', kvHeads: true,
    help: 'Sum of q . dQ less sum of k . dK, zero in exact arithmetic, in units of what rounding gives. Huge: dQ or dK is wrong.' },
  { name: 'law_a4_z', label: 'Law A4, z', scale: 'signed', kvHeads: true,
    help: 'Sum of O . dO less sum of v . dV, zero in exact arithmetic, in units of what rounding gives. Huge: O or dV is wrong.' },
  { name: 'shadow_o_excess', label: 'O beside its reference', scale: 'log',
    help: 'Squared distance of O from its reference over what rounding gives. Far above one is wrong.' },
  { name: 'shadow_dq_excess', label: 'dQ beside its reference', scale: 'log',
    help: 'Squared distance of dQ from its reference over what rounding gives. Far above one is wrong.' },
  { name: 'shadow_dk_excess', label: 'dK beside its reference', scale: 'log', kvHeads: true,
    help: 'Squared distance of dK from its reference over what rounding gives. Far above one is wrong.' },
  { name: 'shadow_dv_excess', label: 'dV beside its reference', scale: 'log', kvHeads: true,
    help: 'Squared distance of dV from its reference over what rounding gives. Far above one is wrong.' },
  { name: 'shadow_o_factor_z', label: 'O as a multiple of its reference, z', scale: 'signed',
    help: 'How far O is from once its reference, in units of what rounding gives. Huge: O is wrong by a factor.' },
  { name: 'shadow_dq_factor_z', label: 'dQ as a multiple of its reference, z', scale: 'signed',
    help: 'How far dQ is from once its reference, in units of what rounding gives. Huge: dQ is wrong by a factor.' },
  { name: 'shadow_dk_factor_z', label: 'dK as a multiple of its reference, z', scale: 'signed', kvHeads: true,
    help: 'How far dK is from once its reference, in units of what rounding gives. Huge: dK is wrong by a factor.' },
  { name: 'shadow_dv_factor_z', label: 'dV as a multiple of its reference, z', scale: 'signed', kvHeads: true,
    help: 'How far dV is from once its reference, in units of what rounding gives. Huge: dV is wrong by a factor.' },
];

export const runSignals: Signal[] = [
  { name: 'loss', label: 'Loss', scale: 'linear', help: 'Training loss. The last to know.' },
  { name: 'grad_norm', label: 'Gradient norm', scale: 'log', help: 'Global gradient norm before clipping.' },
];

const tensorTurns = 25;
const partTurns = 10;  // Five, and more where the period has just changed.
const fp8Turns = 16;
const moduleTurns = 64;

/** On the model map, and drawn for a chosen row. */
export const rowSignals: RowSignal[] = [
  { name: 'tensor_grad_norm', of: 'tensor', part: 'tensor_grad_sumsq', turns: 1, label: 'Gradient norm', scale: 'log',
    help: "Norm of the parameter's gradient, before clipping." },
  { name: 'tensor_grad_max', of: 'tensor', part: 'tensor_grad_max', turns: 1, label: 'Largest gradient', scale: 'log',
    help: "Largest element of the parameter's gradient." },
  { name: 'tensor_grad_nonfinite', of: 'tensor', part: 'tensor_grad_nonfinite', turns: 1, label: 'Gradient, not finite',
    scale: 'linear', help: 'Elements of the gradient that are NaN or infinite.' },
  { name: 'tensor_grad_zero_share', of: 'tensor', part: 'tensor_grad_zeros', turns: 1, label: 'Gradient, zeros', scale: 'linear',
    help: 'Share of the gradient that is exactly zero.' },
  { name: 'tensor_moved', of: 'tensor', part: 'tensor_moved', turns: 1, label: 'Moved', scale: 'linear', lowIsBad: true,
    help: 'One where the step has changed a bit of the parameter, else zero.' },
  { name: 'tensor_weight_rms', of: 'tensor', part: 'tensor_weight_sumsq', turns: 1, label: 'Weight RMS', scale: 'log',
    help: 'Root of the mean square of the parameter.' },
  { name: 'tensor_update_ratio', of: 'tensor', part: 'tensor_change_sumsq', turns: tensorTurns, label: 'Update ratio', scale: 'log',
    help: "Norm of the step's change over the norm of the parameter. Parameters take turns: each has its newest value." },
  { name: 'tensor_moment_lag', of: 'tensor', part: 'tensor_lag_sum', turns: tensorTurns, label: 'Second-moment lag', scale: 'log',
    anchor: 1, help: 'How far gradients are beyond what the second moment expects: about one or less while it follows them.' },
  { name: 'tensor_momentum_alignment', of: 'tensor', part: 'tensor_momentum_dot', turns: tensorTurns, label: 'Momentum alignment',
    scale: 'signed', help: 'Cosine of gradient and momentum. Parameters take turns.' },
  { name: 'tensor_sigma', of: 'tensor', part: 'tensor_sigma', turns: tensorTurns, label: 'Spectral norm', scale: 'log',
    help: "Largest singular value of a matrix. lm_head and attention's output projections have more turns than others." },
  { name: 'embedding_mean_norm', of: 'tensor', part: 'embedding_mean_sumsq', turns: partTurns, label: 'Mean row of embeddings',
    scale: 'linear',
    help: "Norm of the mean row over the root of the rows' mean squared norm: one where all rows are the same." },
  { name: 'norm_gain_last_bin_share', of: 'tensor', part: 'norm_gain_last_bin', turns: partTurns, label: 'Gains in the last bin',
    scale: 'linear',
    help: "Share of a norm's gains that the MX format of eight bits would clamp to its largest number." },
  { name: 'module_rms', of: 'module', part: 'module_sumsq', turns: partTurns, label: 'Activation RMS', scale: 'log',
    help: 'Root of the mean square of what the module returns.' },
  { name: 'module_largest', of: 'module', part: 'module_largest', turns: partTurns, label: 'Largest activation', scale: 'log',
    help: 'Largest element of what the module returns.' },
  { name: 'module_largest_ratio', of: 'module', part: 'module_largest_ratio', turns: partTurns, label: 'Largest activation over RMS',
    scale: 'log',
    help: 'Largest element over the root of the mean square.' },
  { name: 'module_kurtosis', of: 'module', part: 'module_fourths', turns: partTurns, label: 'Kurtosis', scale: 'log',
    help: 'Three where elements are normal, large where a few are much larger than the others.' },
  { name: 'module_top_share', of: 'module', part: 'module_top_sumsq', turns: partTurns, label: 'Share of the top channel', scale: 'linear',
    help: 'Share of the sum of squares that the channel with the largest one has.' },
  { name: 'module_top_channel', of: 'module', part: 'module_top_channel', turns: partTurns, label: 'Top channel', scale: 'linear',
    help: 'The channel with the largest sum of squares.' },
  { name: 'module_nonfinite', of: 'module', part: 'module_nonfinite', turns: partTurns, label: 'Activation, not finite', scale: 'linear',
    help: 'Elements of what the module returns that are NaN or infinite.' },
  { name: 'module_grad_rms', of: 'module', part: 'module_grad_sumsq', turns: partTurns, label: 'Gradient RMS at the input', scale: 'log',
    help: "Root of the mean square of the gradient at the block's input." },
  { name: 'module_grad_nonfinite', of: 'module', part: 'module_grad_nonfinite', turns: partTurns,
    label: 'Gradient at the input, not finite', scale: 'linear',
    help: "Elements of the gradient at the block's input that are NaN or infinite." },
  { name: 'module_mean_norm', of: 'module', part: 'module_mean_sumsq', turns: partTurns, label: 'Mean of what lm_head is given',
    scale: 'linear',
    help: 'Norm of the mean over tokens over their root mean square: one where all tokens are the same.' },
  { name: 'fp8_saturated_share', of: 'module', part: 'fp8_saturated', turns: fp8Turns, label: '8 bits, saturated', scale: 'log',
    help: 'Share of the elements at the largest number of their format of eight bits. Modules take turns.' },
  { name: 'fp8_flushed_share', of: 'module', part: 'fp8_flushed', turns: fp8Turns, label: '8 bits, became zero', scale: 'log',
    help: 'Of the elements that were not zero before: the share that is zero in eight bits.' },
  { name: 'fp8_zero_share', of: 'module', part: 'fp8_zeros', turns: fp8Turns, label: '8 bits, zeros', scale: 'log',
    help: 'Share of the elements that are zero in eight bits.' },
  { name: 'fp8_scale', of: 'module', part: 'fp8_scale', turns: fp8Turns, label: '8 bits, scale', scale: 'log',
    help: 'Largest scale that a product is given: an element is its eight bits times that.' },
  { name: 'fp8_amax_age', of: 'module', part: 'fp8_amax_age', turns: fp8Turns, label: '8 bits, age of the scale', scale: 'linear',
    help: 'Steps since the first sample with the scale of now.' },
  { name: 'law_z', of: 'module', part: 'law_difference', turns: moduleTurns, label: 'Laws of layers, z', scale: 'signed',
    help: 'Difference of the law that the row names, in units of what rounding gives. Modules take turns.' },
];

/** Of the experts of each layer, or of the layer's router. */
export interface CellSignal extends Signal { of: 'expert' | 'layer'; part: string }

/** On a map of layers and experts, and drawn for a chosen one. */
export const expertSignals: CellSignal[] = [
  { name: 'expert_share', of: 'expert', part: 'expert_load', label: 'Load of experts', scale: 'linear', warmBelow: true, anchor: 0.1,
    help: 'Load of the expert over what each would have of the same: one is balanced, zero is dead.' },
  { name: 'expert_dead', of: 'expert', part: 'expert_dead', label: 'Dead experts', scale: 'linear',
    help: 'One if the router has chosen the expert for no token, else zero.' },
  { name: 'expert_dropped_share', of: 'expert', part: 'expert_dropped', label: 'Dropped tokens', scale: 'linear',
    help: "Share of the expert's tokens that its capacity had no room for." },
  { name: 'expert_largest_share', of: 'layer', part: 'expert_largest_load', label: 'Load of the busiest expert', scale: 'log',
    help: 'Load of the busiest expert over what each would have of the same.' },
  { name: 'router_entropy_share', of: 'layer', part: 'router_entropy_sum', label: 'Entropy of the router', scale: 'linear',
    lowIsBad: true, help: 'Over the largest that it can be: one knows no expert from another, zero is sure of one.' },
  { name: 'router_logit_max', of: 'layer', part: 'router_logit_max', label: 'Largest logit of the router', scale: 'log', unit: 'logits',
    help: "Largest of the router's logits." },
  { name: 'router_row_cosine_max', of: 'layer', part: 'router_row_cosine_max', label: 'Rows of the router alike', scale: 'linear',
    help: "Largest cosine of two rows of the router's weight: at one two experts are chosen alike." },
];

/** Those that the run has. */
export function expertSignalsOf(run: Run): CellSignal[] {
  const reported = new Set(run.signals);
  return expertSignals.filter((s) => reported.has(s.part));
}

export function findRowSignal(name: string): RowSignal | undefined {
  return rowSignals.find((s) => s.name === name);
}

/** Those that the run has. */
export function rowSignalsOf(run: Run): RowSignal[] {
  const reported = new Set(run.signals);
  return rowSignals.filter((s) => reported.has(s.part));
}

/** Of the run, on a panel that is there only where the run has such signals. */
export interface PanelSignal extends Signal { part: string }

/** What every step was like between two samples. */
const stepOnes: PanelSignal[] = [
  { name: 'moment_lag_max', part: 'moment_lag_max', label: 'Second-moment lag', scale: 'log',
    help: 'Largest of a step, in the embeddings and first layers: about one or less while the second moment follows the gradients.' },
  { name: 'grad_saturated', part: 'grad_saturated', label: 'Saturated gradients', scale: 'linear',
    help: 'Elements of the same gradients that were NaN, infinite, or as large as their type can hold.' },
  { name: 'skipped_steps', part: 'skipped_steps', label: 'Skipped steps', scale: 'linear',
    help: 'Steps that the optimizer did not take, since the sample before.' },
  { name: 'clip_factor', part: 'clip_factor', label: 'Clipped to', scale: 'linear', lowIsBad: true,
    help: 'Smallest factor by which gradients were clipped: one where they were within their limit.' },
  { name: 'grad_norm_max', part: 'grad_norm_max', label: 'Largest gradient norm', scale: 'log',
    help: 'Of a step, since the sample before.' },
  { name: 'loss_max', part: 'loss_max', label: 'Largest loss', scale: 'linear', help: 'Of a step, since the sample before.' },
  { name: 'loss_scale', part: 'loss_scale', label: 'Loss scale', scale: 'log', help: 'What a GradScaler has multiplied the loss by.' },
  { name: 'data_share', part: 'data_share', label: 'Share of waiting for data', scale: 'linear',
    help: 'Time before the forward pass over the time of a step: the share of its time in which the job waits for data.' },
  { name: 'data_seconds', part: 'data_seconds', label: 'Data, seconds', scale: 'linear', help: "Host's time before the forward pass." },
  { name: 'forward_seconds', part: 'forward_seconds', label: 'Forward, seconds', scale: 'linear',
    help: "Host's time from the first attention to the backward pass." },
  { name: 'backward_seconds', part: 'backward_seconds', label: 'Backward, seconds', scale: 'linear',
    help: "Host's time in backward passes." },
  { name: 'optimizer_seconds', part: 'optimizer_seconds', label: 'Optimizer, seconds', scale: 'linear',
    help: "Host's time in the steps of optimizers." },
  { name: 'memory_allocated', part: 'memory_allocated', label: 'Memory, now', scale: 'linear', bytes: true,
    help: "Of the GPU, by torch's allocator, at the end of the sampled step." },
  { name: 'memory_peak', part: 'memory_peak', label: 'Memory, at most', scale: 'linear', bytes: true,
    help: "Most of the GPU's memory by torch's allocator so far." },
];

const sequenceOnes: PanelSignal[] = [
  { name: 'loss_sequence_max', part: 'loss_sequence_max', label: 'Largest loss of a sequence', scale: 'linear',
    help: 'It disappears in the mean.' },
  { name: 'loss_sequence_mean', part: 'loss_sequence_sum', label: 'Mean loss of a sequence', scale: 'linear',
    help: 'Over the sequences of a step.' },
  { name: 'loss_microbatch_max', part: 'loss_microbatch_max', label: 'Largest mean of a micro-batch', scale: 'linear',
    help: 'Over its sequences.' },
  { name: 'loss_repeated_share', part: 'loss_repeated_tokens', label: 'Repeated labels', scale: 'linear',
    help: 'Share of the labels that count and are the same as the one before: near one for a batch of one repeated token.' },
  { name: 'loss_masked_share', part: 'loss_masked_tokens', label: 'Masked labels', scale: 'linear',
    help: 'Share of the labels that do not count.' },
  { name: 'loss_tokens', part: 'loss_tokens', label: 'Labels that count', scale: 'linear', unit: 'tokens', help: 'Of a step.' },
  { name: 'loss_sequences', part: 'loss_sequences', label: 'Sequences', scale: 'linear', help: 'Whose loss the job has told, of a step.' },
];

function reportedOf(run: Run, signals: PanelSignal[]): string[] {
  const reported = new Set(run.signals);
  return signals.filter((s) => reported.has(s.part)).map((s) => s.name);
}

/** What the optimizer's panel draws; nothing without signals of steps. The gradient norm stands behind the clipping. */
export function optimizerNames(run: Run): string[] {
  const names = reportedOf(run, stepOnes);
  if (names.length === 0 || !run.signals.includes('grad_norm')) return names;
  const behind = names.findIndex((name) => stepOnes.findIndex((s) => s.name === name) > 3);
  names.splice(behind < 0 ? names.length : behind, 0, 'grad_norm');
  return names;
}

/** What the panel of sequences' losses draws. */
export function sequenceNames(run: Run): string[] {
  return reportedOf(run, sequenceOnes);
}

/** The field's names, as the server knows them (a test compares): rewards, KL, entropies, clipping, then others of TRL and verl. */
const learningNames = [
  /^(.*\/)?(mean_|min_|max_|frac_|rlhf_)?(rewards?|scores?)([/_].*)?$/,
  /^(.*\/)?(mean_)?((policy_|ppo_|approx_|vllm_|k3_)?kl|approxkl|chi2)([/_].*)?$/,
  /^(.*\/)?(mean_)?(policy_)?entropy([/_].*)?$/,
  /^(.*\/)?(mean_)?(pg_|vf_|policy_|ppo_|cispo_)?clip(ped)?_?(frac|fraction|ratio)([/_].*)?$/,
  /^(.*\/)?(mean_)?(token_)?(accuracy|accuracies|margins?)$/,
  /^(.*\/)?(ess|vf_explained_var|rollout_(is|actor|probs)_.*|sampling_logp_difference)$/,
  /^(.*\/)?(advantages?|returns)([/_].*)?$/,
  /^(actor|critic|rollout_corr|objective|policy|completions|sampling|response|response_length|prompt_length|num_turns)\//,
  /^training\/rollout_/,
];

/** -1: it is no name of reinforcement learning. */
function learningRank(name: string): number {
  return learningNames.findIndex((known) => known.test(name));
}

/** What is judged of an own signal without rules: its declared limits, and its past. */
export interface OwnLimits { limits: number[]; words: string; low: number; high: number }

export function ownLimits({ past, low, high }: OwnSignal): OwnLimits {
  const limits = [low, high].map((limit) => (limit === undefined ? NaN : Number(limit)));
  const words = limits.map((limit, i) => (Number.isFinite(limit) ? `${i === 0 ? 'at least' : 'at most'} ${limit}` : ''));
  if (past === 'OWN_PAST_FALLS') words.push('a fall is told');
  if (past === 'OWN_PAST_RISES') words.push('a rise is told');
  const [least, most] = limits;
  return { limits: limits.filter((limit) => Number.isFinite(limit)), words: words.filter(Boolean).join(' · '), low: least, high: most };
}

/** Own signals with a value for each layer, head, expert or rank. */
export function ownMatrices(run: Run): OwnSignal[] {
  return run.own_signals.filter((own) => own.granularity !== 'GRANULARITY_RUN' && own.layers * own.heads > 0);
}

/** Of a call's 64 series, beside those of a head, and beside those of the other panels. */
const ownMax = 48;
const learningMax = 36;

function ofRun(run: Run): OwnSignal[] {
  return run.own_signals.filter((own) => own.granularity === 'GRANULARITY_RUN' && own.layers > 0);
}

/** Those with one value a step that have names of reinforcement learning, rewards first. */
export function learningOfRun(run: Run): OwnSignal[] {
  const found = ofRun(run).filter(({ name }) => learningRank(name) >= 0);
  return found.sort((a, b) => learningRank(a.name) - learningRank(b.name)).slice(0, learningMax);
}

/** The other signals with one value a step that the job has named itself. */
export function ownOfRun(run: Run): string[] {
  const elsewhere = new Set(learningOfRun(run));
  return ofRun(run).filter((own) => !elsewhere.has(own)).slice(0, ownMax).map((own) => own.name);
}

/** Drawn for the chosen head; the rest is in the heatmap only. */
export const causalNames = ['drift_ratio', 'key_leak', 'tied_fraction_bf16', 'delta_bias_t', 'wq_sigma', 'logit_max', 'entropy_ratio'];

/** Evidence only. */
const otherLabels: Record<string, string> = { hook_overhead: 'Hook overhead', silent_ranks: 'Silent ranks',
  samples_without: 'Samples without a value',
  law_a1_z: 'Law A1, z', law_a2_z: 'Law A2, z' };

/** Words of the glossary that explain a signal, beside its own help. */
const terms: Record<string, string> = {
  drift_ratio: 'drift-ratio', common_mode: 'common-mode', key_leak: 'key-gradient-leak', tied_fraction_bf16: 'ties',
  delta_bias_t: 'biased-delta', qk_increment_rank: 'rank', wq_sigma: 'sigma', wk_sigma: 'sigma', logit_max: 'logits',
  entropy_ratio: 'entropy-ratio', saturated_fraction: 'saturated-rows', wq_stable_rank: 'rank', loss: 'loss-off-its-course',
  tensor_moment_lag: 'second-moment-lag', moment_lag_max: 'second-moment-lag', tensor_sigma: 'sigma',
};

/** Whether a value is beyond a threshold by being below it. */
export function isWarmBelow({ lowIsBad, warmBelow }: Signal): boolean {
  return lowIsBad === true || warmBelow === true;
}

/** The anchor of the word in the glossary that explains a signal; '' = there is none. */
export function termOf(name: string): string {
  if (name.startsWith('law_')) return 'law';
  if (name.startsWith('shadow_')) return 'reference';
  return name.startsWith('gram_') ? 'rank' : terms[name] ?? '';
}

export function findSignal(name: string): Signal {
  return [...headSignals, ...runSignals, ...rowSignals, ...expertSignals, ...stepOnes, ...sequenceOnes].find((s) => s.name === name) ??
    { name, label: otherLabels[name] ?? name, help: '', scale: 'linear' };
}
