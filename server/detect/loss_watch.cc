#include "server/detect/loss_watch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_format.h"
#include "server/detect/announced_change.h"

namespace bellwether::server {
namespace {

constexpr double kGradientJump = 2;

}  // namespace

double ValueWindow::mean() const {
  double sum = 0;
  for (const float value : values_) sum += value;
  return sum / static_cast<double>(values_.size());
}

double ValueWindow::Score(double value, int32_t size) const {
  if (!full(size)) return 0;
  const double centre = mean();
  double squares = 0;
  for (const float x : values_) squares += (x - centre) * (x - centre);
  const double deviation = std::sqrt(squares / static_cast<double>(values_.size()));
  // A window of equal values has no noise to measure by.
  return (value - centre) / std::max(deviation, 1e-6 * std::abs(centre) + 1e-12);
}

void ValueWindow::Push(float value, int32_t size) {
  if (!full(size)) {
    values_.push_back(value);
    return;
  }
  values_[next_ % values_.size()] = value;
  next_ = (next_ + 1) % static_cast<uint32_t>(size);
}

void ValueWindow::Shrink(int32_t size) {
  if (full(size)) return;
  // Oldest first again, so that what is added later finds its place.
  if (!values_.empty()) {
    const auto oldest = values_.begin() + static_cast<ptrdiff_t>(next_ % values_.size());
    std::rotate(values_.begin(), oldest, values_.end());
  }
  next_ = 0;
  const auto surplus = static_cast<ptrdiff_t>(values_.size()) - size;
  if (surplus > 0) values_.erase(values_.begin(), values_.begin() + surplus);
}

void ValueWindow::Clear() {
  values_.clear();
  next_ = 0;
}

void LossWatch::Follow(int64_t step, float value, double least_rise, Impulse* impulse) const {
  const double score = impulse->window.Score(value, options_.window_values);
  const bool beyond = score >= options_.impulse_sigma && value - impulse->window.mean() >= least_rise;
  if (!beyond) {
    impulse->since = -1;
    impulse->values = 0;
    impulse->window.Push(value, options_.window_values);
    return;
  }
  if (impulse->since < 0) {
    impulse->since = step;
    impulse->baseline = impulse->window.mean();
    impulse->threshold =
        impulse->baseline + std::max(least_rise, options_.impulse_sigma * (value - impulse->baseline) / score);
  }
  ++impulse->values;
  impulse->value = value;
}

void LossWatch::SetOptions(const LossOptions& options) {
  options_ = options;
  loss_.window.Shrink(options.window_values);
  gradient_.window.Shrink(options.window_values);
  recent_.Shrink(options.mean_values);
}

void LossWatch::ObserveLoss(int64_t step, float loss) {
  if (!std::isfinite(loss)) return;
  Follow(step, loss, 0, &loss_);
  // The new normal: whether it is off course is for the smoothed loss to say.
  if (loss_.since >= 0 && step - loss_.since >= options_.persist_steps) {
    loss_.window.Clear();
    loss_.since = -1;
    loss_.values = 0;
  }
  recent_.Push(loss, options_.mean_values);
  if (!recent_.full(options_.mean_values)) return;
  smoothed_ = recent_.mean();
  if (!minimum_known_ || smoothed_ < minimum_) {
    minimum_known_ = true;
    minimum_ = smoothed_;
    // One unit of score is one standard deviation of the values.
    const double unit = recent_.Score(smoothed_ + 1, options_.mean_values);
    noise_ = 1 / unit / std::sqrt(static_cast<double>(options_.mean_values));
  }
  start_ = std::max(start_, smoothed_);
  // Where losses lie around 0, as those of a policy do, a share of the minimum is no scale.
  const double of_gain = minimum_ > 0 ? options_.rise_of_gain : options_.change_lost_of_gain;
  rise_ = std::max(
      {options_.rise_of_minimum * std::abs(minimum_), of_gain * (start_ - minimum_), options_.rise_sigma * noise_});
  if (smoothed_ <= minimum_ + rise_) {
    high_since_ = -1;
  } else if (high_since_ < 0) {
    high_since_ = step;
  }
}

void LossWatch::ObserveGradient(int64_t step, float gradient) {
  if (!std::isfinite(gradient) || gradient <= 0) return;
  Follow(step, std::log(gradient), std::log(options_.gradient_factor), &gradient_);
  gradient_jump_.Observe(step, std::log(gradient), std::log(kGradientJump));
}

void LossWatch::FindLoss(int64_t step, bool course_alone, std::vector<Finding>* out) const {
  const int64_t lasted = high_since_ < 0 ? 0 : step - high_since_;
  if (lasted >= options_.persist_steps) {
    out->push_back(Finding::OfRun(Rule::kLoss,
                                  lasted >= options_.critical_steps ? Severity::kCritical : Severity::kWarning,
                                  {.signal = "loss",
                                   .value = smoothed_,
                                   .threshold = minimum_ + rise_,
                                   .baseline = minimum_,
                                   .first_step = high_since_,
                                   .detector = "level"}));
    out->back().stage = 5;
  } else if (!course_alone && loss_.since >= 0 && loss_.values >= options_.impulse_values) {
    out->push_back(Finding::OfRun(Rule::kLoss, Severity::kInfo,
                                  {.signal = "loss",
                                   .value = loss_.value,
                                   .threshold = loss_.threshold,
                                   .baseline = loss_.baseline,
                                   .first_step = loss_.since,
                                   .detector = "impulse"}));
  }
}

void LossWatch::FindGradient(int64_t step, std::vector<Finding>* out) const {
  if (gradient_jump_.holds()) {
    const double level = std::exp(gradient_jump_.level()), value = std::exp(gradient_jump_.value());
    Finding& finding = out->emplace_back(Finding::OfRun(Rule::kGradient, Severity::kWarning,
                                                        {.signal = "grad_norm",
                                                         .value = value,
                                                         .threshold = std::exp(gradient_jump_.highest()),
                                                         .baseline = level,
                                                         .first_step = gradient_jump_.since(),
                                                         .detector = kRankDetector}));
    finding.summary = absl::StrFormat("the gradient norm has jumped from %.3g to %.3g at step %s and stays", level,
                                      value, StepWords(gradient_jump_.since()));
    finding.note = finding.summary;
    return;
  }
  if (gradient_.since < 0 || gradient_.values < options_.impulse_values) return;
  const bool lasting = step - gradient_.since >= options_.persist_steps;
  out->push_back(Finding::OfRun(Rule::kGradient, lasting ? Severity::kWarning : Severity::kInfo,
                                {.signal = "grad_norm",
                                 .value = std::exp(gradient_.value),
                                 .threshold = std::exp(gradient_.threshold),
                                 .baseline = std::exp(gradient_.baseline),
                                 .first_step = gradient_.since,
                                 .detector = "impulse"}));
}

void LossWatch::Excuse(bool keep_course) {
  loss_ = {};
  gradient_ = {};
  gradient_jump_.Forget();
  if (keep_course && high_since_ >= 0) return;
  recent_.Clear();
  minimum_known_ = false;
  high_since_ = -1;
}

}  // namespace bellwether::server
