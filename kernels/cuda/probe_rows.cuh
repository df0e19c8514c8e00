// probe_rows.cuh: what the probe remembers of a query row while it passes over the keys,
// how two parts of the keys merge, and what the row adds to the caller's sums.

#ifndef BELLWETHER_KERNELS_CUDA_PROBE_ROWS_CUH_
#define BELLWETHER_KERNELS_CUDA_PROBE_ROWS_CUH_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "bellwether/kernels/probe.h"

namespace bellwether::kernels::cuda {

// exp of it is 0 in fp32, and 0 times it is 0: stands for a masked score less the maximum.
inline constexpr float kVanishing = -110.f;

// Of some keys of a row.  The first half looks at the allowed keys, the last three at V.
struct RowState {
  float first, second;   // largest score and second largest, with multiplicity
  float l;               // sum exp(S - first)
  float weighted_score;  // sum exp(S - first) (S - first)
  float weighted_dp;     // sum exp(S - first) dP
  float poison;          // 0, or NaN if a score before the cap was not finite
  float first_key;       // the score of key 0, if it is allowed and among these keys
  float mean;            // of the scores before the cap
  float squares;         // sum (S - mean)^2
  float keys;
};

__device__ __forceinline__ RowState NoKeys() { return {-INFINITY, -INFINITY, 0, 0, 0, 0, -INFINITY, 0, 0, 0}; }

// The exponential sums of `a` in units of exp(first).
__device__ __forceinline__ void Rescale(float first, RowState& a) {
  const float shift = fmaxf(a.first - first, kVanishing);
  const float factor = expf(shift);
  a.weighted_score = factor * fmaf(shift, a.l, a.weighted_score);
  a.weighted_dp *= factor;
  a.l *= factor;
  a.first = first;
}

// Chan's update of mean and squares by another part.
__device__ __forceinline__ void MergeMoments(float keys, float mean, float squares, RowState& a) {
  const float total = a.keys + keys;
  const float share = keys == 0.f ? 0.f : keys / total;
  const float step = mean - a.mean;
  a.mean = fmaf(step, share, a.mean);
  a.squares += squares + step * step * (a.keys * share);
  a.keys = total;
}

__device__ __forceinline__ void Merge(RowState b, RowState& a) {
  a.second = fmaxf(fmaxf(a.second, b.second), fminf(a.first, b.first));
  const float first = fmaxf(a.first, b.first);
  Rescale(first, a);
  Rescale(first, b);
  a.l += b.l;
  a.weighted_score += b.weighted_score;
  a.weighted_dp += b.weighted_dp;
  a.poison += b.poison;
  a.first_key = fmaxf(a.first_key, b.first_key);
  MergeMoments(b.keys, b.mean, b.squares, a);
}

// What the lane `offset` beside has.
__device__ __forceinline__ RowState Neighbours(const RowState& mine, int offset) {
  const auto other = [offset](float x) { return __shfl_xor_sync(0xffffffffu, x, offset); };
  return {other(mine.first),       other(mine.second), other(mine.l),         other(mine.weighted_score),
          other(mine.weighted_dp), other(mine.poison), other(mine.first_key), other(mine.mean),
          other(mine.squares),     other(mine.keys)};
}

// A thread's scores of one row and tile.  raw: before the cap, all keys; `present` of
// them are in V, bit i for raw[i].
template <int kCount>
__device__ __forceinline__ void AddMoments(const float (&raw)[kCount], unsigned present, RowState& a) {
  constexpr unsigned kAll = (1u << kCount) - 1;
  float sum = 0, squares = 0;
  const float keys = static_cast<float>(__popc(present));
  if (present == kAll) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += raw[i];
    const float mean = sum * (1.f / kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) squares = fmaf(raw[i] - mean, raw[i] - mean, squares);
    MergeMoments(keys, mean, squares, a);
  } else if (present != 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += (present >> i & 1) ? raw[i] : 0.f;
    const float mean = sum / keys;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = (present >> i & 1) ? raw[i] - mean : 0.f;
      squares = fmaf(x, x, squares);
    }
    MergeMoments(keys, mean, squares, a);
  }
}

// scores: after the cap, -inf where masked; dp: 0 there.
template <int kCount, bool kDelta>
__device__ __forceinline__ void AddScores(const float (&scores)[kCount], const float (&dp)[kCount], RowState& a) {
  float first = a.first;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    a.second = fmaxf(a.second, fminf(scores[i], first));
    first = fmaxf(first, scores[i]);
  }
  Rescale(first, a);
  float l = 0, weighted_score = 0, weighted_dp = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float x = fmaxf(scores[i] - first, kVanishing);
    const float weight = expf(x);
    l += weight;
    weighted_score = fmaf(weight, x, weighted_score);
    if (kDelta) weighted_dp = fmaf(weight, dp[i], weighted_dp);
  }
  a.l += l;
  a.weighted_score += weighted_score;
  if (kDelta) a.weighted_dp += weighted_dp;
}

__device__ __forceinline__ void AddDrift(const RowState& row, double* stats) {
  const bool finite = isfinite(row.mean) && isfinite(row.squares);
  stats[kProbeCommonModeSum] = finite ? fabs(static_cast<double>(row.mean)) : NAN;
  stats[kProbeSpreadSum] = finite ? sqrt(static_cast<double>(row.squares) / static_cast<double>(row.keys)) : NAN;
}

// Whether a sink makes rows non-finite.
__device__ __forceinline__ bool IsBadSink(float sink) { return isnan(sink) || sink == INFINITY; }

// What one row adds, as AddRow of cpu/probe_rows.h, to stats [kProbeStatCount]; logit_max
// by max.  keys: how many it may see.  sink: its head's, -inf without.
__device__ __forceinline__ void RowStats(const RowState& row, int keys, float sink, double delta_lp, double* stats) {
  for (int stat = 0; stat < kProbeStatCount; ++stat) stats[stat] = 0;
  stats[kProbeLogitMax] = -INFINITY;
  stats[kProbeRows] = 1;
  if (row.poison != 0.f || isinf(row.first) || IsBadSink(sink)) {  // NaN differs from 0.
    stats[kProbeNonfiniteRows] = 1;
    return;
  }
  AddDrift(row, stats);
  const double first = row.first, second = row.second;
  // The sink takes its part of the maximum and of the sums.
  const double m = fmax(first, static_cast<double>(sink));
  const double factor = exp(first - m);
  const double l_keys = factor * static_cast<double>(row.l), l = l_keys + exp(static_cast<double>(sink) - m);
  const double weighted_score = factor * static_cast<double>(row.weighted_score) + l_keys * (first - m);
  if (keys > 1) {
    stats[kProbeTiedRowsBf16] =
        __bfloat162float(__float2bfloat16_rn(row.first)) == __bfloat162float(__float2bfloat16_rn(row.second));
    stats[kProbeTiedRowsEps] = second >= first - kTieEps;
    stats[kProbeTiedRowsEpsPaper] = second >= first - kTieEpsPaper;
    const double entropy = l_keys / l * log(l) - weighted_score / l;
    stats[kProbeEntropySum] = fmax(entropy, 0.0) / log(static_cast<double>(keys));
  }
  stats[kProbeSaturatedRows] = l < kSaturatedSum;
  stats[kProbeLogitMax] = first;
  stats[kProbeSinkSum] = exp(static_cast<double>(row.first_key) - m) / l;
  const double delta_hp = factor * static_cast<double>(row.weighted_dp) / l;
  const double error = delta_lp - delta_hp;
  stats[kProbeDeltaBiasSum] = error;
  stats[kProbeDeltaBiasSumsq] = error * error;
  stats[kProbeDeltaAbsSum] = fabs(delta_hp);
  stats[kProbeDeltaErrorAbsSum] = fabs(error);
}

// With drift_only: what of it is left then.
__device__ __forceinline__ void DriftStats(const RowState& row, float sink, double* stats) {
  for (int stat = 0; stat < kProbeStatCount; ++stat) stats[stat] = 0;
  stats[kProbeLogitMax] = -INFINITY;
  stats[kProbeRows] = 1;
  if (row.poison != 0.f || IsBadSink(sink)) {  // NaN differs from 0.
    stats[kProbeNonfiniteRows] = 1;
    return;
  }
  AddDrift(row, stats);
}

// A NaN that *out holds stays.
__device__ __forceinline__ void AtomicMax(float* out, float x) {
  int* const bits = reinterpret_cast<int*>(out);
  int seen = *reinterpret_cast<volatile int*>(bits);
  while (x > __int_as_float(seen)) {
    const int before = atomicCAS(bits, seen, __float_as_int(x));
    if (before == seen) return;
    seen = before;
  }
}

// Adds a warp's rows to `out`, head by head; head < 0: this lane has no row.  stats
// [kProbeStatCount]: this lane's, of which every step-th is added from `begin` on.
__device__ __forceinline__ void AddToHeads(const ProbeParams& p, int head, int begin, int step, bool with_delta,
                                           const double* stats) {
  const int count = with_delta ? kProbeStatCount : kProbeDeltaBiasSum;
  unsigned left = __ballot_sync(0xffffffffu, head >= 0);
  while (left != 0) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const int current = __shfl_sync(0xffffffffu, head, leader);
    const bool mine = head == current;
    for (int stat = begin; stat < count; stat += step) {
      const bool is_max = stat == kProbeLogitMax;
      double x = mine ? stats[stat] : is_max ? -INFINITY : 0.0;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        const double other = __shfl_xor_sync(0xffffffffu, x, offset);
        x = is_max ? fmax(x, other) : x + other;
      }
      if (threadIdx.x % 32 != leader) continue;
      float* const out = p.out + stat * p.stat_stride + current;
      if (is_max) {
        AtomicMax(out, static_cast<float>(x));
      } else if (x != 0) {
        atomicAdd(out, static_cast<float>(x));
      }
    }
    left &= ~__ballot_sync(0xffffffffu, mine);
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_PROBE_ROWS_CUH_
