#include "server/detect/optimizer_watch.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/announced_change.h"
#include "server/detect/measured.h"
#include "server/detect/median.h"
#include "server/detect/parameter_role.h"

namespace bellwether::server {
namespace {

// Parameters that must show a step that is too wide, in two samples at least.
constexpr int32_t kWideRowsMin = 3;
constexpr double kWideFar = 2;  // Times change_share.
constexpr int32_t kHeldMax = 8;
// A step this much larger than gradients say, where second moments are beyond: they hold less than they saw.
constexpr double kLagOfUnderflow = 1.5;
// Without a large step for so many samples there was none.
constexpr int32_t kForgottenSamples = 20;
// A rate that is less than this of the largest mattered no more.
constexpr float kRateMattered = 0.1f;
// For so many steps a jump is told.
constexpr int64_t kJumpSteps = 100;
// A first rate is that of the run's begin if it came with one of these steps.
constexpr int64_t kBeginSteps = 2;
constexpr float kRateSame = 0.9f;
constexpr int32_t kExcusedSteps = 4;

bool HasAny(std::string_view name, std::initializer_list<std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [name](std::string_view part) { return name.find(part) != name.npos; });
}
bool MayBeginAtZero(std::string_view name) { return HasAny(name, {"bias", "norm", "ln_", "lora_B"}); }

constexpr char kMomentsCause[] = "second moment too slow";
constexpr char kMomentsAdvice[] =
    "Gradients have grown faster than beta2 lets second moments follow, so that steps are too large. A smaller beta2, "
    "clipping by update, or a lower learning rate until they have followed helps.";

std::string WordsOfMoments(double lag, int64_t since) {
  return absl::StrFormat("second moments do not follow: gradients are %.3g times what they expect, since step %s", lag,
                         StepWords(since));
}

}  // namespace

struct OptimizerWatch::Steps {
  std::vector<double> changes;  // Against the parameter.
  double update = 0;            // The largest, in learning rates.
  std::vector<double> lags;
  bool has_moments = false;
};

void OptimizerWatch::Excuse() {
  jump_ = {};
  // What it rises to next is meant.
  rate_ = 0;
  excused_ = kExcusedSteps;
  behind_ = {};
  large_ = {};
}

void OptimizerWatch::Forget() {
  const LearningOptions options = options_;
  *this = OptimizerWatch(options);
  excused_ = kExcusedSteps;
}

Finding& OptimizerWatch::Add(SignalId signal, const char* detector, double value, double threshold, int64_t since) {
  return findings_.emplace_back(Finding::OfRun(Rule::kLearning, Severity::kWarning,
                                               {.signal = FindSignal(signal)->name,
                                                .value = value,
                                                .threshold = threshold,
                                                .first_step = since,
                                                .detector = detector}));
}

void OptimizerWatch::FollowRate(const StepSample& sample) {
  const float now = sample.scalar(SignalId::kLearningRate);
  if (!IsAbove0(now)) return;
  if (rate_first_ == 0) {
    rate_first_ = now;
    first_step_ = sample.step;
  }
  const auto rises = static_cast<float>(options_.jump_factor), falls = static_cast<float>(options_.fall_factor);
  const bool rose = rate_ > 0 && now >= rises * rate_most_;
  const bool fell = rate_ > 0 && now * falls <= rate_ && rate_ >= kRateMattered * rate_most_;
  if (rose || fell) {
    jump_ = {.step = sample.step, .from = rate_, .to = now};
  } else if (jump_.step >= 0) {
    // Over where it has come back by half of the way, in the logarithm.
    const float middle = std::sqrt(jump_.from * jump_.to);
    const bool back = jump_.to > jump_.from ? now < middle : now > middle;
    if (back || sample.step - jump_.step > kJumpSteps) jump_ = {};
  }
  rate_ = now;
  rate_most_ = std::max(rate_most_, now);
}

void OptimizerWatch::JudgeJump(int64_t step) {
  if (jump_.step < 0 || step < jump_.step) return;
  const bool rose = jump_.to > jump_.from;
  const double factor = rose ? jump_.to / jump_.from : jump_.from / jump_.to;
  Finding& finding = Add(SignalId::kLearningRate, rose ? "rises" : "falls", jump_.to,
                         rose ? options_.jump_factor * jump_.from : jump_.from / options_.fall_factor, jump_.step);
  finding.score = 2.5;
  if (rose) {
    finding.cause = "learning rate too high";
    finding.summary = absl::StrFormat("the learning rate has risen %.3g times at once, from %.3g to %.3g at step %s",
                                      factor, jump_.from, jump_.to, StepWords(jump_.step));
    finding.advice =
        AdviceOn({.kind = EventKind::kLearningRate, .step = jump_.step, .from = jump_.from, .to = jump_.to});
  } else {
    finding.cause = "stall";
    finding.summary = absl::StrFormat(
        "the learning rate has fallen to 1/%.3g at once, from %.3g to %.3g at step %s: the loss will hardly fall from "
        "here on",
        factor, jump_.from, jump_.to, StepWords(jump_.step));
    finding.advice =
        "Look at the scheduler: steps that are counted twice, a schedule of fewer steps than the run has, or a state "
        "that was not restored. If the fall is meant, announce it with mon.event().";
  }
}

OptimizerWatch::Steps OptimizerWatch::StepsOf(const StepSample& sample, const RowNames* names) const {
  Steps steps;
  const float rate = sample.scalar(SignalId::kLearningRate);
  const auto changes = sample.matrix(SignalId::kTensorChangeSumsq);
  const auto of = sample.matrix(SignalId::kTensorChangeWeightSumsq);
  const auto weights = sample.matrix(SignalId::kTensorWeightSumsq);
  const auto elements = sample.matrix(SignalId::kTensorElements);
  const auto lags = sample.matrix(SignalId::kTensorLagSum);
  for (size_t i = 0; i < changes.size(); ++i) {
    const float changed = changes[i], size = ValueAt(of, i), count = ValueAt(elements, i);
    const float lag = ValueAt(lags, i);
    if (!IsAtLeast0(changed) || !IsAbove0(size) || !IsAbove0(count)) continue;
    // Of another optimizer, whose steps have another size.  In the first sample none has second moments yet.
    if (has_moments_ && !IsAtLeast0(lag)) continue;
    const std::string_view name =
        names != nullptr && i < static_cast<size_t>(names->size()) ? std::string_view(names->names()[i]) : "";
    const double change = std::sqrt(double{changed} / size);
    if (!MayBeginAtZero(name)) steps.changes.push_back(change);
    const double beyond = IsAtLeast0(lag) ? std::sqrt(double{lag} / count) : std::numeric_limits<double>::quiet_NaN();
    if (IsAtLeast0(lag)) {
      steps.has_moments = true;
      if (!IsEmbedding(name)) steps.lags.push_back(beyond);
    }
    // In the first step there is no second moment to be beyond.
    const float weight = ValueAt(weights, i);
    if (rate > 0 && IsAbove0(weight) && !(beyond * beyond < kLagOfUnderflow)) {
      steps.update = std::max(steps.update, change * std::sqrt(double{weight} / count) / rate);
    }
  }
  return steps;
}

bool OptimizerWatch::no_warmup() const {
  return first_step_ >= 0 && first_step_ <= kBeginSteps && rate_first_ >= kRateSame * rate_most_;
}

void OptimizerWatch::NameJump(std::vector<Finding>* of_gradient) const {
  const bool in_steps = step_lag_before_ > 0 && step_lag_ >= 2 * std::max<double>(options_.lag_level, step_lag_before_);
  if (!(lags() || in_steps) || of_gradient->empty()) return;
  Finding& jump = of_gradient->front();
  if (jump.severity < Severity::kWarning || std::string_view(jump.facts[0].detector) != kRankDetector) return;
  jump.cause = kMomentsCause;
  absl::StrAppend(
      &jump.summary, "; ",
      lags() ? WordsOfMoments(behind_.value, behind_.since) : WordsOfMoments(step_lag_, jump.facts[0].first_step));
  jump.advice = kMomentsAdvice;
}

void OptimizerWatch::JudgeSteps(const StepSample& sample, const Steps& steps) {
  const auto hold = [&](Held* held, int32_t rows, double value) {
    if (held->samples == 0) held->since = sample.step;
    held->samples = std::min(held->samples + 1, kHeldMax);
    held->rows = std::min(held->rows + rows, kHeldMax);
    held->value = static_cast<float>(value);
  };
  if (!steps.changes.empty()) {
    int32_t above = 0, below = 0;
    for (const double change : steps.changes) {
      if (change <= options_.change_share) {
        ++below;
      } else {
        // One that is far beyond says as much as two.
        above += change > kWideFar * options_.change_share ? 2 : 1;
      }
    }
    if (above > below) {
      hold(&wide_, above - below, MedianOr(0, steps.changes));
    } else {
      wide_.samples = std::max(0, wide_.samples - 1);
      wide_.rows = std::max(0, wide_.rows - (below - above));
      if (wide_.samples == 0 || wide_.rows == 0) wide_ = {};
    }
  }
  if (steps.update >= options_.update_factor) {
    hold(&large_, 1, steps.update);
  } else if (large_.samples > 0 && !steps.changes.empty() && ++large_.rows > kForgottenSamples) {
    large_ = {};
  }
  if (!steps.lags.empty()) {
    const double lag = MedianOr(0, steps.lags);
    if (lag >= options_.lag_level && excused_ == 0) {
      hold(&behind_, 1, lag);
    } else {
      behind_ = {};
    }
    if (behind_.samples >= 2) {
      Finding& finding = Add(SignalId::kTensorMomentLag, "lag", lag, options_.lag_level, behind_.since);
      finding.score = 3;
      finding.cause = kMomentsCause;
      finding.summary = WordsOfMoments(lag, behind_.since);
      finding.advice = kMomentsAdvice;
    }
  }
  if (excused_ > 0) --excused_;
  if (!has_moments_) return;
  if (large_.samples >= 2) {
    Finding& finding = Add(SignalId::kTensorUpdateRatio, "update", large_.value, options_.update_factor, large_.since);
    finding.score = 5;
    finding.cause = "epsilon too small";
    finding.summary = absl::StrFormat(
        "steps are larger than Adam's can be: up to %.3g learning rates, since step %s; second moments hold less than "
        "the gradients that were seen",
        large_.value, StepWords(large_.since));
    finding.advice =
        "Second moments have underflowed, in 16 or 8 bits, or epsilon is too small for what they round to. Keep them "
        "in fp32, or raise epsilon.";
  }
  // A step that is larger than the rate allows is no word on the rate: the next sample says whether that stays.
  const bool may_be_underflow = large_.samples == 1 && steps.update >= options_.update_factor;
  if (wide_.samples >= 2 && wide_.rows >= kWideRowsMin && !may_be_underflow) {
    Finding& finding = Add(SignalId::kTensorUpdateRatio, "change", wide_.value, options_.change_share, wide_.since);
    finding.score = 2;
    const bool no_warmup = this->no_warmup();
    finding.cause = no_warmup ? "warm-up missing" : "learning rate too high";
    finding.summary = absl::StrFormat("a step changes parameters by more than %.2g %% of their size, since step %s",
                                      100 * options_.change_share, StepWords(wide_.since));
    if (rate_ > 0) absl::StrAppendFormat(&finding.summary, "; the learning rate is %.3g", rate_);
    if (no_warmup) absl::StrAppend(&finding.summary, ", and was from the first step on");
    finding.advice = no_warmup ? "Let the learning rate rise over the first hundreds of steps, or lower it."
                               : "Lower the learning rate, or let it rise more slowly.";
  }
}

void OptimizerWatch::Observe(const StepSample& sample, const RowNames* names) {
  findings_.clear();
  FollowRate(sample);
  JudgeJump(sample.step);
  if (const float lag = sample.scalar(SignalId::kMomentLagMax); IsAbove0(lag)) {
    // What it was before it was far off, in however many samples.
    if (step_lag_ < 2 * options_.lag_level) step_lag_before_ = step_lag_;
    step_lag_ = lag;
  }
  if (sample.matrix(SignalId::kTensorChangeSumsq).empty() || !sample.complete) return;
  const Steps steps = StepsOf(sample, names);
  has_moments_ = has_moments_ || steps.has_moments;
  JudgeSteps(sample, steps);
}

}  // namespace bellwether::server
