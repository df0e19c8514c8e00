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

// Selects by eleven bits of the ordered keys at a time, until few are left to sort.
float LowerMedian(const float* values, int64_t count, float* scratch) {
  // Below this, counting buckets costs more than it saves.
  constexpr int64_t kSortMax = 512;
  constexpr int kBits = 11;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  int64_t left = 0;
  for (int64_t i = 0; i < count; ++i) {
    scratch[left] = values[i];
    left += IsFinite(values[i]);
  }
  if (left == 0) return std::numeric_limits<float>::quiet_NaN();
  int64_t rank = (left - 1) / 2;
  for (int shift = 32 - kBits; left > kSortMax && shift > 0; shift -= kBits) {
    // Two sets of counters: values that are alike would wait for one.
    std::array<std::array<uint32_t, kMask + 1>, 2> buckets{};
    for (int64_t i = 0; i < left; ++i) ++buckets[i % 2][OrderedKey(scratch[i]) >> shift & kMask];
    const auto size = [&](uint32_t bucket) { return int64_t{buckets[0][bucket]} + buckets[1][bucket]; };
    uint32_t bucket = 0;
    for (; rank >= size(bucket); ++bucket) rank -= size(bucket);
    int64_t inside = 0;
    for (int64_t i = 0; i < left; ++i) {
      const float value = scratch[i];
      scratch[inside] = value;
      inside += (OrderedKey(value) >> shift & kMask) == bucket;
    }
    left = inside;
  }
  // Plus 0.0f: of a negative zero, which equals the other one, there shall be none.
  return NthOf(scratch, left, rank) + 0.0f;
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
