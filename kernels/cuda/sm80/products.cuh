// products.cuh: a warp's products of tiles, built from mma.cuh's.
//
// d[m] is the accumulator of the warp's m-th tile of 16 rows: d[m][4 j ... 4 j + 3]
// are its columns 8 j to 8 j + 7.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_PRODUCTS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_PRODUCTS_CUH_

#include "cuda/sm80/shared_tile.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm80 {

template <int kElements>
using RowsReader = TileReader<kElements, LaneOrder::kRowsFirst>;
template <int kElements>
using ColumnsReader = TileReader<kElements, LaneOrder::kChunksFirst>;

// D = A B^T over kElements; both have them as columns.  B's rows begin at `b_row`.
template <class T, int kElements, int kUnroll = kElements / 16, int kTiles, int kCount>
__device__ __forceinline__ void InnerProduct(float (&d)[kTiles][kCount], const RowsReader<kElements>& a,
                                             const ColumnsReader<kElements>& b, int b_row) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[m][i] = 0.f;
  }
#pragma unroll kUnroll
  for (int k = 0; k < kElements / 16; ++k) {
    uint32_t left[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) a.template Load<false>(left[m], 16 * m, 2 * k);
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      uint32_t right[4];
      b.template Load<false>(right, b_row + 16 * j, 2 * k);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        Mma<T>(&d[m][8 * j], left[m], right[0], right[1]);
        Mma<T>(&d[m][8 * j + 4], left[m], right[2], right[3]);
      }
    }
  }
}

// D += A B of one step of 16 rows of B, which begin at `b_row`; kColumns columns.
template <class T, int kColumns, int kElements, int kTiles, int kCount>
__device__ __forceinline__ void OuterStep(float (&d)[kTiles][kCount], const uint32_t (&a)[kTiles][4],
                                          const RowsReader<kElements>& b, int b_row, int b_chunk = 0) {
#pragma unroll
  for (int j = 0; j < kColumns / 16; ++j) {
    uint32_t right[4];
    b.template Load<true>(right, b_row, b_chunk + 2 * j);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      Mma<T>(&d[m][8 * j], a[m], right[0], right[1]);
      Mma<T>(&d[m][8 * j + 4], a[m], right[2], right[3]);
    }
  }
}

// The sums of A's rows, in every column.
template <class T, int kTiles, int kCount>
__device__ __forceinline__ void SumStep(float (&d)[kTiles][kCount], int at, const uint32_t (&a)[kTiles][4]) {
  const uint32_t ones = PackPair<T>(1.f, 1.f);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) Mma<T>(&d[m][at], a[m], ones, ones);
}

// The A of a step that is 16 columns of accumulators, packed.
template <int kTiles, int kCount>
__device__ __forceinline__ void StepOf(const uint32_t (&packed)[kTiles][kCount], int step, uint32_t (&a)[kTiles][4]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[m][i] = packed[m][4 * step + i];
  }
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_PRODUCTS_CUH_
