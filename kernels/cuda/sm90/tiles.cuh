// tiles.cuh: what the forward and the backward do with tiles in the same way.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_TILES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_TILES_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// The stage and parity of a ring, advanced together by both sides.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Where the tensor maps of Q, dO (or K, V) have token 0 of one head of a sequence.
struct TileOrigin {
  int x, y, z, head;
};

__device__ __forceinline__ TileOrigin OriginOf(const SequenceParams& p, int sequence, int start, int length, int head) {
  constexpr int kEnd = 1 << 30;
  if (p.q_starts == nullptr) return {0, sequence, 0, head};
  return {kEnd - length, start + length, kEnd, head};
}

// A tile of `rows` tokens as kBoxes boxes of 64 channels.
template <int kBoxes>
__device__ __forceinline__ void LoadTile(uint32_t dst, const CUtensorMap* map, uint32_t bar, int rows,
                                         const TileOrigin& at, int token) {
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    TmaLoad5(dst + i * rows * 128, map, bar, i * 64, at.x + token, at.y, at.z, at.head);
  }
}

// Columns of ones, by which a product sums.  By all threads of the CTA, before a barrier.
template <class S>
__device__ __forceinline__ void StoreOnes(uint32_t to) {
  const uint32_t ones = PackPair<typename S::T>(1.f, 1.f);
  for (int i = threadIdx.x * 16; i < S::kOnesBytes; i += S::kThreads * 16) StoreShared4(to + i, ones);
  ProxyFence();
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_TILES_CUH_
