// judge_options.h: every threshold and window of the detectors.
//
// A rule's numbers are data: nothing in server/detect compares against a
// constant that is not here.  Defaults come from the recorded runs that
// docs/concepts/detection.md tabulates and from the physics named at the
// field.  "Steps" are optimizer steps; "batches" are means of `batch_steps`
// steps, or single samples where sampling is rarer than that.
//
// A rules file sets each of them under its own name (rules_file.h); what is
// legal stands in thresholds.cc.
//
// Plain values; no thread rules.

#ifndef BELLWETHER_SERVER_DETECT_JUDGE_OPTIONS_H_
#define BELLWETHER_SERVER_DETECT_JUDGE_OPTIONS_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

namespace bellwether::server {

// How a series is thinned and how a trend in it is separated from noise.
struct TrendOptions {
  // Steps per batch mean, 1..1000.  Neighbouring samples of one head are alike
  // (lag-1 correlation up to 0.9); means of 20 steps are nearly independent.
  int32_t batch_steps = 20;
  // Batches that a trend looks at, 8..kWindowBatchesMax, and the least that it
  // needs.  64 batches = 1,280 steps at the usual sampling.
  int32_t window_batches = 64;
  int32_t window_batches_min = 24;
  // A fast drift that begins in the middle of the window is no straight line
  // over all of it.  So the newest so many batches are tried as well.  They
  // must double as often within them as the whole window must.
  int32_t window_batches_short = 32;
  // Mann-Kendall z of a monotone rise; 4 = one in 30,000 by chance.
  double mann_kendall_z_min = 4;
  // Share of the variance of ln x that the fitted line explains, 0..1.
  double r2_min = 0.8;
  // Slower growth than this is ordinary training (weights grow, ratios creep):
  // healthy heads double in 5,000 steps and more, failing ones in 150-2,100.
  double doubling_steps_max = 2000;
  // A trend is fitted only to a series whose ends rise by this share of what
  // doubling_steps_max would give over the window, 0..1.  Costs no detection
  // (a fit that passes rises more), saves nearly all fits.
  double gate_share = 0.5;
  // A trend that has held twice as long as it must is fitted again only every
  // so many batches: in a run that fails, fits would be all the cost.
  int32_t refit_batches = 4;
};

// The common mode of the scores: docs/concepts/detection.md.
struct DriftOptions {
  // A ratio of 1 is a healthy head; the median of the run's heads is held at
  // least here, so that a run of very quiet heads does not alarm on noise.
  double ratio_floor = 1.0;
  // Growing and this many times the median head: drift.  Healthy heads reach 3
  // by chance while they form.
  double grown_factor = 4;
  // This many times the median head for `level_batches`: drift even where the
  // growth is too slow to call, as long as it still rises.  It must hold twice
  // as long if neither ties nor a leak holds too.  A common mode that only
  // grows and ties alone must do so as well: of a thousand heads that wander
  // one is always far out for a while.
  double level_factor = 8;
  int32_t level_batches = 10;
  double level_rise_min = 1.1;  // Over the window, newest against oldest.
  // Common mode in logits; from 128 on bf16 scores are whole numbers.
  double common_mode_large = 100;
  double common_mode_factor = 10;  // Against the median head.
  // Fewer heads than this in the whole run are no peers for the ratio.
  int32_t peers_min = 8;
  // The more heads, the further the largest healthy one stands from the median.
  // The factors of the ratio above are for runs of so many heads.  Beyond that
  // they grow with (heads / heads_usual)^heads_exponent, and so does
  // ties.fraction_min, to ties.fraction_high at most.  Healthy ratios are
  // spread over heads by 0.6 in ln.  8 times the median is 3.5 of these, and as
  // rare in a run of 96 heads as 11 times in one of 1,024.
  double heads_usual = 96;
  double heads_exponent = 0.15;
  // The head is lost: ETA counts to this ratio, and is unknown beyond
  // eta_steps_max.
  double ratio_critical = 128;
  double eta_steps_max = 100000;
  double common_mode_critical = 1500;  // Logits; sigma explodes 20 to 90 steps later.
  // Consecutive batches that the growth test must hold.
  int32_t hold_batches = 3;
};

// Key-gradient leak, docs/concepts/detection.md: zero in exact arithmetic.
struct LeakOptions {
  // Rounding of dK itself, per kernel in bf16 or fp16; the median head counts
  // as at least this.
  double floor = 2e-4;
  double factor = 10;
  int32_t hold_batches = 4;
  // A layer whose leak has fallen silent is still the one that was pushed: the
  // common mode that the push left stays, and W_Q explodes later.  So long: the
  // slowest doubling that counts as growth (trend.doubling_steps_max).
  int64_t memory_steps = 2000;
};

struct TiesOptions {
  double fraction_min = 0.3;   // Healthy heads stay below 0.25.
  double peer_factor = 3;      // Times the median head.
  double fraction_high = 0.6;  // Most rows: no number of heads asks for more.
  int32_t hold_batches = 10;
  // |t| of the signed error of delta over the window: persistent bias.
  double bias_t_min = 4;
};

struct NormOptions {
  double peer_factor = 2;  // sigma(W_Q) against the median head.
  // Of sigma against the median head, over the window, rising monotonically.
  // Weights that train grow by a tenth in that time; exploding ones take 500
  // steps from the median to 20 times that.
  double rise_min = 1.5;
  int32_t hold_batches = 3;
  // A drifting head so far above the median head has been moved, however it got
  // there: a trend is soon over, and the jump of an explosion is none.  Chosen
  // above peer_factor; no quiet recording becomes critical by it.
  double far_factor = 4;
  // Runs up to this sigma(W_Q) were rescued as they went on; beyond it the advice
  // is to go back to a checkpoint (docs/concepts/actions.md).
  double rescue_sigma_max = 30;
};

struct LogitsOptions {
  double logit_max_large = 1000;    // One head.
  double logit_median_large = 200;  // The median head of the run.
  double logit_median_critical = 300;
  double entropy_ratio_collapsed = 0.05;  // Of ln(n): attention on one key.
  int32_t hold_batches = 5;
};

struct LossOptions {
  // Values that an impulse is compared with, never itself; 16..1024.
  int32_t window_values = 128;
  // Loss, and ln of the gradient norm, this many standard deviations above the
  // window, twice in a row: an impulse, reported as information only.
  double impulse_sigma = 6;
  int32_t impulse_values = 2;
  int32_t mean_values = 50;  // Of the smoothed loss.
  // The smoothed loss this far above its minimum is off its course.  The limits
  // are a share of the minimum, a share of all that was won since the first
  // steps (a loss that nears 0 wanders by multiples of itself), and its own
  // noise.
  double rise_of_minimum = 0.2;
  double rise_of_gain = 0.06;
  double rise_sigma = 6;
  // Gradient norm against the geometric mean of its window.
  double gradient_factor = 10;
  // A spike that is over by then was a data spike; what lasts longer warns,
  // and is critical in the end.
  int32_t persist_steps = 200;
  int32_t critical_steps = 600;
  // An announced change excuses trends, never a state.  For so long the loss is
  // compared with its level before it, and reported once it has been far above
  // that for change_hold_steps.
  int32_t change_steps = 1000;
  int32_t change_hold_steps = 5;
  // Far, of what has no reason to move the level: a share of the level and of
  // what was won.  Warm restarts of the learning rate cost a tenth.
  double change_rise_of_level = 0.5;
  double change_rise_of_gain = 0.2;
  // Lost, whatever was changed: a share of what was won; where the run began
  // near its level, as a fine-tune does, so many times the level.
  double change_lost_of_gain = 0.8;
  double change_lost_of_level = 2;
  // A loss that turns: so many losses in a row are above the lowest median of 16.  They are so by a share of
  // that, by a share of what was won, and by so many deviations of neighbouring losses.  In 27 recordings and 7
  // healthy runs none does that whose loss does not turn.
  double turn_rise_of_level = 0.1;
  double turn_rise_of_gain = 0.1;
  double turn_sigma = 4;
  int32_t turn_values = 10;
  // Until then it may be a stretch of other data: information, unless the learning rate has just risen.
  int32_t turn_lasting_values = 40;
  // A loss that has risen by a share since the first steps, while sigma(W_Q) has changed by that in ln (loss_start.h).
  double start_rise = 0.05;
  double start_moved = 0.15;
  // A loss that jumps and stays: standard errors, and a share of its level (loss_step.h).
  double step_sigma = 4.5;
  double step_rise_of_level = 0.05;
};

// The laws of attention and its shadow check.  No number of another run is in it.
struct KernelOptions {
  // That any question of a run of whatever length calls a kernel broken by chance.
  double chance = 1e-3;
};

// The laws of layers other than attention.  No number of another run is in it, either.
struct ArithmeticOptions {
  double chance = 1e-3;  // As that of the kernels'.
  // For what the clients' variances do not know of.  The largest z of 16,200 healthy
  // linear layers was 3.2 on CPUs, and 2.6 on an H100.
  double z_min = 6;
};

// What a job's own signals (mon.log) show by themselves: own_watch.h.  range_factor is chosen so that none of
// the healthy series of tests/server/detect/own_watch_test.cc fires; with 1 those do that remember hundreds
// of values.
struct OwnOptions {
  // Finite values in a row after which one that is not finite is wrong, 1..255.
  int32_t finite_values = 8;
  // That are averaged before a signal is held against its past.
  int32_t batch_values = 4;
  // Beyond all of its past by so many times its range,
  double range_factor = 2;
  // and risen to so many times its median, or fallen by this share of it.
  double rise_factor = 3;
  double fall_share = 0.5;
  int32_t hold_batches = 3;       // In a row: information,
  int32_t persist_batches = 25;   // a warning,
  int32_t relearn_batches = 100;  // and the new normal.
};

// Parameters that have a gradient, and do not move.
struct FrozenOptions {
  // In a row that cover it, and in which others move; also those in which nothing moves.
  int32_t samples = 2;
  // Of the median parameter's gradient, each the root of its mean square: a gradient.  That of a key's
  // bias, which is 0 but for rounding, is 10^-6 of it and less.
  double gradient_share = 1e-3;
};

// Experts without tokens, and routers that send all to the same ones: expert_watch.h.
struct ExpertsOptions {
  int32_t samples = 8;  // In a row; and so many times as many as ever before.
  // One that was never idle, and has always had this share of the mean expert's tokens, need not wait for that.  Two
  // samples are enough once it should have had so many tokens, by its own lowest share.  Were tokens sent by chance
  // and each by itself, none of 16 would have a chance of 1e-7.
  double steady_share = 0.1;
  double steady_tokens = 16;
  // With tokens, so that it is known how often an expert has none.  The gaps of one that is sent tokens by
  // chance are exponential; that one is 8 times as long as the longest of 15 has a chance of 5e-6.
  int32_t seen = 16;
  int32_t start_samples = 64;  // Without any from the first one on.
  double tokens = 4;           // Of the mean expert, below which nothing is said of the breadth.
  double breadth = 0.05;       // Below which a router has collapsed,
  double breadth_fall = 8;     // and so many times below all of its best 64 samples.
};

// Losses and labels of sequences: sequence_watch.h.
struct SequencesOptions {
  double repeated_share = 0.95;  // Of the labels are the same as the one before,
  double usual_share = 0.5;      // and were so in no step of the past.
  double labels = 64;            // That count, below which a step says nothing.
  // Beyond all of its past by so many times its range, and so many times the largest of it.
  double range_factor = 2;
  double rise_factor = 1.5;
  int32_t hold_values = 3;       // In a row: a warning,
  int32_t relearn_values = 100;  // and the new normal.
};

// Parameters that leave their own past: tensor_pasts.h.  The factors are chosen so that none of the 10^4
// healthy parameters of tests/server/detect/tensor_pasts_test.cc fires in 2,000 samples.
struct ParametersOptions {
  // Beyond all of its past by so many times its range, as logarithms,
  double range_factor = 2;
  // and by at least such a factor; what all share needs less, and a gradient that falls more.
  double rise_factor = 10;
  double shared_factor = 4;
  double fall_factor = 30;
  int32_t hold_samples = 5;       // In a row: information,
  int32_t persist_samples = 20;   // a warning,
  int32_t relearn_samples = 100;  // and the new normal.
  // The largest second-moment lag of a step is above this, and beyond its own past by range_factor.  The paper of
  // StableAdamW (arXiv 2304.13013) saw the loss spike behind 2.3.
  double lag_level = 2.3;
  int32_t lag_samples = 3;  // In a row: a warning.
  // Growth of single weights, by growth_watch.h: they are so many times as large as before,
  double growth_factor = 1.25;
  // over so many samples; two are enough where it is far faster.
  int32_t growth_samples = 3;
  // It is so many times its own fastest of the past, and that of others,
  double growth_rate_factor = 2;
  // and doubles them in fewer steps: slower growth is ordinary training, as of heads.
  double growth_doubling_steps = 2000;
  // Tensors in 8 bits, by scale_watch.h: of their elements so many are at the largest number, or of those that were
  // not 0 have become 0.  In healthy small decoders with delayed scaling 0.6 % and 2.3 % were, at most.
  double saturated_share = 0.01;
  double flushed_share = 0.05;
  int32_t scale_samples = 2;  // In a row that cover the tensor.
};

// Weights and gradients that jump at one place alone: corruption_watch.h.
struct CorruptionOptions {
  // What the norm of a weight must rise to from one sample to the next.  A flip of the highest bits of an
  // exponent gives 2^16 and more; healthy weights change by a few per cent.
  double weight_factor = 16;
  double gradient_factor = 1e4;   // Times the largest of a gradient's past.
  int32_t relearn_samples = 100;  // That are the new normal.
};

// Whether a run learns at all, by its loss, gradient norm and learning rate: learning_watch.h.
struct LearningOptions {
  // Values in a row that are equal to the last bit, of a loss, or 0, of a gradient norm or a learning rate.
  int32_t equal_values = 16;
  // Gradient norms that rise from value to value,
  int32_t rising_values = 24;
  // to so many times all of their past.
  double rising_factor = 3;
  // By which the gradient norm jumps at once and stays, while the loss does not: a scale.
  double scale_factor = 16;
  int32_t scale_values = 8;
  // Of the optimizer's own steps: optimizer_watch.h.
  double change_share = 0.05;
  double update_factor = 8;
  double lag_level = 3;
  double jump_factor = 3;
  double fall_factor = 20;
};

struct ContextOptions {
  // Trends of heads and parameters, and slow ones of experts, are not judged in the first steps of a run: the learning
  // rate warms up, heads take shape and all of them grow.
  int64_t warmup_steps = 700;
  // Where the learning rate is told they are judged from so many steps behind its last rise.
  int64_t warmed_steps = 50;
  // Those of heads also where the loss has fallen by a smaller share of its highest mean of 50: a fine-tune, or
  // another run whose heads have taken shape before it began.  Losses of runs from random weights fall by half.
  double forming_fall = 0.4;
  // A state that was there in the first sample is how the run was found, as a pretrained model has large biases of
  // its keys.  It counts once it is so many times what it was.
  double found_factor = 1.5;
  // After an announced change, for trends.
  int64_t settle_steps = 200;
  // Of the learning rate between two reports: a change, announced or not.
  double rate_factor = 1.5;
  // Where the median step takes so long, spans in steps are shorter in the first so many steps: step_pace.h.  The
  // recorded runs have steps of 0.05 to 3 s; those of reinforcement learning take minutes.
  double slow_step_seconds = 10;
  int64_t young_steps = 320;
};

struct AlertOptions {
  int64_t resolve_steps = 1000;  // Without evidence before an alert resolves.
  int64_t cooldown_steps = 500;  // After which the same cause may open again.
  int32_t heads_max = 32;        // Named per alert.
  // A drift names at least so many heads of its layer: those that a rule has
  // found, then the next in line.
  int32_t suspects_min = 3;
  int32_t evidence_max = 32;          // Pieces per transition.
  double hook_overhead_max = 0.02;    // Share of the step's time.
  int32_t hook_overhead_steps = 200;  // For so long.
};

// What can be switched off: the built-in rules, and the tests of the drift
// rule one by one, and what own signals are held against beside limits.  What is off is still followed, so that it can
// be switched on again, but never holds.  drift.leak off: as if no key leak were measured.
enum class Builtin : uint8_t {
  kDrift,
  kDriftGrowth,
  kDriftLevel,
  kDriftCommonMode,
  kDriftLeak,
  kTies,
  kNorm,
  kLogits,
  kLoss,
  kGradient,
  kNonfinite,
  kDisagreement,
  kSilent,
  kOverhead,
  kKernel,
  kArithmetic,
  kOwn,
  kOwnPast,
  kFrozen,
  kExperts,
  kSequences,
  kParameters,
  kCorruption,
  kLearning,
};
inline constexpr int kBuiltins = 24;

struct BuiltinSet {
  uint32_t bits = 0;  // 1 << Builtin

  BuiltinSet() = default;
  BuiltinSet(std::initializer_list<Builtin> rules) {
    for (const Builtin rule : rules) Add(rule);
  }
  bool has(Builtin rule) const { return (bits >> static_cast<uint32_t>(rule) & 1u) != 0; }
  void Add(Builtin rule) { bits |= 1u << static_cast<uint32_t>(rule); }
  bool operator==(const BuiltinSet&) const = default;
};

struct UserRule;  // user_rule.h

struct JudgeOptions {
  TrendOptions trend;
  DriftOptions drift;
  LeakOptions leak;
  TiesOptions ties;
  NormOptions norm;
  LogitsOptions logits;
  LossOptions loss;
  KernelOptions kernel;
  ArithmeticOptions arithmetic;
  OwnOptions own;
  FrozenOptions frozen;
  ExpertsOptions experts;
  SequencesOptions sequences;
  ParametersOptions parameters;
  CorruptionOptions corruption;
  LearningOptions learning;
  ContextOptions context;
  AlertOptions alert;
  BuiltinSet off;
  // Beside the built-in ones; null = none.
  std::shared_ptr<const std::vector<UserRule>> rules;

  // Whether neither this nor, for a test of a rule, that rule is off.
  bool is_on(Builtin rule) const {
    const bool of_drift = rule >= Builtin::kDriftGrowth && rule <= Builtin::kDriftLeak;
    const bool of_own = rule == Builtin::kOwnPast;
    return !off.has(rule) && !(of_drift && off.has(Builtin::kDrift)) && !(of_own && off.has(Builtin::kOwn));
  }
};

// Fixed size of the windows in memory.
inline constexpr int32_t kWindowBatchesMax = 64;
// Of an own signal's past: so many batches, of which the newest is so many old.
inline constexpr int32_t kOwnWindowBatches = 64;
inline constexpr int32_t kOwnLagBatches = 12;

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_JUDGE_OPTIONS_H_
