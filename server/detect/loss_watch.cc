#include "server/detect/loss_watch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace bellwether::server {

void LossWatch::Observe(int64_t step, bool has_loss, float loss,
                        bool has_gradient, float gradient) {
  const auto size = static_cast<size_t>(options_.mean_steps);
  if (has_loss && std::isfinite(loss)) {
    if (recent_.size() < size) {
      recent_.push_back(loss);
    } else {
      recent_[recent_next_] = loss;
    }
    recent_next_ = (recent_next_ + 1) % static_cast<uint32_t>(size);
    if (recent_.size() == size) {
      double mean = 0;
      for (const float value : recent_)
        mean += value / static_cast<double>(size);
      double variance = 0;
      for (const float value : recent_)
        variance += (value - mean) * (value - mean) / static_cast<double>(size);
      const bool first = smoothed_ == 0 && minimum_ == 0;
      smoothed_ = mean;
      if (first || mean < minimum_) {
        minimum_ = mean;
        noise_ = std::sqrt(variance / static_cast<double>(size));
      }
      start_ = std::max(start_, smoothed_);
      rise_ = std::max({options_.rise_of_minimum * std::abs(minimum_),
                        options_.rise_of_gain * (start_ - minimum_),
                        options_.rise_sigma * noise_});
      above_ = smoothed_ > minimum_ + rise_;
      if (!above_) {
        high_since_ = -1;
      } else if (high_since_ < 0) {
        high_since_ = step;
      }
    }
  }
  if (has_gradient && std::isfinite(gradient)) {
    const auto window = static_cast<size_t>(options_.window_steps);
    if (gradients_.size() < window) {
      gradients_.push_back(gradient);
      std::vector<float> sorted = gradients_;
      std::nth_element(
          sorted.begin(),
          sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2),
          sorted.end());
      gradient_base_ = sorted[sorted.size() / 2];
      return;
    }
    gradient_now_ = gradient;
    if (gradient > options_.gradient_factor * gradient_base_) {
      if (gradient_high_since_ < 0) gradient_high_since_ = step;
      return;  // The baseline stays as it was before.
    }
    gradient_high_since_ = -1;
    gradients_[gradient_next_] = gradient;
    gradient_next_ = (gradient_next_ + 1) % static_cast<uint32_t>(window);
    if (gradient_next_ == 0) {
      std::vector<float> sorted = gradients_;
      std::nth_element(
          sorted.begin(),
          sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2),
          sorted.end());
      gradient_base_ = sorted[sorted.size() / 2];
    }
  }
}

void LossWatch::Findings(int64_t step, std::vector<Finding>* loss,
                         std::vector<Finding>* gradient) const {
  if (high_since_ >= 0 && step - high_since_ >= options_.recovery_steps) {
    Finding& finding = loss->emplace_back();
    finding.rule = Rule::kLoss;
    finding.severity = Severity::kCritical;
    finding.stage = 5;
    finding.first_step = high_since_;
    finding.evidence.push_back({.signal = "loss",
                                .value = smoothed_,
                                .threshold = minimum_ + rise_,
                                .baseline = minimum_,
                                .first_step = high_since_,
                                .detector = "level"});
  }
  if (gradient_high_since_ >= 0 &&
      step - gradient_high_since_ >= options_.recovery_steps) {
    Finding& finding = gradient->emplace_back();
    finding.rule = Rule::kGradient;
    finding.severity = Severity::kWarning;
    finding.stage = 5;
    finding.first_step = gradient_high_since_;
    finding.evidence.push_back(
        {.signal = "grad_norm",
         .value = gradient_now_,
         .threshold = options_.gradient_factor * gradient_base_,
         .baseline = gradient_base_,
         .first_step = gradient_high_since_,
         .detector = "level"});
  }
}

void LossWatch::Excuse() {
  recent_.clear();
  recent_next_ = 0;
  minimum_ = smoothed_ = noise_ = 0;
  high_since_ = -1;
  gradient_high_since_ = -1;
}

}  // namespace bellwether::server
