// attention_fwd_outputs.cuh: what the forward writes of a finished tile: O, O_lo,
// L, the row sums and the statistics.  By warps, which hold 16 rows each.  How rows of
// O and O_lo reach memory is a path's own.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_FWD_OUTPUTS_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_FWD_OUTPUTS_CUH_

#include "bellwether/kernels/probe.h"
#include "cuda/attention_params.h"
#include "cuda/registers.cuh"
#include "cuda/sequences.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda {

// Max of floats of any sign that are no NaN, through the order of integers.
__device__ __forceinline__ void AtomicMaxFloat(float* address, float x) {
  if (x >= 0.f) {
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(x));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(x));
  }
}

// Merges the largest of the warp's values, -inf for none.  All lanes call it.
__device__ __forceinline__ void MergeLogitMax(const StatsParams& stats, float largest, int head, int lane) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
  }
  if (lane == 0 && largest > -INFINITY) AtomicMaxFloat(stats.At(kProbeLogitMax, head), largest);
}

// What a thread knows of its two rows beside their sums, for the statistics: nothing, where they see all keys from
// the first to the last.
struct AllKeys {
  static constexpr bool kMasked = false;
};
// The keys that they see, and their sink in log2 units.
struct MaskedKeys {
  static constexpr bool kMasked = true;
  int keys[2];
  float sink;
};

// Of rows that do not count: the largest score of those that are finite.
__device__ __forceinline__ void MergeLogitMaxOf(const AttentionFwdParams& p, const FinishedRow (&done)[2], int row,
                                                const Sequence& seq, int head, int lane) {
  constexpr float kLn2 = 0.693147180559945309f;
  float largest = -INFINITY;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r < seq.q_len && !isnan(done[r].sum)) largest = fmaxf(largest, done[r].max * kLn2);
  }
  MergeLogitMax(p.stats, largest, head, lane);
}

// Adds this warp's 16 rows to the head's statistics, whose rules are probe.h's.
// All lanes call it; `row` is the first of this thread's two.
template <class Rows, class Seq, class Seen>
__device__ __forceinline__ void AddFwdStats(const AttentionFwdParams& p, const Rows& rows, const FinishedRow (&done)[2],
                                            int row, const Seq& seq, int head, int lane, const Seen& seen) {
  const auto add = [&](ProbeStat stat, bool row0, bool row1) {
    const int count = __popc(__ballot_sync(0xffffffffu, row0)) + __popc(__ballot_sync(0xffffffffu, row1));
    if (lane == 0 && count > 0) atomicAdd(p.stats.At(stat, head), static_cast<float>(count));
  };
  const auto add_sum = [&](ProbeStat stat, float x) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
    if (lane == 0) atomicAdd(p.stats.At(stat, head), x);
  };
  bool any[2], finite[2], bf16[2], eps[2], paper[2], saturated[2];
  float largest = -INFINITY, entropy = 0.f, sink = 0.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const TopTwo top = rows.top[r].OfQuad();
    const float first = top.first * p.score.scale, second = top.second * p.score.scale;
    any[r] = lane % 4 == 0 && row + 8 * r < seq.q_len;
    if constexpr (Seen::kMasked) {
      any[r] = any[r] && seen.keys[r] > 0;
    } else {
      any[r] = any[r] && done[r].sum != 0.f;
    }
    finite[r] = any[r] && !isnan(done[r].sum);
    bf16[r] = finite[r] && second > -INFINITY && __float2bfloat16_rn(first) == __float2bfloat16_rn(second);
    eps[r] = finite[r] && double{second} >= double{first} - kTieEps;
    paper[r] = finite[r] && double{second} >= double{first} - kTieEpsPaper;
    // l is in units of 2^anchor, the rule is relative to the maximum.
    float max = done[r].max, weighted = QuadSum(rows.weighted[r]), of_keys = 1.f;
    if constexpr (Seen::kMasked) {
      if (seen.sink > -INFINITY) {
        max = fmaxf(max, seen.sink);
        const float x = seen.sink - rows.anchor[r], weight = Exp2(x);
        weighted -= weight * fmaxf(x, -200.f);
        of_keys -= weight / done[r].sum;
      }
    }
    saturated[r] = finite[r] && done[r].sum * Exp2(rows.anchor[r] - max) < float{kSaturatedSum};
    weighted /= done[r].sum;
    if (finite[r]) {
      largest = fmaxf(largest, first);
      sink += rows.first_key[r] / done[r].sum;
      int keys;
      if constexpr (Seen::kMasked) {
        keys = seen.keys[r];
      } else {
        keys = LastKey(p.seq, seq, row + 8 * r) - FirstKey(p.seq, seq, row + 8 * r) + 1;
      }
      if (keys > 1) entropy += fmaxf(of_keys * log2f(done[r].sum) - weighted, 0.f) / log2f(static_cast<float>(keys));
    }
  }
  add(kProbeRows, any[0], any[1]);
  add(kProbeNonfiniteRows, any[0] && !finite[0], any[1] && !finite[1]);
  add(kProbeTiedRowsBf16, bf16[0], bf16[1]);
  add(kProbeTiedRowsEps, eps[0], eps[1]);
  add(kProbeTiedRowsEpsPaper, paper[0], paper[1]);
  add(kProbeSaturatedRows, saturated[0], saturated[1]);
  add_sum(kProbeEntropySum, entropy);
  add_sum(kProbeSinkSum, sink);
  MergeLogitMax(p.stats, largest, head, lane);
}

// Where L and the like have a row.
__device__ __forceinline__ int64_t LseAt(const AttentionFwdParams& p, int row, int head, const Sequence& seq) {
  return seq.index * p.lse_batch_stride + head * p.lse_head_stride + seq.q_start + row;
}

// Finishes this thread's rows, `row` and the eighth after it of the tile's sequence, and
// writes L; none of it needs O.
template <class Rows>
__device__ __forceinline__ void WriteFwdSums(const AttentionFwdParams& p, const Rows& rows, int row, int head,
                                             const Sequence& seq, int lane, FinishedRow (&done)[2]) {
  float* const lse = p.lse + LseAt(p, row, head, seq);
#pragma unroll
  for (int r = 0; r < 2; ++r) done[r] = rows.Finish(r, p.score.scale_log2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (lane % 4 == 0 && row + 8 * r < seq.q_len) lse[8 * r] = done[r].lse;
  }
}

// `o` is this thread's part of the accumulators, `row` and `done` as above.  kCounted:
// these rows count for the statistics.  store(words, residual) writes this warp's rows
// of O or of O_lo, packed as StoreRows() takes them.
template <class S, bool kCounted, class Rows, class Seq, class Store, class Seen = AllKeys>
__device__ __forceinline__ void WriteFwdOutputs(const AttentionFwdParams& p, const Rows& rows, FinishedRow (&done)[2],
                                                float (&o)[S::kOutputs / 2], int row, int head, const Seq& seq,
                                                int lane, const Store& store, const Seen& seen = {}) {
  using T = typename S::T;
  if constexpr (S::kOnes) {
#pragma unroll
    for (int r = 0; r < 2; ++r) done[r].Divide(o[S::kOutputs / 2 - 4 + 2 * r]);
  }
  if (p.anchor != nullptr) {
    const int64_t at = LseAt(p, row, head, seq);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 != 0 || row + 8 * r >= seq.q_len) continue;
      p.anchor[at + 8 * r] = rows.anchor[r];
      p.rounded_sum[at + 8 * r] = done[r].divisor;
    }
  }
  if constexpr (kCounted) {
    AddFwdStats(p, rows, done, row, seq, head, lane, seen);
  } else if constexpr (S::kCount) {
    if (p.stats.sums != nullptr) MergeLogitMaxOf(p, done, row, seq, head, lane);
  }
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 2; ++i) o[i] *= done[i / 2 % 2].inverse;
  constexpr int kStored = kStoredColumns<S::kHeadDim>;
  uint32_t words[kStored / 4] = {};
  if constexpr (S::kMode != SoftmaxMode::kSr) {
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 4; ++i) words[i] = PackPair<T>(o[2 * i], o[2 * i + 1]);
  } else {
    PinRegisters(o);
    uint32_t key[2];  // the same however sequences are batched or packed
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t unit = seq.index * p.seq.heads + head;
      key[r] = MixBits(MixBits(MixBits(static_cast<uint32_t>(p.seed) ^ (row + 8 * r)) ^ unit) ^
                       static_cast<uint32_t>(p.seed >> 32));
    }
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 4; ++i) {
      const uint32_t random = MixBits(key[i % 2] + i / 2 * 4 + lane % 4);
      words[i] = PackPairAtRandom<T>(o[2 * i], o[2 * i + 1], random);
    }
  }
  store(words, false);
  if constexpr (S::kMode == SoftmaxMode::kHp || S::kMode == SoftmaxMode::kFa) {
    if (p.o_lo != nullptr) {
#pragma unroll
      for (int i = 0; i < S::kHeadDim / 4; ++i) {
        const float2 rounded = UnpackPair<T>(words[i]);
        words[i] = PackPair<__nv_bfloat16>(o[2 * i] - rounded.x, o[2 * i + 1] - rounded.y);
      }
      store(words, true);
    }
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_FWD_OUTPUTS_CUH_
