// What judging costs a value, derived ratios included, in runs whose heads are
// healthy and in runs in which one layer of them drifts.

#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <vector>

#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

constexpr int kSamples = 64;

// range(0) layers of range(1) heads; range(2) = 1: the first layer drifts.
void BM_Observe(benchmark::State& state) {
  RunDescription run;
  const auto heads = static_cast<int32_t>(state.range(1));
  run.layout = {.layers = static_cast<int32_t>(state.range(0)),
                .heads = heads,
                .kv_heads = heads};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<StepSample> samples(kSamples);
  int64_t values = 0;
  for (StepSample& sample : samples) {
    sample.Reset(run.layout);
    for (const SignalId id :
         {SignalId::kRows, SignalId::kCommonModeSum, SignalId::kSpreadSum,
          SignalId::kTiedRowsBf16, SignalId::kLogitMax, SignalId::kEntropySum,
          SignalId::kWqSigma, SignalId::kWkSigma, SignalId::kKeyLeakSum,
          SignalId::kKeyGradientSum}) {
      const auto matrix = sample.Add(id);
      const float level = id == SignalId::kRows         ? 2048.0f
                          : id == SignalId::kKeyLeakSum ? 1e-4f
                                                        : 1.0f;
      for (float& value : matrix)
        value = level *
                (id == SignalId::kRows ? 1 : std::exp(0.1f * normal(random)));
      values += static_cast<int64_t>(matrix.size());
    }
  }
  RunJudge judge(JudgeOptions{}, run);
  std::vector<Transition> out;
  int64_t step = 0;
  for (auto _ : state) {
    StepSample& sample = samples[static_cast<size_t>(step / 10 % kSamples)];
    sample.step = step += 10;
    if (state.range(2) == 1) {
      const auto mode = sample.Add(SignalId::kCommonModeSum);
      const auto grown =
          static_cast<float>(std::exp2(static_cast<double>(step % 4000) / 400));
      for (int32_t head = 0; head < heads; ++head)
        mode[static_cast<size_t>(head)] = grown;
    }
    judge.Observe(sample, &out);
    out.clear();
  }
  const double each = static_cast<double>(values) / kSamples;
  state.counters["s_per_value"] = benchmark::Counter(
      each * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_Observe)
    ->Args({6, 6, 0})
    ->Args({32, 32, 0})
    ->Args({80, 64, 0})
    ->Args({80, 64, 1});

}  // namespace
}  // namespace bellwether::server

BENCHMARK_MAIN();
