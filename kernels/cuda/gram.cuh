// gram.cuh: the Gram matrix W W^T of one head's weights, by one block.
//
// Tiles of 128 x 128 of it; 64 columns of W at a time (32 in fp32, so that two blocks fit a
// multiprocessor) pass through shared memory, two stages deep.  Each of 8 warps owns 32 x 64 of a tile.  16-bit weights
// are multiplied as they are; fp32 ones as the sum of two bf16.  The product of the two small parts counts on the
// diagonal alone, where it is never negative: 3e-6 of it, and elsewhere noise below 1e-6 of the trace.  Tensor cores
// truncate what they add, so after 256 columns their sums are added to the matrix, which rounds to nearest.

#ifndef BELLWETHER_KERNELS_CUDA_GRAM_CUH_
#define BELLWETHER_KERNELS_CUDA_GRAM_CUH_

#include <algorithm>
#include <cstring>

#include "bellwether/kernels/spectral.h"
#include "cuda/mma.cuh"

namespace bellwether::kernels::cuda {

inline constexpr int kGramThreads = 256;
inline constexpr int kGramTile = 128;   // rows and columns of the Gram matrix
inline constexpr int kGramFlush = 256;  // columns: then tensor cores' sums are added
inline constexpr int kGramStages = 2;

template <class Element>
struct GramShape {
  static constexpr bool kSplit = sizeof(Element) == 4;
  static constexpr int kColumns = kSplit ? 32 : 64;  // of W at a time
  // Eight rows' fragments lie in different banks: of 16 bytes by ldmatrix, of 8 by pairs.
  static constexpr int kPitch = kColumns * int{sizeof(Element)} + (kSplit ? 32 : 16);  // bytes
  static constexpr int kOperandBytes = kGramTile * kPitch;
  static constexpr int StageBytes(int rows) { return kOperandBytes * (rows > kGramTile ? 2 : 1); }
};

// A fragment register is two neighbouring columns; `small` is what bf16 leaves of fp32.
template <int kCount, bool kSplit>
struct Fragment {
  unsigned large[kCount];
  unsigned small[kSplit ? kCount : 1];
};

// x = large + small + 2^-17 x.
__device__ __forceinline__ void Split(float2 x, unsigned* large, unsigned* small) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(x.x, x.y);
  const float2 rest = {x.x - __low2float(high), x.y - __high2float(high)};
  const __nv_bfloat162 low = __floats2bfloat162_rn(rest.x, rest.y);
  memcpy(large, &high, sizeof(*large));
  memcpy(small, &low, sizeof(*small));
}

// 16 rows x 16 columns.  As A of an mma: registers 0-3.  As B of two: rows 0-7 are
// registers 0 and 2, rows 8-15 are 1 and 3.
template <class Element>
__device__ __forceinline__ void LoadFragment(const unsigned char* rows, int column,
                                             Fragment<4, GramShape<Element>::kSplit>& out) {
  constexpr int kPitch = GramShape<Element>::kPitch;
  const int lane = threadIdx.x % 32;
  if constexpr (GramShape<Element>::kSplit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned char* const at = rows + (lane / 4 + i % 2 * 8) * kPitch +
                                      (column + 2 * (lane % 4) + i / 2 * 8) * int{sizeof(float)};
      Split(*reinterpret_cast<const float2*>(at), &out.large[i], &out.small[i]);
    }
  } else {
    LoadMatrices(rows + (lane % 8 + lane / 8 % 2 * 8) * kPitch +
                     (column + lane / 16 * 8) * int{sizeof(Element)},
                 out.large);
  }
}

// Rows [first_row, first_row + 128) and kColumns columns of a head, zeros beyond W.
// With `vectorized` the copies are asynchronous and not yet committed.
template <class Element>
__device__ __forceinline__ void LoadWeights(const SpectralParams& p, const Element* weight, int first_row,
                                            int64_t first_column, bool vectorized, unsigned char* to) {
  constexpr int kPitch = GramShape<Element>::kPitch, kColumns = GramShape<Element>::kColumns;
  constexpr int kWidth = kVectorBytes / sizeof(Element), kChunks = kColumns / kWidth;
  if (vectorized) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kGramTile * kChunks; i += kGramThreads) {
      const int r = i / kChunks, c = i % kChunks * kWidth;
      const int64_t left = p.columns - first_column - c;
      const bool there = first_row + r < p.rows && left > 0;
      const Element* const from =
          there ? weight + (first_row + r) * p.row_stride + first_column + c : weight;
      const int count = there ? static_cast<int>(left < kWidth ? left : kWidth) : 0;
      CopyAsync16(to + r * kPitch + c * int{sizeof(Element)}, from, count * int{sizeof(Element)});
    }
    return;
  }
  const bool down = p.row_stride == 1;  // Neighbouring threads read neighbouring elements.
  for (int i = threadIdx.x; i < kGramTile * kColumns; i += kGramThreads) {
    const int r = down ? i % kGramTile : i / kColumns;
    const int c = down ? i / kGramTile : i % kColumns;
    const int64_t column = first_column + c;
    Element x(0.f);
    if (first_row + r < p.rows && column < p.columns) {
      x = weight[(first_row + r) * p.row_stride + column * p.column_stride];
    }
    *reinterpret_cast<Element*>(to + r * kPitch + c * int{sizeof(Element)}) = x;
  }
}

// One tile of the matrix at gram [rows][stride], which it overwrites, and its mirror image.
template <class Element>
__device__ __forceinline__ void ComputeGramTile(const SpectralParams& p, const Element* weight,
                                                bool vectorized, int first_i, int first_j,
                                                unsigned char* stages, float* gram, int stride) {
  using Shape = GramShape<Element>;
  constexpr bool kSplit = Shape::kSplit;
  constexpr int kFlush = kGramFlush / Shape::kColumns;  // chunks
  using Compute = std::conditional_t<kSplit, __nv_bfloat16, Element>;
  const int rows = static_cast<int>(p.rows), stage_bytes = Shape::StageBytes(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int my_i = warp / 2 * 32, my_j = warp % 2 * 64;
  const bool active = first_i + my_i < rows && first_j + my_j < rows;
  const int blocks_j = min(8, (rows - first_j - my_j + 7) / 8);  // of 8, that exist
  const bool diagonal = first_i == first_j;
  const int64_t chunks = (p.columns + Shape::kColumns - 1) / Shape::kColumns;

  const auto load = [&](int64_t chunk) {
    unsigned char* const stage = stages + chunk % kGramStages * stage_bytes;
    LoadWeights(p, weight, first_i, chunk * Shape::kColumns, vectorized, stage);
    if (!diagonal) {
      LoadWeights(p, weight, first_j, chunk * Shape::kColumns, vectorized, stage + Shape::kOperandBytes);
    }
    CommitCopies();
  };
  float sum[2][8][4] = {};
  load(0);
#pragma unroll 1
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      load(chunk + 1);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    if (active) {
      const unsigned char* const a_rows = stages + chunk % kGramStages * stage_bytes;
      const unsigned char* const b_rows = diagonal ? a_rows : a_rows + Shape::kOperandBytes;
#pragma unroll 1
      for (int column = 0; column < Shape::kColumns; column += kStepChannels) {
        Fragment<4, kSplit> a[2];
        LoadFragment<Element>(a_rows + my_i * Shape::kPitch, column, a[0]);
        LoadFragment<Element>(a_rows + (my_i + 16) * Shape::kPitch, column, a[1]);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          if (2 * pair >= blocks_j) break;
          Fragment<4, kSplit> b;
          LoadFragment<Element>(b_rows + (my_j + 16 * pair) * Shape::kPitch, column, b);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float(&out)[4] = sum[i][2 * pair + half];
              if constexpr (kSplit) {
                if (diagonal && my_i + 16 * i == my_j + 16 * pair) {
                  MultiplyAdd<Compute>(a[i].small, b.small[half], b.small[half + 2], out);
                }
                MultiplyAdd<Compute>(a[i].small, b.large[half], b.large[half + 2], out);
                MultiplyAdd<Compute>(a[i].large, b.small[half], b.small[half + 2], out);
              }
              MultiplyAdd<Compute>(a[i].large, b.large[half], b.large[half + 2], out);
            }
          }
        }
      }
    }
    if (active && ((chunk + 1) % kFlush == 0 || chunk + 1 == chunks)) {
      const bool first = chunk < kFlush;
      // Places are worked out anew each time: kept over the loop they would not fit the registers.
      int row = my_i + lane / 4, column = my_j + 2 * (lane % 4);
      asm volatile("" : "+r"(row), "+r"(column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = first_i + row + 8 * i < rows;
        float* const at = gram + int64_t{first_i + row + 8 * i} * stride + first_j + column;
        float* const mirror = gram + int64_t{first_j + column} * stride + first_i + row + 8 * i;
#pragma unroll
        for (int block = 0; block < 8; ++block) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& mine = sum[i / 2][block][i % 2 * 2 + e];
            const int offset = 8 * block + e;
            if (there && first_j + column + offset < rows) {
              const float total = first ? mine : at[offset] + mine;
              at[offset] = total;
              if (!diagonal && chunk + 1 == chunks) mirror[int64_t{offset} * stride] = total;
            }
            mine = 0.f;
          }
        }
      }
    }
    __syncthreads();  // The stage is free.
  }
}

// gram [rows][stride], in shared or global memory.  All threads call it and see the result.
template <class Element>
__device__ __forceinline__ void ComputeGram(const SpectralParams& p, const Element* weight,
                                            bool vectorized, unsigned char* stages, float* gram,
                                            int stride) {
  for (int i = 0; i < p.rows; i += kGramTile) {
    for (int j = 0; j <= i; j += kGramTile) {
      ComputeGramTile(p, weight, vectorized, i, j, stages, gram, stride);
    }
  }
  __threadfence_block();
  __syncthreads();
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_GRAM_CUH_
