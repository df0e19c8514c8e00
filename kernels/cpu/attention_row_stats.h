// attention_row_stats.h: the statistics of one row of attention, tile by tile.
//
// The sums are relative to the largest score so far, as probe.h's are to the last.

#ifndef BELLWETHER_KERNELS_CPU_ATTENTION_ROW_STATS_H_
#define BELLWETHER_KERNELS_CPU_ATTENTION_ROW_STATS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/probe_rows.h"

namespace bellwether::kernels::cpu {

class AttentionRowStats {
 public:
  // Scores before a cap: a row with one that float32 does not hold is not finite.
  void CheckRaw(const double* scores, int64_t count) {
    for (int64_t j = 0; j < count; ++j) finite_ &= std::isfinite(static_cast<float>(scores[j]));
  }

  // Scores of the keys from `key` on, in natural units.
  void Add(const double* scores, int64_t count, int64_t key) {
    CheckRaw(scores, count);
    if (!finite_ || count == 0) return;
    const double before = row_.first;
    for (int64_t j = 0; j < count; ++j) {
      row_.second = std::max(row_.second, std::min(scores[j], row_.first));
      row_.first = std::max(row_.first, scores[j]);
    }
    if (row_.keys != 0) {
      const double moved = before - row_.first, factor = std::exp(moved);
      row_.weighted_score = factor * (row_.weighted_score + row_.l * moved);
      row_.l *= factor;
    }
    for (int64_t j = 0; j < count; ++j) {
      const double x = scores[j] - row_.first, weight = std::exp(x);
      row_.l += weight;
      row_.weighted_score += weight * x;
    }
    if (key == 0) first_key_ = scores[0];
    row_.keys += count;
  }

  // sums: [kProbeStatCount].  sink: the head's, or null.  A row without keys is none.
  void AddTo(const float* sink, double* sums) const {
    if (finite_ && row_.keys == 0) return;
    if (!finite_ || (sink != nullptr && IsBadSink(*sink))) return AddNonfiniteRow(sums);
    RowStats row = row_;
    row.l_keys = row.l;
    row.first_key = std::exp(first_key_ - row.first);
    if (sink != nullptr) MergeSink(static_cast<double>(*sink), row);
    AddRow(row, false, sums);
  }

 private:
  static constexpr double kNone = -std::numeric_limits<double>::infinity();

  RowStats row_ = {.first = kNone, .second = kNone, .l = 0};
  double first_key_ = kNone;
  bool finite_ = true;
};

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_ATTENTION_ROW_STATS_H_
