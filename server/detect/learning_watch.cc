#include "server/detect/learning_watch.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"
#include "server/detect/median.h"

namespace bellwether::server {
namespace {

constexpr int32_t kValuesMax = 1 << 30;
// In a row in which sigma(W_Q) is the same, after so many in which it changed.
constexpr int32_t kStillSamples = 3;
constexpr uint16_t kMovedSamples = 4;
// Samples without a step of the optimizer.
constexpr uint16_t kSteplessSamples = 2;
// A rate of 0: a schedule begins or ends with one.
constexpr int32_t kZeroRateValues = 8;
// Of so many rising values one in so many may be below the one before.
constexpr size_t kFallsOne = 6;
// Times the first of all values, for the past of a run that has none.
constexpr float kBeginsFactor = 2;
// Sums grow by the same each time, or less: what the second half of them has risen against the first half.
constexpr double kStraight = 1.5;
// Of so many values, moves from one to the next in ln, and as a share of the median move before.
constexpr size_t kSmoothValues = 8;
constexpr double kSmooth = 0.06, kSmoothShare = 0.4;
constexpr int kOddMoves = 2;  // Hard batches.
// A sum with one gradient more is no more than so many times what it was.
constexpr float kSumJumpMax = 4;
// Times its past: what has added up is not yet cleared.
constexpr double kStillAbove = 2;
// What the loss may have become, against the largest of its past, for a jump of the gradient to be a scale.
constexpr double kLossSame = 1.5;
// Beyond that a jump is a scale, however second moments are.
constexpr double kLagFactor = 4;
constexpr double kDownShare = 0.5;
// Of that jump, what one step must have of it.
constexpr double kJump = 0.25;

uint64_t BitsOf(const StepSample& sample, bool* any) {
  uint64_t bits = 0xcbf29ce484222325u;
  *any = false;
  for (const SignalId signal : {SignalId::kWqSigma, SignalId::kWkSigma}) {
    for (const float value : sample.matrix(signal)) {
      if (!IsAbove0(value)) continue;
      *any = true;
      bits = (bits ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
    }
  }
  return bits;
}

}  // namespace

void LearningWatch::Same::Add(float next, int64_t step) {
  const bool same = count > 0 && std::bit_cast<uint32_t>(next) == std::bit_cast<uint32_t>(value);
  if (!same) since = step;
  count = same ? std::min(count + 1, kValuesMax) : 1;
  value = next;
}

void LearningWatch::Forget() {
  const LearningOptions options = options_;
  *this = LearningWatch(options);
}

void LearningWatch::Excuse() {
  norms_.clear();
  norms_step_.clear();
  next_ = 0;
  past_ = {};
  loss_past_ = {};
  scaled_ = 0;
  // What has added up before is no doing of the change.
  if (adding_since_ < 0) values_ = kValuesMax;
}

bool LearningWatch::Consistent() const {
  return norms_.size() <= 1000 && norms_.size() == norms_step_.size() && past_.Consistent() && loss_past_.Consistent();
}

Finding& LearningWatch::Add(SignalId signal, const char* detector, double value, double threshold, double baseline,
                            int64_t since) {
  return findings_.emplace_back(Finding::OfRun(Rule::kLearning, Severity::kWarning,
                                               {.signal = FindSignal(signal)->name,
                                                .value = value,
                                                .threshold = threshold,
                                                .baseline = baseline,
                                                .first_step = since,
                                                .detector = detector}));
}

bool LearningWatch::Observe(const StepSample& sample, bool explodes, bool lags) {
  findings_.clear();
  JudgeLoss(sample);
  JudgeRate(sample);
  JudgeSigma(sample);
  JudgeGradient(sample, explodes, lags);
  return sample.has(SignalId::kLoss) || sample.has(SignalId::kGradNorm) || sample.has(SignalId::kLearningRate) ||
         sample.has(SignalId::kWqSigma);
}

void LearningWatch::JudgeLoss(const StepSample& sample) {
  const float loss = sample.scalar(SignalId::kLoss);
  if (!IsNumber(loss)) return;
  loss_.Add(loss, sample.step);
  if (loss_.count < options_.equal_values) return;
  Finding& finding = Add(SignalId::kLoss, "constant", loss, loss, loss, loss_.since);
  finding.score = 3;
  finding.cause = "nothing to learn";
  finding.summary = absl::StrFormat(
      "nothing is learned: the loss has been exactly %.6g in %d values in a row, since "
      "step %d; are all labels masked, or is the batch always the same?",
      loss, loss_.count, loss_.since);
}

void LearningWatch::JudgeRate(const StepSample& sample) {
  const float rate = sample.scalar(SignalId::kLearningRate);
  if (!IsAtLeast0(rate)) return;
  // That of the first group; others may move.
  const auto moved = sample.matrix(SignalId::kTensorMoved);
  if (std::any_of(moved.begin(), moved.end(), [](float value) { return IsAbove0(value); })) {
    rate_ = {};
    return;
  }
  rate_.Add(rate, sample.step);
  if (rate != 0 || rate_.count < std::min(kZeroRateValues, options_.equal_values)) return;
  Finding& finding = Add(SignalId::kLearningRate, "constant", 0, 0, 0, rate_.since);
  finding.score = 2;
  finding.cause = "optimizer does not move";
  finding.summary = absl::StrCat("nothing is learned: the learning rate has been 0 in ", rate_.count,
                                 " values in a row, since step ", rate_.since);
}

void LearningWatch::JudgeSigma(const StepSample& sample) {
  bool any = false;
  const uint64_t bits = BitsOf(sample, &any);
  if (!any || !sample.complete) return;
  if (sample.has(SignalId::kTensorMoved)) {
    stepped_ = static_cast<uint16_t>(std::min(stepped_ + 1, 1000));
    stepless_ = 0;
  } else {
    stepless_ = static_cast<uint16_t>(std::min(stepless_ + 1, 1000));
  }
  const bool same = sigma_.count > 0 && bits == sigma_bits_;
  sigma_bits_ = bits;
  if (!same) {
    // One that stood still now and then does so by rounding.
    sigma_moved_ = sigma_.count > 1 ? uint16_t{0} : static_cast<uint16_t>(std::min(sigma_moved_ + 1, 1000));
    sigma_.count = 1;
    sigma_.since = sample.step;
    return;
  }
  sigma_.count = std::min(sigma_.count + 1, kValuesMax);
  const bool stepless = stepped_ >= kMovedSamples && stepless_ >= kSteplessSamples;
  if (sigma_moved_ < kMovedSamples || (sigma_.count <= kStillSamples && !stepless)) return;
  Finding& finding = Add(SignalId::kWqSigma, "still", 0, 0, std::numeric_limits<double>::quiet_NaN(), sigma_.since);
  finding.score = 2;
  finding.cause = "optimizer does not move";
  finding.summary = absl::StrCat(stepless ? "the optimizer takes no step" : "the optimizer's step changes nothing",
                                 ": W_Q and W_K of all layers have stood still for ", sigma_.count - 1,
                                 sigma_.count == 2 ? " sample" : " samples", ", since step ", sigma_.since);
  const float rate = sample.scalar(SignalId::kLearningRate);
  if (IsAbove0(rate)) absl::StrAppendFormat(&finding.summary, "; the learning rate is %.3g", rate);
}

bool LearningWatch::AddsUp(float norm, float* level) const {
  const auto size = static_cast<size_t>(options_.rising_values);
  if (norms_.size() < size) return false;
  const auto at = [&](size_t i) { return norms_[(next_ + i) % size]; };  // Oldest first.
  // In the first steps there is no past: there the first value must be the least, and the rise without a break.
  const bool begins = values_ == options_.rising_values;
  if (!begins && !past_.known()) return false;
  *level = begins ? kBeginsFactor * at(0) : past_.high();
  if (norm < options_.rising_factor * *level) return false;
  size_t falls = 0;
  for (size_t i = 1; i < size; ++i) falls += at(i) <= at(i - 1) ? 1 : 0;
  if (falls > (begins ? 1 : size / kFallsOne)) return false;
  // What explodes rises by more each time.
  const double first = at(size / 2) - at(0), second = at(size - 1) - at(size / 2);
  return second <= kStraight * first;
}

// A sum of gradients has the newest as a small part of it.
bool LearningWatch::AddsUpSmoothly(float* level) const {
  const auto size = static_cast<size_t>(options_.rising_values);
  if (norms_.size() < size || size < 2 * kSmoothValues || !past_.known()) return false;
  const auto at = [&](size_t i) { return norms_[(next_ + i) % size]; };  // Oldest first.
  const size_t begin = size - kSmoothValues;
  std::vector<double> before, moves_before, moves;
  // What it has risen in is neither.
  for (size_t i = 0; i < begin - kSmoothValues / 2; ++i) {
    before.push_back(at(i));
    if (i > 0) moves_before.push_back(std::abs(std::log(at(i) / at(i - 1))));
  }
  for (size_t i = 1; i < size; ++i) {
    if (at(i) > kSumJumpMax * at(i - 1)) return false;
  }
  float least = at(begin);
  for (size_t i = begin + 1; i < size; ++i) {
    moves.push_back(std::abs(std::log(at(i) / at(i - 1))));
    least = std::min(least, at(i));
  }
  *level = static_cast<float>(MedianOr(0, std::move(before)));
  if (!(least >= options_.rising_factor * *level)) return false;
  std::nth_element(moves.begin(), moves.end() - 1 - kOddMoves, moves.end());
  const double move = *(moves.end() - 1 - kOddMoves), usual = MedianOr(0, std::move(moves_before));
  if (move > kSmooth || move > kSmoothShare * usual) return false;
  // What explodes rises by more each time.
  const double first = at(begin + kSmoothValues / 2 - 1) - at(begin),
               second = at(size - 1) - at(begin + kSmoothValues / 2);
  return second <= std::max(first, 0.0) + kSmooth * at(begin);
}

void LearningWatch::JudgeGradient(const StepSample& sample, bool explodes, bool lags) {
  const float norm = sample.scalar(SignalId::kGradNorm), loss = sample.scalar(SignalId::kLoss);
  if (!IsAtLeast0(norm)) return;
  gradient_.Add(norm, sample.step);
  if (norm == 0) {
    if (gradient_.count < options_.equal_values) return;
    Finding& finding = Add(SignalId::kGradNorm, "constant", 0, 0, 0, gradient_.since);
    finding.score = 3;
    finding.cause = "nothing to learn";
    finding.summary = absl::StrCat("nothing is learned: the gradient norm has been 0 in ", gradient_.count,
                                   " values in a row, since step ", gradient_.since);
    return;
  }
  const auto size = static_cast<size_t>(options_.rising_values);
  if (norms_.size() > size) norms_.clear(), norms_step_.clear(), next_ = 0;  // Other options are in force.
  const float before = norms_.empty() ? norm : norms_[(next_ + norms_.size() - 1) % norms_.size()];
  if (norms_.size() < size) {
    norms_.push_back(norm);
    norms_step_.push_back(sample.step);
    next_ = 0;
  } else {
    norms_[next_ % size] = norm;
    norms_step_[next_ % size] = sample.step;
    next_ = static_cast<uint32_t>((next_ + 1) % size);
  }
  values_ = std::min(values_ + 1, kValuesMax);
  if (adding_since_ >= 0 ? norm > kStillAbove * level_
                         : (AddsUp(norm, &level_) || (!explodes && AddsUpSmoothly(&level_)))) {
    if (adding_since_ < 0) adding_since_ = norms_step_[next_ % size];
    Finding& finding =
        Add(SignalId::kGradNorm, "adds up", norm, options_.rising_factor * level_, level_, adding_since_);
    finding.score = 4;
    finding.cause = "gradients not cleared";
    finding.summary = absl::StrFormat(
        "gradients add up: the norm has risen step by step from %.3g to %.3g since step %d, by as much each time; is "
        "zero_grad() missing?",
        level_, norm, adding_since_);
    return;
  }
  adding_since_ = -1;
  const bool known = past_.known() && loss_past_.known();
  // Second moments that follow too slowly explain as much as they may have grown by.
  const double up_factor = lags ? kLagFactor * options_.scale_factor : options_.scale_factor;
  const bool up = known && norm >= up_factor * past_.high();
  // Gradients have spikes, and nothing like them below.
  const double down_factor = std::max(1.0, kDownShare * options_.scale_factor);
  const bool down = known && norm * down_factor <= past_.low();
  const bool loss_same = known && IsNumber(loss) && loss <= kLossSame * loss_past_.high();
  // What grows from step to step is no scale.
  const bool jumps = scaled_ > 0 || std::max(norm / before, before / norm) >= kJump * (up ? up_factor : down_factor);
  if ((down || up) && !explodes && loss_same && jumps) {
    if (scaled_++ == 0) scaled_since_ = sample.step;
    if (scaled_ < options_.scale_values) return;
    const double edge = up ? past_.high() : past_.low();
    Finding& finding =
        Add(SignalId::kGradNorm, "scale", norm, up ? up_factor * edge : edge / down_factor, edge, scaled_since_);
    finding.score = 1;
    finding.cause = "gradients scaled wrongly";
    finding.summary = absl::StrFormat(
        "the gradient norm has been %s of its past since step %d: %.3g, where it was %.3g "
        "to %.3g, and the loss is as before; is a loss scale taken off %s?",
        up ? absl::StrFormat("%.3g times the largest", norm / edge)
           : absl::StrFormat("1/%.3g of the smallest", edge / norm),
        scaled_since_, norm, past_.low(), past_.high(), up ? "not at all" : "twice");
    return;
  }
  scaled_ = 0;
  past_.Add(norm);
  if (IsNumber(loss) && loss > 0) loss_past_.Add(loss);
}

}  // namespace bellwether::server
