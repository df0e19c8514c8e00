// top_two.cuh: the two largest scores of a row, for the statistics of ties.
//
// Each thread keeps those of its own part of a row.  Whether two scores tie matters
// only near the row's maximum, within any eps used here or where bf16 rounds both
// alike, and a thread has a score there in few tiles.  So the two are looked for only
// where a vote says that some row's maximum is near.

#ifndef BELLWETHER_KERNELS_CUDA_TOP_TWO_CUH_
#define BELLWETHER_KERNELS_CUDA_TOP_TWO_CUH_

#include <cuda_runtime.h>

#include <cmath>

namespace bellwether::kernels::cuda {

// -inf where there are fewer.
struct TopTwo {
  float first = -INFINITY, second = -INFINITY;

  __device__ __forceinline__ void Add(const TopTwo& other) {
    second = fmaxf(fmaxf(second, other.second), fminf(first, other.first));
    first = fmaxf(first, other.first);
  }
  __device__ __forceinline__ TopTwo OfQuad() const {
    TopTwo t = *this;
#pragma unroll
    for (int i = 1; i <= 2; i *= 2) {
      t.Add({__shfl_xor_sync(0xffffffffu, t.first, i), __shfl_xor_sync(0xffffffffu, t.second, i)});
    }
    return t;
  }
};

// The least score that can tie with a row's maximum: `window` below it, or where bf16
// is coarser 2^-7 of it.
__device__ __forceinline__ float LeastNear(float max, float window) {
  return fminf(max - window, fmaf(fabsf(max), -0.0078125f, max));
}

// The two largest of row r's eight scores among s[0..16), which the accumulators'
// layout gives a thread.
__device__ __forceinline__ TopTwo TopTwoOfChunk(const float* s, int r) {
  TopTwo pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = s[4 * i + 2 * r], b = s[4 * i + 2 * r + 1];
    pairs[i] = {fmaxf(a, b), fminf(a, b)};
  }
  pairs[0].Add(pairs[1]);
  pairs[2].Add(pairs[3]);
  pairs[0].Add(pairs[2]);
  return pairs[0];
}

// Adds a tile's scores to the two largest of both rows.
template <int kScores>
__device__ __forceinline__ void AddTopTwo(const float (&s)[kScores], TopTwo (&top)[2]) {
#pragma unroll
  for (int c = 0; c < kScores / 16; ++c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r].Add(TopTwoOfChunk(s + 16 * c, r));
  }
}

// The same if a lane of the warp has one from `least` on; else the largest alone, which is
// `tile_max`.  All lanes of the warp call it.
template <int kScores>
__device__ __forceinline__ void AddIfNear(const float (&s)[kScores], const float (&tile_max)[2],
                                          const float (&least)[2], TopTwo (&top)[2]) {
  if (__any_sync(0xffffffffu, tile_max[0] >= least[0] || tile_max[1] >= least[1])) AddTopTwo(s, top);
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r].first = fmaxf(top[r].first, tile_max[r]);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_TOP_TWO_CUH_
