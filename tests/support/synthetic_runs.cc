#include "tests/support/synthetic_runs.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr double kRows = 4096;

// Evenly spread in [0, 1), the same for the same arguments.
double Noise(int64_t a, int64_t b, int64_t c) {
  uint64_t x = static_cast<uint64_t>(a) * 0x9e3779b97f4a7c15u ^ static_cast<uint64_t>(b) * 0xbf58476d1ce4e5b9u ^
               static_cast<uint64_t>(c) * 0x94d049bb133111ebu;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) / 9007199254740992.0;
}

// Doublings of the head's drift up to the step, 0 for a healthy head.
double Doublings(const SyntheticRun& run, int64_t step, Head head) {
  if (run.failing.layer < 0 || !(head == run.failing) || step <= run.fails_at) return 0;
  return static_cast<double>(step - run.fails_at) / 350.0;
}

double Drift(const SyntheticRun& run, int64_t step, Head head) {
  const double own = 0.7 + 0.6 * Noise(7, head.layer, head.head);
  const double jitter = 0.9 + 0.2 * Noise(step, head.layer, head.head);
  return own * jitter * std::exp2(Doublings(run, step, head));
}

}  // namespace

StepSample MakeSample(const SyntheticRun& run, int64_t step) {
  StepSample sample;
  sample.Reset(run.layout);
  sample.step = step;
  sample.ranks = 8;
  const auto fill = [&](SignalId id, auto value) {
    const std::span<float> out = sample.Add(id);
    const MatrixShape shape = ShapeOf(*FindSignal(id), run.layout);
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      for (int32_t head = 0; head < shape.heads; ++head) {
        out[static_cast<size_t>(layer * shape.heads + head)] = static_cast<float>(value(Head{layer, head}));
      }
    }
  };
  const auto illness = [&](Head head) { return Doublings(run, step, head); };
  const auto late = [&](Head head) { return std::max(0.0, illness(head) - 5); };
  if (step % run.every == 0) {
    fill(SignalId::kRows, [](Head) { return kRows; });
    fill(SignalId::kCommonModeSum, [&](Head h) { return kRows * 0.8 * Drift(run, step, h); });
    fill(SignalId::kSpreadSum, [](Head) { return kRows * 0.8; });
    fill(SignalId::kKeyLeakSum,
         [&](Head h) { return 3e-4 * (1 + Noise(step, h.layer, h.head)) * std::exp2(0.8 * illness(h)); });
    fill(SignalId::kKeyGradientSum, [](Head) { return 1.0; });
    fill(SignalId::kTiedRowsBf16, [&](Head h) {
      const double share =
          0.05 + 0.02 * Noise(step, h.head, h.layer) + 0.9 * (1 - std::exp(-0.03 * illness(h) * illness(h)));
      return std::floor(kRows * std::min(share, 0.98));
    });
    fill(SignalId::kSaturatedRows, [&](Head h) { return std::floor(kRows * 0.01 * (1 + 10 * late(h))); });
    fill(SignalId::kLogitMax,
         [&](Head h) { return 9 + 4 * Noise(step, h.layer, h.head) + 3 * std::exp2(1.2 * late(h)); });
    fill(SignalId::kEntropySum,
         [&](Head h) { return kRows * (0.72 - 0.1 * Noise(3, h.layer, h.head)) * std::exp(-0.15 * late(h)); });
    fill(SignalId::kSinkSum, [&](Head h) { return kRows * 0.2 * Noise(5, h.layer, h.head); });
    fill(SignalId::kWqSigma,
         [&](Head h) { return 2.6 + Noise(9, h.layer, h.head) + 0.1 * illness(h) + std::exp2(late(h)) - 1; });
    fill(SignalId::kWkSigma, [&](Head h) { return 2.4 + Noise(11, h.layer, h.head); });
    fill(SignalId::kWqStableRank,
         [&](Head h) { return 12 + 6 * Noise(13, h.layer, h.head) - std::min(9.0, 2 * late(h)); });
    fill(SignalId::kQkIncrementRank,
         [&](Head h) { return 20 + 8 * Noise(step, h.layer, h.head) - std::min(17.0, 2.2 * illness(h)); });
    fill(SignalId::kDeltaBiasSum,
         [&](Head h) { return 0.02 * (Noise(step, h.head, h.layer) - 0.5) + 0.03 * illness(h); });
    fill(SignalId::kDeltaBiasSumsq, [](Head) { return 4e-4; });
    fill(SignalId::kDeltaAbsSum, [](Head) { return 10.0; });
  }
  const double doublings = Doublings(run, step, run.failing);
  const double ruin = std::max(0.0, doublings - 8.5);
  fill(SignalId::kLoss, [&](Head) {
    return 2.4 + 8.5 * std::exp(-static_cast<double>(step) / 450) + 0.05 * Noise(step, 1, 1) + ruin * ruin;
  });
  fill(SignalId::kGradNorm, [&](Head) { return 0.6 + 0.2 * Noise(step, 2, 1) + ruin; });
  fill(SignalId::kLearningRate, [&](Head) { return 3e-4 * std::min(1.0, static_cast<double>(step) / 500); });
  fill(SignalId::kTokens, [](Head) { return 524288.0; });
  fill(SignalId::kStepSeconds, [&](Head) { return 1.21 + 0.02 * Noise(step, 3, 1); });
  fill(SignalId::kHookSeconds, [](Head) { return 0.0021; });
  fill(SignalId::kSamplingPeriod, [&](Head) { return static_cast<double>(run.every); });
  return sample;
}

RunSnapshotPtr MakeSnapshot(const SyntheticRun& run, int64_t now_unix_ns) {
  auto snapshot = std::make_shared<RunSnapshot>();
  RunRecord& record = snapshot->record;
  record.id = run.id;
  RunDescription& description = record.description;
  description.name = run.name;
  for (size_t i = 0; i < description.uuid.size(); ++i)
    description.uuid[i] = static_cast<uint8_t>(run.id >> (8 * (i % 8)));
  description.world = description.reporters = 8;
  description.layout = run.layout;
  description.attention = {.kernel = "flash", .score_dtype = "bf16", .causal = true};
  description.framework = "torch 2.13.0";
  description.model = "GPT";
  record.step = run.steps;
  record.stage = run.stage;
  record.ended = run.ended;
  record.started_unix_ns = now_unix_ns - run.steps * 1'200'000'000;
  record.last_report_unix_ns = now_unix_ns;
  record.frames = static_cast<uint64_t>(run.steps) * 8;
  record.steps_recorded = static_cast<uint64_t>(run.steps);
  snapshot->version = static_cast<uint64_t>(run.steps);
  snapshot->ranks_reporting = 8;
  snapshot->heads = std::make_shared<StepSample>(MakeSample(run, run.steps - run.steps % run.every));
  snapshot->newest = std::make_shared<StepSample>(MakeSample(run, run.steps));
  record.signals = snapshot->heads->signals();
  snapshot->head_stage.assign(static_cast<size_t>(run.layout.layers) * run.layout.heads, 0);
  if (run.stage > 0) {
    snapshot->head_stage[static_cast<size_t>(run.failing.layer) * run.layout.heads + run.failing.head] =
        static_cast<uint8_t>(run.stage);
    snapshot->alerts_firing = 1;
    snapshot->eta = {.known = true, .steps = 1080, .lower_steps = 820, .upper_steps = 1400};
  }
  const double samples = static_cast<double>(run.steps) / static_cast<double>(run.every);
  for (const SignalId id : {SignalId::kRows, SignalId::kTiedRowsBf16, SignalId::kSaturatedRows}) {
    const std::span<const float> values = snapshot->heads->matrix(id);
    std::vector<double>& totals = snapshot->totals[id];
    for (int32_t layer = 0; layer < run.layout.layers; ++layer) {
      double sum = 0;
      for (int32_t head = 0; head < run.layout.heads; ++head)
        sum += values[static_cast<size_t>(layer * run.layout.heads + head)];
      totals.push_back(sum * samples);
    }
  }
  snapshot->totals[SignalId::kTokens] = {524288.0 * static_cast<double>(run.steps)};
  return snapshot;
}

AlertTransition MakeAlert(const SyntheticRun& run, Severity severity, const std::string& rule, int64_t now_unix_ns) {
  AlertTransition alert;
  alert.run = run.id;
  alert.run_name = run.name;
  alert.key = absl::StrCat(rule, "/", run.failing.layer, "/", run.failing.head, "/", run.fails_at + 400);
  alert.state = AlertState::kFiring;
  alert.severity = severity;
  alert.rule = rule;
  alert.stage = run.stage;
  alert.step = run.steps;
  alert.first_step = run.fails_at + 400;
  alert.strongest = run.failing;
  alert.heads = {run.failing};
  alert.heads_total = 1;
  alert.eta = {.known = true, .steps = 1080, .lower_steps = 820, .upper_steps = 1400};
  const double drift = Drift(run, run.steps, run.failing);
  alert.evidence = {
      {.signal = "drift_ratio",
       .where = run.failing,
       .value = drift,
       .threshold = 4,
       .baseline = 1.02,
       .first_step = run.fails_at + 400,
       .detector = "growth",
       .text = "doubles every 350 steps against its own past",
       .siblings = {.runs = 12,
                    .step_begin = 2896,
                    .step_end = 4096,
                    .min = 0.22,
                    .p01 = 0.31,
                    .p50 = 0.97,
                    .p99 = 1.9,
                    .max = 2.4}},
      {.signal = "key_leak",
       .where = run.failing,
       .value = 8.1e-3,
       .threshold = 1.2e-3,
       .baseline = 4.4e-4,
       .first_step = run.fails_at + 620,
       .detector = "peers",
       .text = "above the rounding floor of its layer"},
      {.signal = "tied_fraction_bf16",
       .where = run.failing,
       .value = 0.61,
       .threshold = 0.2,
       .baseline = 0.06,
       .first_step = run.fails_at + 900,
       .detector = "level",
       .text = "the offset eats the mantissa of the scores"},
  };
  alert.cause = "rounding drift";
  alert.summary = absl::StrFormat("%s: drift in layer %d head %d: drift_ratio %.3g (threshold 4)", run.name,
                                  run.failing.layer, run.failing.head, drift);
  alert.advice = "Turn attention.center_k on: it stops the drift. No work is lost yet.";
  alert.siblings = "drift_ratio 87.6 in layer 1 head 0; 12 earlier healthy runs had a median of 0.97";
  alert.time_unix_ns = now_unix_ns;
  return alert;
}

absl::StatusOr<SyntheticRun> SyntheticSeries::Find(RunId id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = runs_.find(id);
  if (found == runs_.end()) return absl::NotFoundError("no such run");
  return found->second;
}

absl::StatusOr<SeriesPoints> SyntheticSeries::ReadSeries(RunId id, const Layout&, const SeriesKey& key, int64_t begin,
                                                         int64_t end, size_t points_max, int32_t) const {
  BW_ASSIGN_OR_RETURN(const SyntheticRun run, Find(id));
  const SignalInfo& signal = *FindSignal(key.signal);
  const int64_t last = std::min(end, run.steps + 1);
  int64_t stride = run.every;
  while ((last - begin) / stride > static_cast<int64_t>(points_max)) stride *= 2;
  SeriesPoints points;
  std::vector<float> values;
  for (int64_t step = (begin + run.every - 1) / run.every * run.every; step < last; step += stride) {
    if (!DeriveMatrix(MakeSample(run, step), signal, &values)) continue;
    const MatrixShape shape = ShapeOf(signal, run.layout);
    const float value = values[static_cast<size_t>(key.layer * shape.heads + key.head)];
    points.step.push_back(step);
    points.min.push_back(value);
    points.mean.push_back(value);
    points.max.push_back(value);
  }
  points.downsampled = stride != run.every;
  points.values = points.step.size();
  return points;
}

absl::StatusOr<std::vector<float>> SyntheticSeries::ReadMatrix(RunId id, const Layout&, SignalId signal, int64_t step,
                                                               int64_t* at) const {
  BW_ASSIGN_OR_RETURN(const SyntheticRun run, Find(id));
  const int64_t newest = step < 0 ? run.steps : std::min(step, run.steps);
  *at = newest - newest % run.every;
  std::vector<float> values;
  if (!DeriveMatrix(MakeSample(run, *at), *FindSignal(signal), &values)) *at = -1;
  return values;
}

}  // namespace bellwether::server
