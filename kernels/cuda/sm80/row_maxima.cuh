// row_maxima.cuh: the largest score of each row, in one register a thread.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ROW_MAXIMA_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ROW_MAXIMA_CUH_

#include <cuda_runtime.h>

#include <cmath>

namespace bellwether::kernels::cuda::sm80 {

// The largest score of each row of a warp's tiles, in units of s.  A lane keeps it of one
// of the quad's rows: four registers, one for each, would cost 3 to 4 % at head dim 128.
template <int kTiles>
struct RowMaxima {
  static_assert(kTiles <= 2);
  float kept = -INFINITY;  // of tile m and row r in the quad's lane 2 m + r

  // `largest`: of StandingRows::Largest().  All lanes of the warp call it.
  __device__ __forceinline__ void Add(const float (&largest)[kTiles][2], int lane) {
    const bool last_tile = kTiles == 2 && (lane & 2) != 0, last_row = (lane & 1) != 0;
    // A lane gives its partner what that keeps.
    float row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float first = largest[0][r], last = largest[kTiles - 1][r];
      row[r] = fmaxf(last_tile ? last : first, __shfl_xor_sync(0xffffffffu, last_tile ? first : last, 2));
    }
    const float given = __shfl_xor_sync(0xffffffffu, last_row ? row[0] : row[1], 1);
    kept = fmaxf(kept, fmaxf(last_row ? row[1] : row[0], given));
  }

  // The same in all lanes of the quad.
  __device__ __forceinline__ float Of(int m, int r) const { return __shfl_sync(0xffffffffu, kept, 2 * m + r, 4); }
};

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ROW_MAXIMA_CUH_
