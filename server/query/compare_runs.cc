#include "server/query/compare_runs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "server/model/step_sample.h"
#include "server/query/robust.h"

namespace bellwether::server {
namespace {

constexpr double kScales = 3;
constexpr size_t kPeersMin = 8;
constexpr int kBeyondMin = 3;
constexpr double kShareMin = 0.75;

double Log2(float value, double floor) { return std::log2(std::max(std::abs(static_cast<double>(value)), floor)); }

// That part of the median of what is there and not zero; 0: nothing is.
double FloorOf(std::span<const float> run, std::span<const float> baseline, double part) {
  std::vector<double> sizes;
  for (const auto values : {run, baseline}) {
    for (const float value : values) {
      if (std::isfinite(value) && value != 0) sizes.push_back(std::abs(static_cast<double>(value)));
    }
  }
  return sizes.empty() ? 0 : part * DescribePeers(std::move(sizes)).median;
}

// 1.4826 MAD, also where it is 0.
double ScaleOf(std::vector<double> values) {
  if (values.empty()) return 0;
  const double median = DescribePeers(values).median;
  for (double& value : values) value = std::abs(value - median);
  return 1.4826 * DescribePeers(std::move(values)).median;
}

}  // namespace

void RunComparison::Add(int64_t step, std::span<const float> run, std::span<const float> baseline) {
  if (steps_.size() == kStepsMax) return;
  const uint64_t bit = uint64_t{1} << steps_.size();
  Step& now = steps_.emplace_back(Step{.step = step, .floor = FloorOf(run, baseline, floor_part_)});
  std::vector<double> differences, changes, of_run, of_baseline;
  for (size_t i = 0; i < heads_.size(); ++i) {
    if (!std::isfinite(run[i]) || !std::isfinite(baseline[i]) || now.floor == 0) continue;
    of_run.push_back(Log2(run[i], now.floor));
    of_baseline.push_back(Log2(baseline[i], now.floor));
    const double d = of_run.back() - of_baseline.back();
    differences.push_back(d);
    Head& head = heads_[i];
    if (head.has_last) changes.push_back((d - double{head.last}) / std::numbers::sqrt2);
    head.last = static_cast<float>(d);
    head.has_last = true;
    if (std::abs(d) > std::abs(head.ratio)) head.ratio = d;
  }
  if (!changes.empty()) noises_.push_back(ScaleOf(std::move(changes)));
  const double own = noises_.empty() ? 0 : DescribePeers(noises_).median;
  double peers = 0;
  if (differences.size() >= kPeersMin) {
    const double calm = std::min(ScaleOf(std::move(of_run)), ScaleOf(std::move(of_baseline)));
    peers = std::min(ScaleOf(std::move(differences)), std::numbers::sqrt2 * calm);
  }
  now.band = std::max(log2_min_, kScales * std::max(own, peers));
  const auto index = static_cast<int>(steps_.size()) - 1;
  for (size_t i = 0; i < heads_.size(); ++i) {
    const Pair pair = Compare(index, run[i], baseline[i]);
    if (pair == Pair::kNotCompared) continue;
    heads_[i].compared |= bit;
    if (pair == Pair::kBeyond) heads_[i].beyond |= bit;
    if (std::isfinite(run[i]) == std::isfinite(baseline[i])) continue;
    const double endless = std::numeric_limits<double>::infinity();
    heads_[i].ratio = std::isfinite(baseline[i]) ? endless : -endless;
  }
}

RunComparison::Pair RunComparison::Compare(int index, float run, float baseline) const {
  if (IsNotMeasured(run) || IsNotMeasured(baseline)) return Pair::kNotCompared;
  if (!std::isfinite(run) || !std::isfinite(baseline)) {
    return std::isfinite(run) == std::isfinite(baseline) ? Pair::kNotCompared : Pair::kBeyond;
  }
  const Step& step = steps_[static_cast<size_t>(index)];
  if (step.floor == 0) return run == baseline ? Pair::kWithin : Pair::kBeyond;
  return std::abs(Log2(run, step.floor) - Log2(baseline, step.floor)) >= step.band ? Pair::kBeyond : Pair::kWithin;
}

RunComparison::Difference RunComparison::Of(size_t cell) const {
  const Head& head = heads_[cell];
  Difference difference{.ratio = head.ratio};
  int within = 0;  // In a row.
  int compared = 0, beyond = 0;
  int compared_from_first = 0;
  for (int i = static_cast<int>(steps_.size()) - 1; i >= 0 && within < kWithinMax; --i) {
    if ((head.compared >> i & 1) == 0) continue;
    ++compared;
    if ((head.beyond >> i & 1) == 0) {
      ++within;
      continue;
    }
    within = 0;
    ++beyond;
    difference.first = i;
    compared_from_first = compared;
  }
  const bool enough =
      beyond >= std::min(kBeyondMin, std::popcount(head.compared)) && beyond >= kShareMin * compared_from_first;
  if (!enough) difference.first = -1;
  for (int i = difference.first - 1; i >= 0 && difference.before < 0; --i) {
    if ((head.compared >> i & 1) != 0) difference.before = i;
  }
  return difference;
}

}  // namespace bellwether::server
