// tiles.cuh: what the forward and the backward do with tiles in the same way.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_TILES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_TILES_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/sm90/ptx.cuh"

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

// Writes this warp's 16 rows of kColumns packed columns from registers: a 4 x 4
// transpose inside each quad turns its pairs of columns into 16 bytes a lane,
// whole sectors a warp.  A null row is not written, nor are columns from
// `columns` on, a multiple of 8.
template <int kColumns, class Out>
__device__ __forceinline__ void StoreRows(const uint32_t (&words)[kColumns / 4], Out* row0, Out* row1, int columns,
                                          int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < kColumns / 4; i += 8) {  // 32 columns of both rows
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = words[i + 2 * j + r];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[j] : w[j + 1], 1);
        (odd ? w[j] : w[j + 1]) = got;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[j] : w[j + 2], 2);
        (high ? w[j] : w[j + 2]) = got;
      }
      Out* row = r == 0 ? row0 : row1;
      const int column = 4 * i + (lane & 3) * 8;
      if (row != nullptr && column < columns) {
        *reinterpret_cast<uint4*>(row + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_TILES_CUH_
