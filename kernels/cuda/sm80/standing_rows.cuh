// standing_rows.cuh: rows of the softmax whose anchors stand, for the modes that divide
// by lt; cuda/softmax.cuh has what is computed.
//
// 2^(x - a) is rounded to the same bits but for a power of two, whichever integer a is.
// So a need not follow the maximum: it stays until a score is more than kSlack above it,
// and then becomes the ceiling of the largest.  A lane asks that of its own scores; only
// where one of the warp's says yes is the row's maximum needed, which the four lanes
// that hold it exchange, and are accumulators multiplied.  2^kSlack is far from the largest fp16.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_STANDING_ROWS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_STANDING_ROWS_CUH_

#include <cfloat>

#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm80 {

// The two rows of a thread, as SoftmaxRows has them.  kKeepsMax: M is wanted.
template <class T, bool kKeepsMax>
struct StandingRows {
  static constexpr float kSlack = 7.f;  // log2 units
  // Before the first score.  Finite, so that what is masked is 2^-inf = 0 here too.
  static constexpr float kNone = -FLT_MAX;
  float max[2] = {-INFINITY, -INFINITY};  // of this thread's scores, in units of s; if kKeepsMax
  float anchor[2] = {kNone, kNone};
  float sum[2] = {0, 0};  // of this thread's P

  // Whether a score of this thread is too large for its row's anchor.  `largest`: at
  // least those of this tile, at most all so far; for Move().
  template <int kScores>
  __device__ __forceinline__ bool Exceeds(const float (&s)[kScores], float scale_log2, float (&largest)[2]) {
    float chunk_max[kScores / 16][2];
    MaxOfChunks(s, chunk_max);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = LaneMax(chunk_max, r);
      if constexpr (kKeepsMax) largest[r] = max[r] = fmaxf(max[r], largest[r]);
    }
    return fmaf(largest[0], scale_log2, -anchor[0]) > kSlack || fmaf(largest[1], scale_log2, -anchor[1]) > kSlack;
  }

  // Moves the anchors up and returns in `rescale` what the accumulators must be
  // multiplied with, powers of two <= 1.  All lanes of the quad call it.
  __device__ __forceinline__ void Move(const float (&largest)[2], float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = fmaxf(anchor[r], ceilf(QuadMax(largest[r]) * scale_log2));
      rescale[r] = Exp2(anchor[r] - next);
      anchor[r] = next;
      sum[r] *= rescale[r];
    }
  }

  // Turns scores into probabilities, pairs of which are ready for Probabilities().
  // zero: PairRegisters().
  template <int kScores>
  __device__ __forceinline__ void Exponentials(float (&s)[kScores], float scale_log2, uint32_t zero) {
    float used[2] = {anchor[0], anchor[1]}, tile_sum[2] = {0.f, 0.f};
    PairRegisters(used[0], used[1], zero);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      s[i] = Exp2(fmaf(s[i], scale_log2, -used[r]));
      s[i + 1] = Exp2(fmaf(s[i + 1], scale_log2, -used[r]));
      tile_sum[r] += s[i];
      tile_sum[r] += s[i + 1];
    }
    sum[0] += tile_sum[0];
    sum[1] += tile_sum[1];
  }

  template <int kScores>
  static __device__ __forceinline__ void Probabilities(const float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
    PackPairs<T>(s, p);
  }

  // All four lanes of the quad call it and get the same; its `max` is M only if kKeepsMax.
  __device__ __forceinline__ FinishedRow Finish(int r, float lt, float scale_log2) const {
    const float m = kKeepsMax ? QuadMax(max[r]) * scale_log2 : anchor[r];
    return FinishRow(m, anchor[r], QuadSum(sum[r]), lt);
  }
};

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_STANDING_ROWS_CUH_
