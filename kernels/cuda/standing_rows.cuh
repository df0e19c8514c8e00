// standing_rows.cuh: rows of the softmax whose anchors stand, for the modes that divide
// by lt; cuda/softmax.cuh has what is computed.
//
// 2^(x - a) is rounded to the same bits but for a power of two, whichever integer a is.
// So a need not follow the maximum: it stays until a score is more than kSlack above it,
// and then becomes the ceiling of the largest.  A lane asks that of its own scores; only
// where one of the warp's says yes is the row's maximum needed, which the four lanes
// that hold it exchange, and are accumulators multiplied.  2^kSlack is far from the largest fp16.

#ifndef BELLWETHER_KERNELS_CUDA_STANDING_ROWS_CUH_
#define BELLWETHER_KERNELS_CUDA_STANDING_ROWS_CUH_

#include <cfloat>

#include "cuda/softmax.cuh"
#include "cuda/top_two.cuh"

namespace bellwether::kernels::cuda {

// The two rows of a thread, as SoftmaxRows has them.  kCounted: they count for the statistics.
template <class T, bool kCounted>
struct StandingRows {
  static constexpr float kSlack = 7.f;  // log2 units
  // Before the first score.  Finite, so that what is masked is 2^-inf = 0 here too.
  static constexpr float kNone = -FLT_MAX;
  float anchor[2] = {kNone, kNone};
  float sum[2] = {0, 0};  // of this thread's P
  // Of the row, in units of s, when Finish() is called; only if it is wanted of rows that do
  // not count.  The caller keeps it.
  float max[2] = {-INFINITY, -INFINITY};
  // If kCounted; as in SoftmaxRows, but that `top` is sure to have only what is near the
  // row's maximum: scores from `near` on, of the maximum so far, alike in the quad.
  TopTwo top[2];
  float near[2] = {-INFINITY, -INFINITY};
  float weighted[2] = {0, 0}, first_key[2] = {0, 0};

  // Before the first score.  A sink in log2 units, no -inf, counts as a key without a value; `first`: this is the
  // quad's first lane.  Returns what it adds to l and to lt.
  __device__ __forceinline__ float BeginWithSink(float sink, bool first) {
    const float weight = Exp2(sink - ceilf(sink));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      anchor[r] = ceilf(sink);
      sum[r] = first ? weight : 0.f;
      if constexpr (kCounted) weighted[r] = first ? weight * (sink - anchor[r]) : 0.f;
    }
    return weight;
  }

  // The largest of this thread's scores of each row.
  template <int kScores>
  static __device__ __forceinline__ void Largest(const float (&s)[kScores], float (&largest)[2]) {
    float chunk_max[kScores / 16][2];
    MaxOfChunks(s, chunk_max);
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = LaneMax(chunk_max, r);
  }

  // Whether one of them is too large for its row's anchor.
  __device__ __forceinline__ bool Exceeds(const float (&largest)[2], float scale_log2) const {
    return fmaf(largest[0], scale_log2, -anchor[0]) > kSlack || fmaf(largest[1], scale_log2, -anchor[1]) > kSlack;
  }

  // Whether one of them is near its row's maximum so far or above it, as all are that exceed.
  __device__ __forceinline__ bool Nears(const float (&largest)[2]) const {
    return largest[0] >= near[0] || largest[1] >= near[1];
  }

  // Adds a tile's scores to the two largest of both rows.  All lanes of the warp call it
  // where one of them nears: what is left out is near no later maximum either.
  template <int kScores>
  __device__ __forceinline__ void AddNear(const float (&s)[kScores], const float (&largest)[2], float window) {
#pragma unroll
    for (int r = 0; r < 2; ++r) near[r] = fmaxf(near[r], LeastNear(QuadMax(largest[r]), window));
    AddTopTwo(s, top);
  }

  // Moves the anchors up and returns in `rescale` what the accumulators must be
  // multiplied with, powers of two <= 1.  `largest`: at least those of this tile, at most
  // all so far.  All lanes of the quad call it.
  __device__ __forceinline__ void Move(const float (&largest)[2], float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = fmaxf(anchor[r], ceilf(QuadMax(largest[r]) * scale_log2));
      rescale[r] = Exp2(anchor[r] - next);
      if constexpr (kCounted) {
        weighted[r] = rescale[r] > 0.f ? rescale[r] * fmaf(sum[r], anchor[r] - next, weighted[r]) : 0.f;
      }
      anchor[r] = next;
      sum[r] *= rescale[r];
    }
  }

  // The anchors for Exponentials().  zero: PairRegisters().
  __device__ __forceinline__ void PairAnchors(float (&paired)[2], uint32_t zero) const {
    paired[0] = anchor[0];
    paired[1] = anchor[1];
    PairRegisters(paired[0], paired[1], zero);
  }

  // Turns scores into probabilities, pairs of which are ready for Probabilities().
  template <int kScores>
  __device__ __forceinline__ void Exponentials(float (&s)[kScores], float scale_log2, uint32_t zero) {
    float paired[2];
    PairAnchors(paired, zero);
    Exponentials(s, scale_log2, paired);
  }
  template <int kScores>
  __device__ __forceinline__ void Exponentials(float (&s)[kScores], float scale_log2, const float (&paired)[2]) {
    float tile_sum[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      const float x = fmaf(s[i], scale_log2, -paired[r]), y = fmaf(s[i + 1], scale_log2, -paired[r]);
      s[i] = Exp2(x);
      s[i + 1] = Exp2(y);
      tile_sum[r] += s[i];
      tile_sum[r] += s[i + 1];
      if constexpr (kCounted) {  // 2^-200 is 0 here, and 0 times -inf were not.
        weighted[r] = fmaf(s[i], fmaxf(x, -200.f), weighted[r]);
        weighted[r] = fmaf(s[i + 1], fmaxf(y, -200.f), weighted[r]);
      }
    }
    sum[0] += tile_sum[0];
    sum[1] += tile_sum[1];
  }

  template <int kScores>
  static __device__ __forceinline__ void Probabilities(const float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
    PackPairs<T>(s, p);
  }

  // After the tile of key 0, which comes last.
  template <int kScores>
  __device__ __forceinline__ void KeepFirstKey(const float (&p)[kScores]) {
    first_key[0] = p[0];
    first_key[1] = p[2];
  }

  // All four lanes of the quad call it and get the same.  The caller divides.
  __device__ __forceinline__ FinishedRow Finish(int r, float scale_log2) const {
    FinishedRow row = FinishRow(anchor[r], anchor[r], QuadSum(sum[r]));
    row.max = (kCounted ? QuadMax(top[r].first) : max[r]) * scale_log2;
    return row;
  }
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_STANDING_ROWS_CUH_
