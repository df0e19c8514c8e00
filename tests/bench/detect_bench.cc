// What judging costs a value, derived ratios included: in runs whose heads are healthy, in
// runs in which one layer of them drifts, and with a fit for every head at every batch's
// end, as if nothing told flat series from rising ones.  s_per_value is the mean over all
// samples, worst_tick_s_per_value that of the costliest sample that ended a batch.  And with
// 64 own rules of one kind each, over eight signals of every head.  And with every signal that there is, so that all
// families have something to judge: heads, tensors, modules, experts and ranks.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"
#include "server/detect/user_rule.h"

namespace bellwether::server {
namespace {

constexpr int kSamples = 64;

enum Heads : int64_t { kHealthy, kLayerDrifts, kAllFitted, kAllSignals };
constexpr int64_t kNoRules = -1;  // Otherwise a RuleDetector.

// As many rules as a file may hold, on eight signals in turn; none fires.
std::shared_ptr<const std::vector<UserRule>> OwnRules(RuleDetector detector) {
  auto rules = std::make_shared<std::vector<UserRule>>();
  const SignalId signals[] = {SignalId::kDriftRatio,   SignalId::kCommonMode, SignalId::kTiedFractionBf16,
                              SignalId::kLogitMax,     SignalId::kWqSigma,    SignalId::kWkSigma,
                              SignalId::kEntropyRatio, SignalId::kKeyLeak};
  for (size_t i = 0; i < kUserRulesMax; ++i) {
    UserRule rule;
    rule.name = "rule_" + std::to_string(i);
    rule.signal = signals[i % std::size(signals)];
    rule.detector = detector;
    rule.above = 1e6;
    rule.factor = rule.floor = 1e6;
    rules->push_back(rule);
  }
  return rules;
}

constexpr const char* kParts[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                  "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj",    "input_layernorm"};

// The tensors and modules of `layers`; ranks and experts as a mixture of 8 ranks has them.
std::shared_ptr<const RunRows> NamesFor(Layout* layout) {
  auto rows = std::make_shared<RunRows>();
  rows->tensors.Add("embed_tokens.weight");
  for (int32_t layer = 0; layer < layout->layers; ++layer) {
    for (const char* const part : kParts) {
      const std::string module = "layers." + std::to_string(layer) + "." + part;
      rows->modules.Add(module);
      rows->tensors.Add(module + ".weight");
    }
  }
  rows->tensors.Add("lm_head.weight");
  layout->tensors = rows->tensors.size();
  layout->modules = rows->modules.size();
  layout->experts = 16;
  layout->ranks = 8;
  return rows;
}

// What a signal is about in a healthy run: counts of what is wrong are 0.
float LevelOf(const SignalInfo& signal) {
  const std::string_view name = signal.name;
  for (const char* const wrong : {"nonfinite", "saturated", "flushed", "skipped", "dropped", "disagree", "frozen"}) {
    if (name.find(wrong) != std::string_view::npos) return 0;
  }
  if (signal.id == SignalId::kRows || signal.id == SignalId::kTensorElements) return 2048;
  if (signal.id == SignalId::kKeyLeakSum) return 1e-4f;
  if (signal.id == SignalId::kLearningRate) return 1e-3f;
  return 1;
}

JudgeOptions OptionsFor(int64_t heads) {
  JudgeOptions options;
  if (heads != kAllFitted) return options;
  options.trend.gate_share = -1e9;
  options.trend.r2_min = 0;
  options.drift.grown_factor = options.drift.common_mode_factor = 0;
  options.drift.common_mode_large = 0;
  options.norm.peer_factor = options.norm.rise_min = 0;
  return options;
}

// range(0) layers of range(1) heads, a sample each range(2) steps; range(3): Heads; range(4): own rules.
void BM_Observe(benchmark::State& state) {
  RunDescription run;
  const auto heads = static_cast<int32_t>(state.range(1));
  run.layout = {.layers = static_cast<int32_t>(state.range(0)), .heads = heads, .kv_heads = heads};
  std::shared_ptr<const RunRows> rows;
  std::vector<SignalId> signals = {SignalId::kRows,          SignalId::kCommonModeSum, SignalId::kSpreadSum,
                                   SignalId::kTiedRowsBf16,  SignalId::kLogitMax,      SignalId::kEntropySum,
                                   SignalId::kWqSigma,       SignalId::kWkSigma,       SignalId::kKeyLeakSum,
                                   SignalId::kKeyGradientSum};
  if (state.range(3) == kAllSignals) {
    rows = NamesFor(&run.layout);
    signals.clear();
    for (size_t i = 0; i < SignalCount(); ++i) {
      const SignalInfo& signal = SignalTable()[i];
      if (!signal.derived && signal.granularity != Granularity::kOwn) signals.push_back(signal.id);
    }
  }
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<StepSample> samples(kSamples);
  int64_t values = 0;
  for (StepSample& sample : samples) {
    sample.Reset(run.layout);
    for (const SignalId id : signals) {
      const auto matrix = sample.Add(id);
      const float level = LevelOf(*FindSignal(id));
      const bool exact = id == SignalId::kRows || id == SignalId::kTensorElements || id == SignalId::kLearningRate;
      for (float& value : matrix) value = level * (exact ? 1 : std::exp(0.1f * normal(random)));
      values += static_cast<int64_t>(matrix.size());
    }
  }
  const double each = static_cast<double>(values) / kSamples;
  JudgeOptions options = OptionsFor(state.range(3));
  if (state.range(4) != kNoRules) options.rules = OwnRules(static_cast<RuleDetector>(state.range(4)));
  RunJudge judge(options, run);
  judge.SetRows(rows);
  std::vector<AlertTransition> out;
  const int64_t stride = state.range(2);
  int64_t step = 0;
  size_t told = 0;
  const auto observe = [&] {
    StepSample& sample = samples[static_cast<size_t>(step / stride % kSamples)];
    sample.step = step += stride;
    if (state.range(3) == kLayerDrifts) {
      const auto mode = sample.Add(SignalId::kCommonModeSum);
      const auto grown = static_cast<float>(std::exp2(static_cast<double>(step % 4000) / 400));
      for (int32_t head = 0; head < heads; ++head) mode[static_cast<size_t>(head)] = grown;
    }
    judge.Observe(sample, &out);
    told += out.size();
    out.clear();
  };
  // Until the windows are full: 64 batches beyond the warm-up.
  while (step < 2200) observe();
  double worst = 0;
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    observe();
    worst = std::max(worst, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  state.counters["s_per_value"] = benchmark::Counter(each * static_cast<double>(state.iterations()),
                                                     benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["transitions"] = static_cast<double>(told);
  state.counters["worst_tick_s_per_value"] = worst / each;
}
BENCHMARK(BM_Observe)
    ->ArgNames({"layers", "heads", "stride", "kind", "rules"})
    ->Args({6, 6, 10, kHealthy, kNoRules})
    ->Args({32, 32, 1, kHealthy, kNoRules})
    ->Args({32, 32, 20, kHealthy, kNoRules})
    ->Args({80, 64, 1, kHealthy, kNoRules})
    ->Args({80, 64, 10, kHealthy, kNoRules})
    ->Args({80, 64, 20, kHealthy, kNoRules})
    ->Args({32, 32, 1, kAllSignals, kNoRules})
    ->Args({80, 64, 1, kAllSignals, kNoRules})
    ->Args({80, 64, 20, kAllSignals, kNoRules})
    ->Args({80, 64, 1, kLayerDrifts, kNoRules})
    ->Args({80, 64, 20, kLayerDrifts, kNoRules})
    ->Args({80, 64, 1, kAllFitted, kNoRules})
    ->Args({80, 64, 20, kAllFitted, kNoRules})
    ->ArgsProduct({{80}, {64}, {20}, {kHealthy}, {0, 1, 2, 3, 4}});

}  // namespace
}  // namespace bellwether::server

BENCHMARK_MAIN();
