#include "tools/lab/truth.h"

#include <algorithm>
#include <numeric>

namespace bellwether::server {
namespace {

constexpr float kSigmaMin = 20;
constexpr float kSigmaFactor = 2;
constexpr int64_t kSigmaSteps = 500;
constexpr size_t kLossValues = 50;
constexpr double kLossRise = 0.5;
constexpr int64_t kLossMeans = 200;

}  // namespace

void TruthFinder::Observe(const StepSample& sample) {
  truth_.steps = std::max(truth_.steps, sample.step);
  if (sample.has(SignalId::kWqSigma)) ObserveNorms(sample);
  if (const float loss = sample.scalar(SignalId::kLoss); !IsNotMeasured(loss)) ObserveLoss(sample.step, loss);
}

void TruthFinder::ObserveNorms(const StepSample& sample) {
  if (truth_.t_sigma >= 0 && sample.step > truth_.t_sigma + kSigmaSteps) return;
  while (!norms_.empty() && norms_.front().step < sample.step - kSigmaSteps) norms_.pop_front();
  const auto sigma = sample.matrix(SignalId::kWqSigma);
  const auto heads = static_cast<size_t>(sample.layout().heads);
  for (size_t at = 0; at < sigma.size(); ++at) {
    if (!(sigma[at] > kSigmaMin)) continue;
    const bool doubled = std::any_of(norms_.begin(), norms_.end(),
                                     [&](const Norms& past) { return sigma[at] >= kSigmaFactor * past.sigma[at]; });
    if (!doubled) continue;
    if (truth_.t_sigma < 0) truth_.t_sigma = sample.step;
    const Head head{static_cast<int32_t>(at / heads), static_cast<int32_t>(at % heads)};
    if (std::find(truth_.heads.begin(), truth_.heads.end(), head) == truth_.heads.end()) truth_.heads.push_back(head);
  }
  norms_.push_back({sample.step, {sigma.begin(), sigma.end()}});
}

void TruthFinder::ObserveLoss(int64_t step, double loss) {
  if (truth_.t_loss >= 0) return;
  losses_.push_back(loss);
  if (losses_.size() < kLossValues) return;
  if (losses_.size() > kLossValues) losses_.pop_front();
  // Summed anew: a NaN that has left the window is forgotten.
  const double mean = std::accumulate(losses_.begin(), losses_.end(), 0.0) / static_cast<double>(kLossValues);
  if (mean < least_mean_) least_mean_ = mean;
  means_off_ = mean <= least_mean_ + kLossRise ? 0 : means_off_ + 1;  // A NaN is off.
  if (means_off_ == kLossMeans) truth_.t_loss = step - kLossMeans + 1 - static_cast<int64_t>(kLossValues);
}

}  // namespace bellwether::server
