// judged_samples.h: a made-up run for a judge: 4 x 4 heads, of which one may drift.

#ifndef BELLWETHER_TESTS_SUPPORT_JUDGED_SAMPLES_H_
#define BELLWETHER_TESTS_SUPPORT_JUDGED_SAMPLES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

inline constexpr Head kIll{2, 1};
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline RunDescription SyntheticRun(int32_t layers = 4, int32_t heads = 4) {
  RunDescription run;
  run.name = std::string("synthetic");
  run.layout = {.layers = layers, .heads = heads, .kv_heads = heads, .head_dim = 64, .seq_len = 1024};
  run.attention.score_dtype = std::string("bf16");
  return run;
}

struct Plan {
  int64_t last_step = 5000;
  int64_t period = 10;
  int64_t drift_from = 2000;  // < 0: never
  double doubling = 300;
};

// The same sample for the same arguments, whatever came before.
inline StepSample SampleAt(const RunDescription& run, const Plan& plan, int64_t step, uint32_t attempt = 0) {
  StepSample sample;
  sample.Reset(run.layout);
  sample.step = step;
  sample.attempt = attempt;
  std::mt19937 random(static_cast<uint32_t>(step) + 7);
  std::normal_distribution<double> normal;
  sample.Add(SignalId::kLoss)[0] =
      static_cast<float>(2 + 4 * std::exp(-static_cast<double>(step) / 800) + 0.02 * normal(random));
  sample.Add(SignalId::kGradNorm)[0] = static_cast<float>(0.6 * std::exp(0.1 * normal(random)));
  if (step % plan.period != 0) return sample;
  for (const SignalId id : {SignalId::kRows, SignalId::kCommonModeSum, SignalId::kSpreadSum, SignalId::kTiedRowsBf16,
                            SignalId::kWqSigma, SignalId::kLogitMax, SignalId::kEntropySum}) {
    sample.Add(id);
  }
  const int32_t count = run.layout.layers * run.layout.heads;
  for (int32_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    double ratio = std::exp(0.15 * normal(random));
    double tied = 0.05;
    const bool ill = run.layout.heads == 4 && i == kIll.layer * 4 + kIll.head;
    if (ill && plan.drift_from >= 0 && step > plan.drift_from) {
      ratio *= std::exp2(static_cast<double>(step - plan.drift_from) / plan.doubling);
      tied = std::min(0.95, 0.05 + ratio / 100);
    }
    sample.Add(SignalId::kRows)[at] = 2048;
    sample.Add(SignalId::kCommonModeSum)[at] = static_cast<float>(2048 * 2 * ratio);
    sample.Add(SignalId::kSpreadSum)[at] = 2048 * 2;
    sample.Add(SignalId::kTiedRowsBf16)[at] = static_cast<float>(2048 * tied);
    sample.Add(SignalId::kWqSigma)[at] = static_cast<float>(3 + 1e-4 * static_cast<double>(step));
    sample.Add(SignalId::kLogitMax)[at] = static_cast<float>(20 + 4 * ratio);
    sample.Add(SignalId::kEntropySum)[at] = 2048 * 0.5;
  }
  return sample;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_JUDGED_SAMPLES_H_
