// store_rows.cuh: from the accumulators' layout to rows in global memory.

#ifndef BELLWETHER_KERNELS_CUDA_STORE_ROWS_CUH_
#define BELLWETHER_KERNELS_CUDA_STORE_ROWS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace bellwether::kernels::cuda {

// Columns that StoreRows takes for so many.
template <int kColumns>
inline constexpr int kStoredColumns = (kColumns + 31) / 32 * 32;

// Writes this warp's 16 rows of kColumns packed columns, a multiple of 32, from
// registers.  A 4 x 4 transpose inside each quad turns its pairs of columns
// into 16 bytes a lane, whole sectors a warp.  A null row is not written, nor
// are columns from `columns` on, a multiple of 8.
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

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_STORE_ROWS_CUH_
