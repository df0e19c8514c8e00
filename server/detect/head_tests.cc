#include "server/detect/head_tests.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bellwether::server {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

struct Threshold {
  double absolute = 0, factor = 0, floor = 0;
};

Threshold ThresholdParts(const JudgeOptions& options, HeadTest test) {
  switch (test) {
    case kGrowth:
      return {.factor = options.drift.grown_factor, .floor = options.drift.ratio_floor};
    case kLevel:
      return {.factor = options.drift.level_factor, .floor = options.drift.ratio_floor};
    case kCommonGrowth:
      return {.absolute = options.drift.common_mode_large, .factor = options.drift.common_mode_factor};
    case kLeaking:
      return {.factor = options.leak.factor, .floor = options.leak.floor};
    case kTies:
      return {.absolute = options.ties.fraction_min, .factor = options.ties.peer_factor};
    case kNorm:
      return {.factor = options.norm.peer_factor};
    case kLogit:
      return {.absolute = options.logits.logit_max_large};
    case kHeadTests:
      break;
  }
  return {};
}

HeadTrack TrackOf(HeadTest test) {
  constexpr std::array<HeadTrack, kHeadTests> kTrackOf = {kRatio, kRatio, kCommonMode, kLeak, kTied, kSigma, kLogitMax};
  return kTrackOf[test];
}

void AskForRise(const BatchSeries& series, double rise_min, kernels::BankTest* test) {
  test->windows = series.rows() > 0 ? 1 : 0;
  test->window[0] = {.rows = series.rows(), .rise_min = rise_min, .doubling_steps_max = kNoLimit};
}

}  // namespace

const std::array<HeadTrackInfo, kHeadTracks> kHeadTrackInfo = {{
    {SignalId::kDriftRatio, "drift_ratio", true},
    {SignalId::kCommonMode, "common_mode", true},
    {SignalId::kKeyLeak, "key_leak", false},
    {SignalId::kTiedFractionBf16, "tied_fraction_bf16", false},
    {SignalId::kWqSigma, "wq_sigma", true},
    {SignalId::kLogitMax, "logit_max", true},
    {SignalId::kEntropyRatio, "entropy_ratio", false},
}};

void AskForGrowth(const TrendOptions& trend, const BatchSeries& series, kernels::BankTest* test) {
  test->windows = 0;
  test->trend = true;
  test->points_min = trend.window_batches_min;
  test->z_min = trend.mann_kendall_z_min;
  test->r2_min = trend.r2_min;
  for (const int32_t length : {trend.window_batches, trend.window_batches_short}) {
    const int32_t rows = std::min(length, series.rows());
    if (rows < trend.window_batches_min) return;
    const double slowest = trend.doubling_steps_max * length / trend.window_batches;
    const auto span = static_cast<double>(series.span_steps(rows));
    // A rise well below what the slowest growth that counts would show ends it
    // before any fit.
    test->window[test->windows++] = {.rows = rows,
                                     .rise_min = 1 + trend.gate_share * (std::exp2(span / slowest) - 1),
                                     .doubling_steps_max = slowest};
  }
}

Builtin BuiltinOf(HeadTest test) {
  constexpr std::array<Builtin, kHeadTests> kBuiltinOf = {
      Builtin::kDriftGrowth, Builtin::kDriftLevel, Builtin::kDriftCommonMode, Builtin::kDriftLeak,
      Builtin::kTies,        Builtin::kNorm,       Builtin::kLogits};
  return kBuiltinOf[test];
}

int32_t HoldBatches(const JudgeOptions& options, HeadTest test) {
  switch (test) {
    case kGrowth:
    case kCommonGrowth:
      return options.drift.hold_batches;
    case kLevel:
      return options.drift.level_batches;
    case kLeaking:
      return options.leak.hold_batches;
    case kTies:
      return options.ties.hold_batches;
    case kNorm:
      return options.norm.hold_batches;
    case kLogit:
      return options.logits.hold_batches;
    case kHeadTests:
      break;
  }
  return 0;
}

double ThresholdOf(const JudgeOptions& options, HeadTest test, double median) {
  const Threshold t = ThresholdParts(options, test);
  return kernels::ThresholdOf(t.absolute, t.factor, t.floor, median);
}

void SetRun(const JudgeOptions& options, const std::vector<BatchSeries>& series, size_t heads, kernels::BankRun* run) {
  run->heads = static_cast<int64_t>(heads);
  run->tracks = kHeadTracks;
  run->tests = kHeadTests;
  for (size_t i = 0; i < kHeadTracks; ++i) run->track[i] = series[i].Track();
  for (size_t i = 0; i < kHeadTests; ++i) {
    const auto which = static_cast<HeadTest>(i);
    const BatchSeries& track = series[TrackOf(which)];
    const Threshold threshold = ThresholdParts(options, which);
    kernels::BankTest& test = run->test[i];
    test = {.track = static_cast<int32_t>(TrackOf(which)),
            .absolute = threshold.absolute,
            .factor = threshold.factor,
            .floor = threshold.floor};
    switch (which) {
      case kGrowth:
      case kCommonGrowth:
        AskForGrowth(options.trend, track, &test);
        break;
      case kLevel:
        AskForRise(track, options.drift.level_rise_min, &test);
        break;
      case kNorm:
        AskForRise(track, options.norm.rise_min, &test);
        test.relative = true;
        test.trend = true;
        test.points_min = options.trend.window_batches_min;
        test.z_min = options.trend.mann_kendall_z_min;
        break;
      default:
        break;
    }
    // Of two or three heads none is a peer for the ratio to go by; there the
    // absolute common mode, the leak and the weights speak.
    const bool speaks = TrackOf(which) != kRatio || heads >= static_cast<size_t>(options.drift.peers_min);
    if (!speaks) test.windows = 0;
  }
}

}  // namespace bellwether::server
