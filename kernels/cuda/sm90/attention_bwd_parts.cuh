// attention_bwd_parts.cuh: what a consumer of the backward does in a step: its
// products, the masks and the cap, and adding dQ.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARTS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARTS_CUH_

#include "cuda/sm90/attention_bwd_params.h"
#include "cuda/sm90/attention_bwd_tiles.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// D[64 keys, kRows] = A[64 keys, head_dim] B[kRows, head_dim]^T.
template <class S>
__device__ __forceinline__ void IssueInner(float (&d)[S::kRows / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 16; ++i) {
    Wgmma<typename S::T, S::kRows, false, false>::Ss(d, a + (i / 4) * (S::kCols * 8) + (i % 4) * 2,
                                                     b + (i / 4) * (S::kRows * 8) + (i % 4) * 2, i > 0);
  }
}

// D[64 keys, head_dim] += A[64 keys, kRows] B[kRows, head_dim].
template <class S>
__device__ __forceinline__ void IssueOuter(float (&d)[S::kHeadDim / 2], const uint32_t (&a)[S::kRows / 4], uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kRows / 16; ++i) {
    Wgmma<typename S::T, S::kHeadDim, false, true>::Rs(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                                                       b + i * 128, 1);
  }
}

// dQ[64, 64] = dS[64 queries, 128 keys] K[128 keys, 64]; dS lies transposed.
template <class S>
__device__ __forceinline__ void IssueQueries(float (&d)[S::kQueries / 2], uint64_t ds, uint64_t k) {
#pragma unroll
  for (int i = 0; i < S::kCols / 16; ++i) {
    Wgmma<typename S::T, S::kQueries, true, true>::Ss(d, ds + i * 128, k + i * 128, i > 0);
  }
}

// Sets the scores that masks forbid to -inf.  `row` is the step's first query.
template <class S>
__device__ __forceinline__ void MaskTransposed(float (&s)[S::kRows / 2], const SequenceParams& p, const BwdTile& t,
                                               int row) {
  const Sequence& seq = t.sequence;
  const int shift = seq.k_len - seq.q_len;
  const bool before = p.causal && t.key + S::kCols - 1 > row + shift;
  const bool behind = S::kGeneral && p.window > 0 && t.key <= row + S::kRows - 1 + shift - p.window;
  if (!before && !behind && t.key + S::kCols <= seq.k_len) return;
  const int thread = ThreadIndexAgain() - 128;
  const int key = t.key + thread / 32 * 16 + thread % 32 / 4;
  const int column = row + thread % 4 * 2;
  int from[2];  // first allowed query of each of the two keys, as a column
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    from[r] = p.causal ? key + 8 * r - shift - column : -S::kRows;
    if (key + 8 * r >= seq.k_len) from[r] = S::kRows;
  }
#pragma unroll
  for (int i = 0; i < S::kRows / 2; ++i) {
    if (i / 4 * 8 + i % 2 < from[i / 2 % 2]) s[i] = -INFINITY;
  }
  if (behind) {
    const int end = key - shift + p.window - column;
#pragma unroll
    for (int i = 0; i < S::kRows / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= end + i / 2 % 2 * 8) s[i] = -INFINITY;
    }
  }
}

// dP - delta times the derivative of the cap, plus delta.  The capped score comes
// back from P, so that it need not be kept: 1 - tanh^2, in [0, 1].
template <class S>
__device__ __forceinline__ void ApplyCapDerivative(float (&dp)[S::kRows / 2], const float (&pr)[S::kRows / 2],
                                                   float scale_log2, uint32_t lse, uint32_t delta, uint32_t inverse) {
  const float inverse_scale = 1.f / scale_log2;
  const auto derivative = [&](float x, float probability, float row_lse, float d) {
    const float t = fminf(fmaxf((Log2(probability) + row_lse) * inverse_scale, -1.f), 1.f);
    return fmaf(x - d, 1.f - t * t, d);
  };
#pragma unroll
  for (int i = 0; i < S::kRows / 2; i += 4) {
    float2 l = LoadShared2(lse + i * 8);
    const float2 d = LoadShared2(delta + i * 8);
    if constexpr (S::kRounded) {  // P carries a factor 1 / lt
      const float2 v = LoadShared2(inverse + i * 8);
      l.x -= Log2(v.x);
      l.y -= Log2(v.y);
    }
    dp[i] = derivative(dp[i], pr[i], l.x, d.x);
    dp[i + 1] = derivative(dp[i + 1], pr[i + 1], l.y, d.y);
    dp[i + 2] = derivative(dp[i + 2], pr[i + 2], l.x, d.x);
    dp[i + 3] = derivative(dp[i + 3], pr[i + 3], l.y, d.y);
  }
}

// The count of the key tiles whose dQ this warp has added to query tile m.
template <class S>
__device__ __forceinline__ int* TurnOf(const BwdParams& p, const BwdTile& t, int m, int head) {
  const int64_t row = RowBase(p, t.sequence, head) + m * S::kRows;
  return p.turns + row / S::kRows * 8 + (ThreadIndexAgain() - 128) / 32;
}

// The next key tile may add its dQ.  Called a step after the additions, so that
// the fence finds them done.
template <class S>
__device__ __forceinline__ void PassTurn(const BwdParams& p, const BwdTile& t, int m, int head) {
  __threadfence();
  __syncwarp();
  if (ThreadIndexAgain() % 32 == 0) ReduceAddRelease(TurnOf<S>(p, t, m, head), 1);
}

// Adds a warpgroup's dQ of one step to the sums, in the accumulators' order.
template <class S>
__device__ __forceinline__ void AddQueries(const BwdParams& p, const BwdTile& t, const float (&dq)[S::kQueries / 2],
                                           int m, int head) {
  const int thread = ThreadIndexAgain() - 128, warpgroup = thread / 128, lane = thread % 32;
  if (S::kGeneral && p.turns != nullptr) {
    const int mine = LastKeyTile<S>(p.seq, t.sequence, m) - t.key / S::kCols;
    if (lane == 0) {
      const int* const turn = TurnOf<S>(p, t, m, head);
      while (LoadAcquire(turn) != mine) {
      }
    }
    __syncwarp();
  }
  const int64_t row = RowBase(p, t.sequence, head) + m * S::kRows;
  float* const sum = p.dq_sum + row * S::kHeadDim + warpgroup * 4096 + thread % 128 * 4;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    ReduceAdd4(sum + i * 128, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
  }
  if constexpr (S::kRowSums) {  // at head_dim 128 both warpgroups have the same queries
    const int first = (S::kHalves == 1 ? warpgroup * 64 : 0) + thread % 128 / 32 * 16 + lane / 4;
    if (lane % 4 == 0 && (S::kHalves == 1 || warpgroup == 0)) {
      ReduceAdd(p.ds_sum + row + first, dq[32]);
      ReduceAdd(p.ds_sum + row + first + 8, dq[34]);
    }
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARTS_CUH_
