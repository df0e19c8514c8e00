#include "server/detect/thresholds.h"

#include <cmath>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace bellwether::server {
namespace {

#define BW_ROW(section, name, low, high, unit, help)                                                           \
  {                                                                                                            \
#section, #name, [](JudgeOptions * o) -> ThresholdSlot { return &o->section.name; }, low, high, unit, help \
  }

constexpr Threshold kThresholds[] = {
    BW_ROW(trend, batch_steps, 1, 1000, "steps", "samples of so many steps are averaged before anything is judged"),
    BW_ROW(trend, window_batches, 8, kWindowBatchesMax, "batches", "that a trend looks at"),
    BW_ROW(trend, window_batches_min, 8, kWindowBatchesMax, "batches", "that a trend needs at least"),
    BW_ROW(trend, window_batches_short, 8, kWindowBatchesMax, "batches",
           "newest ones that are tried alone: a fast drift that begins inside the window"),
    BW_ROW(trend, mann_kendall_z_min, 1, 20, "", "z of Mann-Kendall from which a rise is monotone"),
    BW_ROW(trend, r2_min, 0, 1, "", "share of the variance of ln x that the line must explain"),
    BW_ROW(trend, doubling_steps_max, 1, 1e7, "steps",
           "slower growth than a doubling in this time is ordinary training"),
    BW_ROW(trend, gate_share, 0, 1, "", "share of the slowest growth that counts, below which no line is fitted"),
    BW_ROW(trend, refit_batches, 1, 1000, "batches", "a trend that has long held is fitted anew only so often"),

    BW_ROW(drift, ratio_floor, 0, 1e6, "", "the median head's drift ratio counts as at least this"),
    BW_ROW(drift, grown_factor, 1, 1e6, "times the median head", "drift ratio that must be growing"),
    BW_ROW(drift, level_factor, 1, 1e6, "times the median head", "drift ratio that need not grow exponentially"),
    BW_ROW(drift, level_batches, 1, 10000, "batches", "that the level test must hold"),
    BW_ROW(drift, level_rise_min, 0, 1e6, "", "newest against oldest over the window, for the level test"),
    BW_ROW(drift, common_mode_large, 0, 1e9, "logits", "common mode that must be growing"),
    BW_ROW(drift, common_mode_factor, 0, 1e6, "times the median head", "common mode that must be growing"),
    BW_ROW(drift, peers_min, 2, 1e6, "heads", "fewer in the run are no peers"),
    BW_ROW(drift, heads_usual, 1, 1e6, "heads", "runs of more heads ask for larger factors of the ratio"),
    BW_ROW(drift, heads_exponent, 0, 1, "", "the factors grow with (heads / heads_usual) to this power"),
    BW_ROW(drift, ratio_critical, 1, 1e9, "", "drift ratio at which a head is lost: the time left counts to it"),
    BW_ROW(drift, eta_steps_max, 1, 1e9, "steps", "longer times left are unknown"),
    BW_ROW(drift, common_mode_critical, 1, 1e9, "logits", "common mode at which a head is lost"),
    BW_ROW(drift, hold_batches, 1, 10000, "batches", "that the growth tests must hold"),

    BW_ROW(leak, floor, 0, 1, "", "the median head's key-gradient leak counts as at least this"),
    BW_ROW(leak, factor, 1, 1e6, "times the median head", "leak that is an error of the kernel"),
    BW_ROW(leak, hold_batches, 1, 10000, "batches", "that it must hold"),
    BW_ROW(leak, memory_steps, 0, 1e9, "steps", "that a layer counts as leaking after it, for a critical"),

    BW_ROW(ties, fraction_min, 0, 1, "of the rows", "with a repeated bf16 maximum"),
    BW_ROW(ties, peer_factor, 0, 1e6, "times the median head", "share of rows that ties must also have"),
    BW_ROW(ties, fraction_high, 0, 1, "of the rows", "that a run of however many heads asks for at most"),
    BW_ROW(ties, hold_batches, 1, 10000, "batches", "that it must hold"),
    BW_ROW(ties, bias_t_min, 0, 1000, "", "t of the signed error of delta that is a bias; no rule asks for it"),

    BW_ROW(norm, peer_factor, 1, 1e6, "times the median head", "sigma(W_Q)"),
    BW_ROW(norm, rise_min, 1, 1e6, "", "of sigma(W_Q) against the median head, over the window"),
    BW_ROW(norm, hold_batches, 1, 10000, "batches", "that it must hold"),
    BW_ROW(norm, far_factor, 1, 1e6, "times the median head", "sigma(W_Q) of a drifting head whose weights have moved"),
    BW_ROW(norm, rescue_sigma_max, 0, 1e9, "", "sigma(W_Q) above which an alert advises to go back to a checkpoint"),

    BW_ROW(logits, logit_max_large, 0, 1e9, "logits", "a head's largest score"),
    BW_ROW(logits, logit_median_large, 0, 1e9, "logits", "the median head's largest score"),
    BW_ROW(logits, logit_median_critical, 0, 1e9, "logits", "the same, critical"),
    BW_ROW(logits, entropy_ratio_collapsed, 0, 1, "",
           "the median head's entropy ratio at which attention is on one key"),
    BW_ROW(logits, hold_batches, 1, 10000, "batches", "that a head's largest score must hold"),

    BW_ROW(loss, window_values, 16, 1024, "values", "that an impulse is held against"),
    BW_ROW(loss, impulse_sigma, 1, 100, "standard deviations", "above the window: an impulse"),
    BW_ROW(loss, impulse_values, 1, 1000, "values", "in a row that make an impulse"),
    BW_ROW(loss, mean_values, 2, 1024, "values", "of the smoothed loss"),
    BW_ROW(loss, rise_of_minimum, 0, 1000, "of the minimum", "that the smoothed loss must be above it"),
    BW_ROW(loss, rise_of_gain, 0, 1000, "of what was won", "that it must be above its minimum too"),
    BW_ROW(loss, rise_sigma, 0, 1000, "standard errors", "that it must be above its minimum too"),
    BW_ROW(loss, gradient_factor, 1, 1e6, "times its geometric mean", "gradient norm: an impulse"),
    BW_ROW(loss, persist_steps, 1, 1e6, "steps", "that a spike of data does not last: a warning"),
    BW_ROW(loss, critical_steps, 1, 1e6, "steps", "that the loss is off its course: critical"),
    BW_ROW(loss, change_steps, 0, 1e6, "steps", "after an announced change that its level before it is kept"),
    BW_ROW(loss, change_hold_steps, 1, 1e6, "steps", "that the loss must be far above that"),
    BW_ROW(loss, change_rise_of_level, 0, 1000, "of the level before", "far, where a change should not move it"),
    BW_ROW(loss, change_rise_of_gain, 0, 1000, "of what was won", "far, where a change should not move it"),
    BW_ROW(loss, change_lost_of_gain, 0, 1000, "of what was won", "lost, whatever was changed"),
    BW_ROW(loss, change_lost_of_level, 0, 1000, "times the level before",
           "lost, in a run that began near it, as a fine-tune does"),
    BW_ROW(loss, turn_rise_of_level, 0, 1000, "of the lowest median of 16", "that a loss which turns is above it"),
    BW_ROW(loss, turn_rise_of_gain, 0, 1000, "of what was won", "that it is above it, too"),
    BW_ROW(loss, turn_sigma, 0, 1000, "deviations of neighbours", "that it is above it, too"),
    BW_ROW(loss, turn_values, 1, 1e6, "values", "in a row that make a turn: information"),
    BW_ROW(loss, turn_lasting_values, 1, 1e6, "values", "in a row that are no stretch of other data: a warning"),
    BW_ROW(loss, start_rise, 0, 1000, "of the first losses",
           "that the loss is above them: a start which loses what was learnt"),
    BW_ROW(loss, start_moved, 0, 1000, "in ln", "that W_Q of half of the heads has changed by then"),
    BW_ROW(loss, step_sigma, 0, 1000, "standard errors", "that the newest losses are above those before: a step"),
    BW_ROW(loss, step_rise_of_level, 0, 1000, "of the level", "that they are above it, too"),

    BW_ROW(kernel, chance, 1e-12, 1, "", "that a run of whatever length has a false alarm of this rule"),

    BW_ROW(arithmetic, chance, 1e-12, 1, "", "that a run of whatever length has a false alarm of this rule"),
    BW_ROW(arithmetic, z_min, 0, 1e6, "", "standard deviations of rounding that are none of a fault in any case"),

    BW_ROW(own, finite_values, 1, 255, "values", "finite ones in a row after which NaN or infinity is wrong"),
    BW_ROW(own, batch_values, 1, 1000, "values", "that are averaged before they are held against their past"),
    BW_ROW(own, range_factor, 0, 1000, "of the past's range", "beyond all of the past"),
    BW_ROW(own, rise_factor, 1, 1e6, "times the past's median", "to which what is bad when it rises must rise"),
    BW_ROW(own, fall_share, 0, 1000, "of the past's median", "by which what is bad when it falls must fall"),
    BW_ROW(own, hold_batches, 1, 1000, "batches", "in a row: information"),
    BW_ROW(own, persist_batches, 1, 10000, "batches", "in a row: a warning"),
    BW_ROW(own, relearn_batches, 1, 10000, "batches", "in a row that are the new normal"),
    BW_ROW(frozen, samples, 1, 10000, "samples", "that a parameter with a gradient, or all of them, must stand still"),
    BW_ROW(frozen, gradient_share, 0, 1, "of the median parameter's", "that a gradient must have"),

    BW_ROW(experts, samples, 1, 10000, "samples", "in a row, and times as many as ever before, without a token"),
    BW_ROW(experts, steady_share, 0, 1, "of the mean expert's tokens",
           "that an expert has always had which is dead sooner"),
    BW_ROW(experts, steady_tokens, 1, 1e9, "tokens",
           "that it should have had by its lowest share, in two samples at least"),
    BW_ROW(experts, seen, 1, 10000, "samples", "with tokens after which an expert is judged by its past"),
    BW_ROW(experts, start_samples, 1, 10000, "samples", "without a token from the start: information"),
    BW_ROW(experts, tokens, 0, 1e9, "tokens", "of the mean expert, below which a sample says nothing of the breadth"),
    BW_ROW(experts, breadth, 0, 1, "", "of a layer's load, below which its router has collapsed"),
    BW_ROW(experts, breadth_fall, 1, 1e6, "times", "that it must be below all of its best 64 samples"),

    BW_ROW(sequences, repeated_share, 0, 1, "of the labels", "that are the same as the one before"),
    BW_ROW(sequences, usual_share, 0, 1, "of the labels", "that were so in no step of the past"),
    BW_ROW(sequences, labels, 0, 1e9, "labels", "that count, below which a step says nothing of them"),
    BW_ROW(sequences, range_factor, 0, 1000, "of the past's range", "that a loss must be beyond all of the past"),
    BW_ROW(sequences, rise_factor, 1, 1e6, "times the past's largest", "that it must be, too"),
    BW_ROW(sequences, hold_values, 1, 1000, "values", "in a row: a warning"),
    BW_ROW(sequences, relearn_values, 1, 10000, "values", "in a row that are the new normal"),

    BW_ROW(parameters, range_factor, 0, 1000, "of the past's range", "beyond all of the past, as logarithms"),
    BW_ROW(parameters, rise_factor, 1, 1e6, "times", "beyond all of the past, too"),
    BW_ROW(parameters, shared_factor, 1, 1e6, "times", "the same of what all parameters share"),
    BW_ROW(parameters, fall_factor, 1, 1e9, "times", "below all of the past, of a gradient that falls"),
    BW_ROW(parameters, hold_samples, 1, 1000, "samples", "in a row that cover it: information"),
    BW_ROW(parameters, persist_samples, 1, 10000, "samples", "in a row: a warning"),
    BW_ROW(parameters, relearn_samples, 1, 10000, "samples", "in a row that are the new normal"),
    BW_ROW(parameters, lag_level, 0, 1e6, "", "that the largest second-moment lag of a step must be above, too"),
    BW_ROW(parameters, lag_samples, 1, 10000, "samples", "in a row of such a lag: a warning"),
    BW_ROW(parameters, growth_factor, 1, 1e6, "times", "as large as before: a weight that grows alone"),
    BW_ROW(parameters, growth_samples, 1, 10000, "samples", "in a row that it must grow; two where it is far faster"),
    BW_ROW(parameters, growth_rate_factor, 1, 1e6, "times", "as fast as in its past, and as others grow"),
    BW_ROW(parameters, growth_doubling_steps, 1, 1e7, "steps", "slower growth than a doubling in this time is none"),
    BW_ROW(parameters, saturated_share, 0, 1, "", "of a tensor in 8 bits that is at the largest number"),
    BW_ROW(parameters, flushed_share, 0, 1, "", "of a tensor's elements that are 0 in 8 bits and were not before"),
    BW_ROW(parameters, scale_samples, 1, 10000, "samples", "in a row that cover such a tensor"),

    BW_ROW(corruption, weight_factor, 1, 1e9, "times the sample before", "the norm of one weight, and of no other"),
    BW_ROW(corruption, gradient_factor, 1, 1e30, "times its past's largest", "an element of one gradient"),
    BW_ROW(corruption, relearn_samples, 1, 10000, "samples", "in a row that are the new normal"),

    BW_ROW(learning, equal_values, 2, 1e6, "values", "in a row of the same loss, of a gradient or a rate of 0"),
    BW_ROW(learning, rising_values, 8, 1000, "values", "of the gradient norm that rise from one to the next"),
    BW_ROW(learning, rising_factor, 1, 1e6, "times", "that they are above all of their past"),
    BW_ROW(learning, scale_factor, 1, 1e9, "times", "beyond all of its past, up or down: a scale of the gradient"),
    BW_ROW(learning, scale_values, 1, 1e6, "values", "in a row, in which the loss is as before"),
    BW_ROW(learning, change_share, 0, 1, "", "of a parameter that a step changes: the learning rate is too high"),
    BW_ROW(learning, update_factor, 1, 1e9, "learning rates", "that a step of Adam is long: epsilon is too small"),
    BW_ROW(learning, lag_level, 1, 1e9, "", "lag of second moments that follow too slowly, in two samples in a row"),
    BW_ROW(learning, jump_factor, 1, 1e9, "times", "all before, to which the learning rate rises at once"),
    BW_ROW(learning, fall_factor, 1, 1e9, "times", "less, to which the learning rate falls at once"),

    BW_ROW(context, warmup_steps, 0, 1e7, "steps",
           "at the start of a run in which no trend of heads or parameters, and no slow one of experts, is told"),
    BW_ROW(context, warmed_steps, 0, 1e7, "steps",
           "behind the last rise of the learning rate: where it is told, they end"),
    BW_ROW(context, forming_fall, 0, 1, "of the loss",
           "that is lost while heads take shape: where less is, their trends are told from there on as well"),
    BW_ROW(context, found_factor, 1, 1e6, "times",
           "its first sample, from which a state counts that was out of bounds there already"),
    BW_ROW(context, settle_steps, 0, 1e7, "steps", "after an announced change of which nothing is said, but of states"),
    BW_ROW(context, rate_factor, 1, 1e6, "", "of the learning rate between two reports: a change, announced or not"),
    BW_ROW(context, slow_step_seconds, 0.001, 1e6, "s", "a median step so long makes spans in steps shorter at first"),
    BW_ROW(context, young_steps, 0, 1e7, "steps", "in which they are"),

    BW_ROW(alert, resolve_steps, 1, 1e7, "steps", "without evidence after which an alert resolves"),
    BW_ROW(alert, cooldown_steps, 0, 1e7, "steps", "that its kind then stays quiet, unless it is worse"),
    BW_ROW(alert, heads_max, 1, 32, "heads", "that an alert names"),
    BW_ROW(alert, suspects_min, 0, 32, "heads", "of its layer that a drift names: those found, then the next in line"),
    BW_ROW(alert, evidence_max, 1, 32, "", "pieces of evidence of a transition"),
    BW_ROW(alert, hook_overhead_max, 0, 1, "of the step's time", "that the hook may take"),
    BW_ROW(alert, hook_overhead_steps, 1, 1e6, "steps", "that it must take more"),
};
#undef BW_ROW

constexpr ThresholdOrder kOrders[] = {
    {"trend.window_batches_min", "trend.window_batches"},
    {"trend.window_batches_short", "trend.window_batches"},
    {"trend.window_batches_min", "trend.window_batches_short"},
    {"logits.logit_median_large", "logits.logit_median_critical"},
    {"loss.persist_steps", "loss.critical_steps"},
    {"loss.turn_values", "loss.turn_lasting_values"},
    {"own.hold_batches", "own.persist_batches"},
    {"own.persist_batches", "own.relearn_batches"},
    {"sequences.usual_share", "sequences.repeated_share"},
    {"sequences.hold_values", "sequences.relearn_values"},
    {"parameters.hold_samples", "parameters.persist_samples"},
    {"parameters.persist_samples", "parameters.relearn_samples"},
    {"parameters.lag_samples", "parameters.relearn_samples"},
    {"parameters.growth_samples", "parameters.relearn_samples"},
};

// Converts to whatever a field is; never run.
struct AnyField {
  template <class T>
  constexpr operator T() const;  // NOLINT: implicit is its purpose.
};

template <class T, size_t... I>
constexpr bool TakesFields(std::index_sequence<I...>) {
  return requires { T{(static_cast<void>(I), AnyField{})...}; };
}
template <class T, size_t N = 0>
constexpr size_t FieldCount() {
  if constexpr (TakesFields<T>(std::make_index_sequence<N + 1>())) {
    return FieldCount<T, N + 1>();
  } else {
    return N;
  }
}

constexpr size_t RowCount(std::string_view section) {
  size_t rows = 0;
  for (const Threshold& row : kThresholds) rows += section == row.section ? 1 : 0;
  return rows;
}
constexpr size_t SectionCount() {
  size_t sections = 0;
  for (size_t i = 0; i < std::size(kThresholds); ++i) {
    sections += i == 0 || std::string_view(kThresholds[i - 1].section) != kThresholds[i].section ? 1 : 0;
  }
  return sections;
}

// A new field of JudgeOptions wants a row above.
static_assert(RowCount("trend") == FieldCount<TrendOptions>());
static_assert(RowCount("drift") == FieldCount<DriftOptions>());
static_assert(RowCount("leak") == FieldCount<LeakOptions>());
static_assert(RowCount("ties") == FieldCount<TiesOptions>());
static_assert(RowCount("norm") == FieldCount<NormOptions>());
static_assert(RowCount("logits") == FieldCount<LogitsOptions>());
static_assert(RowCount("loss") == FieldCount<LossOptions>());
static_assert(RowCount("kernel") == FieldCount<KernelOptions>());
static_assert(RowCount("arithmetic") == FieldCount<ArithmeticOptions>());
static_assert(RowCount("own") == FieldCount<OwnOptions>());
static_assert(RowCount("frozen") == FieldCount<FrozenOptions>());
static_assert(RowCount("experts") == FieldCount<ExpertsOptions>());
static_assert(RowCount("sequences") == FieldCount<SequencesOptions>());
static_assert(RowCount("parameters") == FieldCount<ParametersOptions>());
static_assert(RowCount("corruption") == FieldCount<CorruptionOptions>());
static_assert(RowCount("learning") == FieldCount<LearningOptions>());
static_assert(RowCount("context") == FieldCount<ContextOptions>());
static_assert(RowCount("alert") == FieldCount<AlertOptions>());
static_assert(SectionCount() + 2 == FieldCount<JudgeOptions>(), "beside the sections there are off and rules");

constexpr const char* kBuiltinNames[] = {
    "drift", "drift.growth", "drift.level", "drift.common_mode", "drift.leak", "ties",       "norm",       "logits",
    "loss",  "gradient",     "nonfinite",   "disagreement",      "silent",     "overhead",   "kernel",     "arithmetic",
    "own",   "own.past",     "frozen",      "experts",           "sequences",  "parameters", "corruption", "learning"};
static_assert(std::size(kBuiltinNames) == kBuiltins);

}  // namespace

bool Threshold::whole() const {
  JudgeOptions any;
  return !std::holds_alternative<double*>(slot(&any));
}

double Threshold::Get(const JudgeOptions& options) const {
  // The slot is only read through.
  return std::visit([](const auto* value) { return static_cast<double>(*value); },
                    slot(const_cast<JudgeOptions*>(&options)));
}

void Threshold::Set(double value, JudgeOptions* options) const {
  std::visit([value](auto* to) { *to = static_cast<std::remove_pointer_t<decltype(to)>>(value); }, slot(options));
}

std::span<const Threshold> Thresholds() { return kThresholds; }

const Threshold* FindThreshold(std::string_view path) {
  for (const Threshold& row : kThresholds) {
    if (row.path() == path) return &row;
  }
  return nullptr;
}

std::span<const ThresholdOrder> ThresholdOrders() { return kOrders; }

const char* NameOf(Builtin rule) { return kBuiltinNames[static_cast<size_t>(rule)]; }

std::optional<Builtin> BuiltinNamed(std::string_view name) {
  for (int i = 0; i < kBuiltins; ++i) {
    if (name == kBuiltinNames[i]) return static_cast<Builtin>(i);
  }
  return std::nullopt;
}

std::span<const char* const> BuiltinNames() { return kBuiltinNames; }

std::string NumberText(double value) {
  if (std::abs(value) < 1e15 && value == std::floor(value)) return absl::StrCat(static_cast<int64_t>(value));
  std::string text;
  for (int digits = 1; digits <= 17; ++digits) {
    text = absl::StrFormat("%.*g", digits, value);
    double back = 0;
    if (absl::SimpleAtod(text, &back) && back == value) break;
  }
  return text;
}

}  // namespace bellwether::server
