#include "bellwether/kernels/detector_bank.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "bellwether/kernels/trend.h"
#include "detector_bank_parts.h"

namespace bellwether::kernels {
namespace {

WindowView ViewOf(const BankTrack& track, int64_t heads) {
  return {track.ring, track.ring_median, track.ring_step, heads, track.window, track.rows, track.next};
}

// Floats as integers in the same order.
uint32_t OrderedKey(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

void CopyRows(const WindowView& view, int64_t head, int32_t rows, bool relative, float* values, float* steps) {
  for (int32_t i = 0; i < rows; ++i) {
    values[i] = view.Value(head, view.rows - rows + i, relative);
    steps[i] = view.Step(view.rows - rows + i);
  }
}

float NthOf(float* values, int64_t count, int64_t n) {
  std::nth_element(values, values + n, values + count);
  return values[n];
}

// The newest row's median is known since a moment ago: `medians` holds all of them.
struct SettledView {
  WindowView view;
  float medians[kBankRowsMax];

  SettledView(const BankTrack& track, int64_t heads) : view(ViewOf(track, heads)) {
    if (track.window == 0) return;
    std::copy(track.ring_median, track.ring_median + track.window, medians);
    if (track.fresh && track.slot >= 0) medians[track.slot] = track.median;
    view.ring_median = medians;
  }
};

bool Passes(const BankTest& test, const WindowView& view, int64_t head, Trend* trend) {
  thread_local TrendScratch scratch;
  for (int32_t w = 0; w < test.windows; ++w) {
    const BankWindow& window = test.window[w];
    // Most series are flat: this ends it before any sorting.
    if (!(RiseIn(view, head, window.rows, test.relative) >= window.rise_min)) continue;
    if (!test.trend) return true;
    float values[kBankRowsMax], steps[kBankRowsMax];
    CopyRows(view, head, window.rows, test.relative, values, steps);
    *trend = FitTrend(values, steps, window.rows, test.points_min, test.r2_min, &scratch);
    if (trend->points > 0 && PassesTrend(test, window, trend->z, trend->r2, trend->doubling_steps())) {
      return true;
    }
  }
  return false;
}

}  // namespace

// Plus 0.0f: of a negative zero, which equals the other one, there shall be none.
float LowerMedian(const float* values, int64_t count, float* scratch) {
  // Below this, counting buckets costs more than it saves.
  constexpr int64_t kBucketsFrom = 512;
  constexpr int kShift = 21;  // Sign, exponent and two bits of the fraction.
  if (count < kBucketsFrom) {
    float* const end = std::copy_if(values, values + count, scratch, [](float x) { return IsFinite(x); });
    const int64_t finite = end - scratch;
    return finite == 0 ? std::numeric_limits<float>::quiet_NaN() : NthOf(scratch, finite, (finite - 1) / 2) + 0.0f;
  }
  std::array<uint32_t, size_t{1} << (32 - kShift)> buckets{};
  int64_t finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool is_finite = IsFinite(values[i]);
    buckets[OrderedKey(values[i]) >> kShift] += static_cast<uint32_t>(is_finite);
    finite += is_finite;
  }
  if (finite == 0) return std::numeric_limits<float>::quiet_NaN();
  int64_t rank = (finite - 1) / 2;
  size_t bucket = 0;
  for (; rank >= buckets[bucket]; ++bucket) rank -= buckets[bucket];
  int64_t inside = 0;
  for (int64_t i = 0; i < count; ++i) {
    scratch[inside] = values[i];
    inside += OrderedKey(values[i]) >> kShift == bucket && IsFinite(values[i]);
  }
  return NthOf(scratch, inside, rank) + 0.0f;
}

float RiseOf(const BankTrack& track, int64_t heads, int64_t head, int32_t rows, bool relative) {
  return RiseIn(ViewOf(track, heads), head, rows, relative);
}

void CopyWindow(const BankTrack& track, int64_t heads, int64_t head, int32_t rows, bool relative, float* values,
                float* steps) {
  CopyRows(ViewOf(track, heads), head, rows, relative, values, steps);
}

bool PassesWindows(const BankTest& test, const BankTrack& track, int64_t heads, int64_t head, Trend* trend) {
  return Passes(test, SettledView(track, heads).view, head, trend);
}

namespace cpu {
namespace {

// For floats, x > result exactly where x > threshold.
float FloorToFloat(double threshold) {
  const auto rounded = static_cast<float>(threshold);
  return static_cast<double>(rounded) > threshold ? std::nextafter(rounded, -std::numeric_limits<float>::infinity())
                                                  : rounded;
}

// Bit h: head first + h is above the threshold; `count` of 1..64.
uint64_t Above(const float* newest, int64_t count, float threshold) {
  bool any = false;
  for (int64_t h = 0; h < count; ++h) any |= newest[h] > threshold;
  if (!any) return 0;
  uint64_t word = 0;
  for (int64_t h = 0; h < count; ++h) word |= static_cast<uint64_t>(newest[h] > threshold) << h;
  return word;
}

void Evaluate(const BankTest& test, const BankTrack& track, int64_t heads, uint64_t* hits) {
  const int64_t words = HitWords(heads);
  std::fill(hits, hits + words, uint64_t{0});
  if (track.newest == nullptr || test.windows == 0) return;
  const SettledView settled(track, heads);
  Trend trend;
  const float threshold = FloorToFloat(ThresholdOf(test, track.median));
  for (int64_t w = 0; w < words; ++w) {
    const int64_t first = w * 64;
    uint64_t word = Above(track.newest + first, std::min<int64_t>(64, heads - first), threshold);
    if (test.windows < 0) {
      hits[w] = word;
      continue;
    }
    for (; word != 0; word &= word - 1) {
      const int bit = std::countr_zero(word);
      const int64_t head = first + bit;
      if (test.unwanted != nullptr && test.unwanted[head] != 0) continue;
      if (Passes(test, settled.view, head, &trend)) hits[w] |= uint64_t{1} << bit;
    }
  }
}

}  // namespace

void EvaluateDetectors(BankRun* run) {
  thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(run->heads));
  for (int32_t t = 0; t < run->tracks; ++t) {
    BankTrack& track = run->track[t];
    if (!track.fresh) continue;
    track.median = LowerMedian(track.newest, run->heads, scratch.data());
  }
  for (int32_t t = 0; t < run->tests; ++t) {
    const BankTest& test = run->test[t];
    Evaluate(test, run->track[test.track], run->heads, run->hits + t * HitWords(run->heads));
  }
}

}  // namespace cpu
}  // namespace bellwether::kernels
