#include "tools/lab/peer_rules.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <numeric>
#include <utility>

namespace bellwether::server {
namespace {

constexpr int64_t kQuietSteps = 100;
constexpr int64_t kSilentValues = 100;

// A rule about a number that a run has once a step.
class ScalarRule : public PeerRule {
 public:
  ScalarRule(std::string name, SignalId signal) : PeerRule(std::move(name)), signal_(signal) {}

 private:
  bool Fires(const StepSample& sample) final {
    const float value = sample.scalar(signal_);
    if (IsNotMeasured(value)) return false;
    const bool fires = !std::isfinite(value) || Judge(value);
    return ++seen_ > kSilentValues && fires;
  }
  // Of a finite value, which then counts among the past ones.
  virtual bool Judge(double value) = 0;

  const SignalId signal_;
  int64_t seen_ = 0;
};

// The last values, never the one that is judged.
class Window {
 public:
  explicit Window(size_t capacity) : capacity_(capacity) {}
  void Add(double value) {
    values_.push_back(value);
    if (values_.size() > capacity_) values_.pop_front();
  }
  bool full() const { return values_.size() == capacity_; }
  double mean() const {
    return std::accumulate(values_.begin(), values_.end(), 0.0) / static_cast<double>(values_.size());
  }
  double deviation() const {
    const double center = mean();
    double sum = 0;
    for (const double value : values_) sum += (value - center) * (value - center);
    return std::sqrt(sum / static_cast<double>(values_.size()));
  }

 private:
  const size_t capacity_;
  std::deque<double> values_;
};

class SigmaRule final : public ScalarRule {
 public:
  SigmaRule() : ScalarRule("loss 6 sigma", SignalId::kLoss) {}

 private:
  bool Judge(double value) override {
    const bool fires = window_.full() && value > window_.mean() + 6 * window_.deviation();
    window_.Add(value);
    return fires;
  }
  Window window_{128};
};

// Above twice the mean of the last `values`, `times` in a row.
class TwiceMeanRule final : public ScalarRule {
 public:
  TwiceMeanRule(std::string name, SignalId signal, size_t values, int times)
      : ScalarRule(std::move(name), signal), window_(values), times_(times) {}

 private:
  bool Judge(double value) override {
    above_ = window_.full() && value > 2 * window_.mean() ? above_ + 1 : 0;
    if (above_ == 0) window_.Add(value);  // What is off its course is no measure.
    return above_ >= times_;
  }
  Window window_;
  const int times_;
  int above_ = 0;
};

class FirstMaximumRule final : public ScalarRule {
 public:
  FirstMaximumRule() : ScalarRule("loss 10x max", SignalId::kLoss) {}

 private:
  bool Judge(double value) override {
    if (++seen_ <= 100) {
      maximum_ = std::max(maximum_, value);
      return false;
    }
    return value > 10 * maximum_;
  }
  double maximum_ = 0;
  int seen_ = 0;
};

class ExponentialZRule final : public ScalarRule {
 public:
  ExponentialZRule() : ScalarRule("gradient z 2.5", SignalId::kGradNorm) {}

 private:
  static constexpr double kKeep = 0.97;
  bool Judge(double value) override {
    if (start_ < 25) {
      // The first values: their plain mean and variance.
      ++start_;
      const double before = value - mean_;
      mean_ += before / start_;
      squares_ += before * (value - mean_);
      variance_ = squares_ / start_;
      return false;
    }
    const double deviation = std::sqrt(variance_), limit = mean_ + 2.5 * deviation;
    const bool fires = value > limit;
    const double counted = fires ? limit : value;  // As the clipped one would.
    variance_ = kKeep * variance_ + (1 - kKeep) * (counted - mean_) * (counted - mean_);
    mean_ = kKeep * mean_ + (1 - kKeep) * counted;
    return fires;
  }
  int start_ = 0;
  double mean_ = 0, squares_ = 0, variance_ = 0;
};

class LogitRule final : public PeerRule {
 public:
  LogitRule() : PeerRule("max logit 100") {}

 private:
  bool Fires(const StepSample& sample) override {
    const auto logits = sample.matrix(SignalId::kLogitMax);
    return std::any_of(logits.begin(), logits.end(),
                       [](float logit) { return !IsNotMeasured(logit) && !(logit <= 100); });
  }
};

}  // namespace

void PeerRule::Observe(const StepSample& sample) {
  if (!Fires(sample)) return;
  if (fired_at_ < 0 || sample.step - fired_at_ > kQuietSteps) alarms_.push_back(sample.step);
  fired_at_ = sample.step;
}

std::vector<std::unique_ptr<PeerRule>> MakePeerRules() {
  std::vector<std::unique_ptr<PeerRule>> rules;
  rules.push_back(std::make_unique<SigmaRule>());
  rules.push_back(std::make_unique<TwiceMeanRule>("loss 2x mean", SignalId::kLoss, 100, 5));
  rules.push_back(std::make_unique<FirstMaximumRule>());
  rules.push_back(std::make_unique<ExponentialZRule>());
  rules.push_back(std::make_unique<TwiceMeanRule>("gradient 2x mean", SignalId::kGradNorm, 100, 1));
  rules.push_back(std::make_unique<LogitRule>());
  return rules;
}

}  // namespace bellwether::server
