#include "server/detect/loss_start.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"
#include "server/detect/median.h"

namespace bellwether::server {
namespace {

constexpr size_t kFirstLosses = 3;
constexpr size_t kNewestLosses = 12;
constexpr int64_t kStartSteps = 100;
// All tokens are as likely to a model that was never trained, so its first losses are alike.
constexpr double kUntrainedRange = 0.02;
// Of how far neighbouring losses scatter, for what the rise must be.
constexpr double kScatterShare = 0.7;

}  // namespace

double LossStart::first() const { return std::min<double>(first_[0], MedianOr(0, {first_.begin(), first_.end()})); }

double LossStart::value() const { return MedianOr(0, {newest_.begin(), newest_.end()}); }

double LossStart::MovedBy(const StepSample& sample) {
  const auto sigma = sample.matrix(SignalId::kWqSigma);
  if (sigma.empty()) return moved_;
  if (first_sigma_.size() != sigma.size()) {
    first_sigma_.assign(sigma.begin(), sigma.end());
    return 0;
  }
  std::vector<double> moves;
  for (size_t i = 0; i < sigma.size(); ++i) {
    if (!IsAbove0(first_sigma_[i])) first_sigma_[i] = sigma[i];
    if (IsAbove0(sigma[i]) && IsAbove0(first_sigma_[i]))
      moves.push_back(std::abs(std::log(sigma[i] / first_sigma_[i])));
  }
  return MedianOr(moved_, std::move(moves));
}

void LossStart::End() {
  const LossOptions options = options_;
  *this = LossStart(options);
  ended_ = true;
}

void LossStart::Observe(const StepSample& sample, bool no_warmup) {
  if (ended_) return;
  if (first_step_ < 0) first_step_ = sample.step;
  if (!holds() && sample.step - first_step_ > kStartSteps) return End();
  if (const float rate = sample.scalar(SignalId::kLearningRate); IsAbove0(rate)) rate_ = rate;
  moved_ = MovedBy(sample);
  const float loss = sample.scalar(SignalId::kLoss);
  if (!IsNumber(loss)) return;
  if (first_.size() < kFirstLosses) {
    first_.push_back(loss);
    return;
  }
  if (newest_.size() == kNewestLosses) newest_.erase(newest_.begin());
  newest_.push_back(loss);
  // What is no likelihood, as the loss of a policy, may rise as it likes.
  if (newest_.size() < kNewestLosses || !(first() > 0)) return;
  const double rise =
      std::max(options_.start_rise, kScatterShare * ScatterOfNeighbours(newest_) / first()) * (holds() ? 0.5 : 1);
  const bool up = value() > (1 + rise) * first();
  if (!up) {
    since_ = -1;
  } else if (!holds() && moved_ >= options_.start_moved) {
    since_ = sample.step;
    no_warmup_ = no_warmup;
  }
}

void LossStart::Find(std::vector<Finding>* out) const {
  if (!holds()) return;
  Finding& finding = out->emplace_back(Finding::OfRun(Rule::kLoss, Severity::kWarning,
                                                      {.signal = "loss",
                                                       .value = value(),
                                                       .threshold = (1 + options_.start_rise) * first(),
                                                       .baseline = first(),
                                                       .first_step = since_,
                                                       .detector = "start"}));
  finding.stage = 5;
  finding.summary = absl::StrFormat(
      "the loss has risen from %.3g in the first steps to %.3g, and W_Q of half of the heads has changed by %.2g %% "
      "or more",
      first(), value(), 100 * std::expm1(moved_));
  if (rate_ > 0) absl::StrAppendFormat(&finding.summary, "; the learning rate is %.3g", rate_);
  finding.note = finding.summary;
  const auto [least, most] = std::minmax_element(first_.begin(), first_.end());
  const bool untrained = *most <= (1 + kUntrainedRange) * *least;
  finding.cause = untrained && no_warmup_ ? "warm-up missing" : "learning rate too high";
  finding.advice =
      "Lower the learning rate, or let it rise over more steps, and begin again from the checkpoint: what it had "
      "learnt is being lost. A loss that rises because its data becomes harder moves no weights so far.";
}

bool LossStart::Consistent() const {
  return first_.size() <= kFirstLosses && newest_.size() <= kNewestLosses && (since_ < 0 || !newest_.empty()) &&
         first_sigma_.size() <= size_t{512} * 1024;
}

}  // namespace bellwether::server
