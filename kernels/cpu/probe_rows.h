// probe_rows.h: how one row's numbers enter the sums.  Shared by the reference
// and the fast path.

#ifndef BELLWETHER_KERNELS_CPU_PROBE_ROWS_H_
#define BELLWETHER_KERNELS_CPU_PROBE_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "bellwether/kernels/probe.h"
#include "cpu/element.h"
#include "probe_sampling.h"

namespace bellwether::kernels::cpu {

// What one row contributes.  Filled only as far as the row is finite.
struct RowStats {
  double common_mode = 0;
  double spread = 0;
  double first = 0;           // Largest score and second largest, counted with
  double second = 0;          // multiplicity; second = -inf if there is one key.
  double l = 1;               // of the keys, and of the sink behind MergeSink()
  double l_keys = 1;          // of the keys
  double weighted_score = 0;  // sum exp(S - m) (S - m)
  double weighted_dp = 0;     // sum exp(S - m) dP
  double first_key = 0;       // exp(S - m) of key 0
  double delta_lp = 0;
  int64_t keys = 0;
};

// Rounding is monotone, so the two largest scores decide every tie rule.
inline bool IsTiedEps(float first, float second, double eps) {
  return static_cast<double>(second) >= static_cast<double>(first) - eps;
}

// The head's sink takes its part: m and the sums with it.  `first` and `second` stay.
inline void MergeSink(double sink, RowStats& row) {
  const double m = std::max(row.first, sink);
  const double factor = std::exp(row.first - m);
  row.weighted_score = factor * (row.weighted_score + row.l_keys * (row.first - m));
  row.weighted_dp *= factor;
  row.first_key *= factor;
  row.l_keys *= factor;
  row.l = row.l_keys + std::exp(sink - m);
}

// Whether a sink makes rows non-finite.
inline bool IsBadSink(float sink) { return !std::isfinite(sink) && !(sink < 0); }

inline void AddRow(const RowStats& row, bool with_delta, double* sums) {
  const float first = static_cast<float>(row.first);
  const float second = static_cast<float>(row.second);
  sums[kProbeRows] += 1;
  sums[kProbeCommonModeSum] += row.common_mode;
  sums[kProbeSpreadSum] += row.spread;
  if (row.keys > 1) {
    sums[kProbeTiedRowsBf16] += ToFloat(ToBFloat16(first)) == ToFloat(ToBFloat16(second));
    sums[kProbeTiedRowsEps] += IsTiedEps(first, second, kTieEps);
    sums[kProbeTiedRowsEpsPaper] += IsTiedEps(first, second, kTieEpsPaper);
    const double entropy = row.l_keys / row.l * std::log(row.l) - row.weighted_score / row.l;
    sums[kProbeEntropySum] += std::max(entropy, 0.0) / std::log(static_cast<double>(row.keys));
  }
  sums[kProbeSaturatedRows] += row.l < kSaturatedSum;
  sums[kProbeLogitMax] = std::max(sums[kProbeLogitMax], static_cast<double>(first));
  sums[kProbeSinkSum] += row.first_key / row.l;
  if (!with_delta) return;
  const double delta_hp = row.weighted_dp / row.l;
  const double error = row.delta_lp - delta_hp;
  sums[kProbeDeltaBiasSum] += error;
  sums[kProbeDeltaBiasSumsq] += error * error;
  sums[kProbeDeltaAbsSum] += std::fabs(delta_hp);
  sums[kProbeDeltaErrorAbsSum] += std::fabs(error);
}

inline void AddNonfiniteRow(double* sums) {
  sums[kProbeRows] += 1;
  sums[kProbeNonfiniteRows] += 1;
}

inline void ClearSums(double* sums) {
  std::fill(sums, sums + kProbeStatCount, 0.0);
  sums[kProbeLogitMax] = -std::numeric_limits<double>::infinity();
}

inline void MergeSums(const double* from, double* to) {
  for (int stat = 0; stat < kProbeStatCount; ++stat) {
    to[stat] = stat == kProbeLogitMax ? std::max(to[stat], from[stat]) : to[stat] + from[stat];
  }
}

constexpr bool IsDriftStat(int stat) { return stat <= kProbeSpreadSum || stat == kProbeNonfiniteRows; }

// A NaN that the caller's `out` holds stays.
inline void StoreSums(const ProbeParams& p, int64_t head, const double* sums) {
  const int count = p.d_o.data != nullptr ? kProbeStatCount : kProbeDeltaBiasSum;
  for (int stat = 0; stat < count; ++stat) {
    if (p.drift_only && !IsDriftStat(stat)) continue;
    float& out = p.out[stat * p.stat_stride + head];
    if (stat == kProbeLogitMax) {
      if (sums[stat] > static_cast<double>(out)) out = static_cast<float>(sums[stat]);
    } else {
      out = static_cast<float>(static_cast<double>(out) + sums[stat]);
    }
  }
}

// |mean k| / mean |k|, of sums or of means alike.
inline double KeyCoherence(double mean_norm, double norm_mean) { return mean_norm == 0 ? 0.0 : norm_mean / mean_norm; }

// Of the sequences of a key head.
struct KeySums {
  double sequences = 0;
  double coherence = 0;
};

inline void StoreKeySums(const ProbeParams& p, int64_t kv_head, const KeySums& sums) {
  p.kv_out[kProbeKvSequences * p.kv_stat_stride + kv_head] += static_cast<float>(sums.sequences);
  float& coherence = p.kv_out[kProbeKvKeyCoherenceSum * p.kv_stat_stride + kv_head];
  coherence = static_cast<float>(static_cast<double>(coherence) + sums.coherence);
}

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_PROBE_ROWS_H_
