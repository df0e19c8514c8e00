// gram.cuh: the Gram matrix W W^T of one head's weights, by one block.
//
// It is computed in tiles of 128 x 128.  64 bytes of each row of W at a time
// pass through shared memory, five stages deep, with one barrier a stage.  Each
// of 8 warps owns 16 rows of a tile and multiplies them with blocks of 16 rows.
// A matrix that is one tile has its own block and the next three or four, round
// and round.  So every pair of blocks is multiplied once and the other half is
// the mirror image.  A tile of a larger matrix has all eight.
//
// 16-bit weights are multiplied as they are, fp32 ones as the sum of two bf16.
// The product of the two small parts counts on the diagonal alone, where it is
// never negative: 3e-6 of it, and elsewhere noise below 1e-6 of the trace.
// Tensor cores truncate what they add.  So after 256 columns their sums are
// added to the matrix, which rounds to nearest.

#ifndef BELLWETHER_KERNELS_CUDA_GRAM_CUH_
#define BELLWETHER_KERNELS_CUDA_GRAM_CUH_

#include <algorithm>
#include <cstring>

#include "bellwether/kernels/spectral.h"
#include "cuda/mma.cuh"

namespace bellwether::kernels::cuda {

inline constexpr int kGramThreads = 256;
inline constexpr int kGramTile = 128;  // rows and columns of the Gram matrix
inline constexpr int kGramBlock = 16;  // rows and columns that a warp multiplies at a time
inline constexpr int kGramBlocks = kGramTile / kGramBlock;
inline constexpr int kGramFlush = 256;  // columns: then tensor cores' sums are added
inline constexpr int kGramStages = 5;
inline constexpr int kGramPitch = 64;  // bytes of a row that a stage holds
static_assert(kGramBlocks == kGramThreads / 32, "a warp for each block of rows");

template <class Element>
struct GramShape {
  static constexpr bool kSplit = sizeof(Element) == 4;
  static constexpr int kColumns = kGramPitch / int{sizeof(Element)};  // of W at a time
  static constexpr int kOperandBytes = kGramTile * kGramPitch;
  static constexpr int StageBytes(int rows) { return kOperandBytes * (rows > kGramTile ? 2 : 1); }
};

// Where a stage has 16 bytes of a row that begin `byte` bytes into it: whole fragments of eight
// rows, of 16 bytes by ldmatrix or of 8 by pairs, lie in different banks.
__device__ __forceinline__ int GramSwizzle(int row) { return ((row & 2) | (row >> 2 & 1)) * 16; }
__device__ __forceinline__ int GramOffset(int row, int byte) { return row * kGramPitch + (byte ^ GramSwizzle(row)); }

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

// 16 rows x 16 columns; `rows` is a multiple of 8 rows into the stage.  As A of an mma: registers 0-3.  As B of two:
// rows 0-7 are registers 0 and 2, rows 8-15 are 1 and 3.
template <class Element>
__device__ __forceinline__ void LoadFragment(const unsigned char* rows, int column,
                                             Fragment<4, GramShape<Element>::kSplit>& out) {
  const int lane = threadIdx.x % 32;
  if constexpr (GramShape<Element>::kSplit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int byte = (column + 2 * (lane % 4) + i / 2 * 8) * int{sizeof(float)};
      const unsigned char* const at = rows + i % 2 * 8 * kGramPitch + GramOffset(lane / 4, byte);
      Split(*reinterpret_cast<const float2*>(at), &out.large[i], &out.small[i]);
    }
  } else {
    LoadMatrices(
        rows + lane / 8 % 2 * 8 * kGramPitch + GramOffset(lane % 8, (column + lane / 16 * 8) * int{sizeof(Element)}),
        out.large);
  }
}

// Rows [first_row, first_row + 128) and kColumns columns of a head, zeros beyond W.
// With `vectorized`, and of fp32 with any strides, the copies are asynchronous and not yet
// committed.  kAnew: places are worked out anew each time; kept over a loop they take registers.
template <bool kAnew, class Element>
__device__ __forceinline__ void LoadWeights(const SpectralParams& p, const Element* weight, int first_row,
                                            int64_t first_column, bool vectorized, unsigned char* to) {
  constexpr int kColumns = GramShape<Element>::kColumns;
  constexpr int kWidth = kVectorBytes / sizeof(Element), kChunks = kColumns / kWidth;
  constexpr int kRows = kGramThreads / kChunks;  // at once
  if (vectorized) {
    int thread = threadIdx.x;
    if constexpr (kAnew) asm volatile("" : "+r"(thread));
    const int row = thread / kChunks, c = thread % kChunks * kWidth;
    const int64_t left = p.columns - first_column - c;
    const int count = left < kWidth ? static_cast<int>(left < 0 ? 0 : left) : kWidth;
#pragma unroll
    for (int r = row; r < kGramTile; r += kRows) {
      const bool there = first_row + r < p.rows && count > 0;
      const Element* const from = there ? weight + (first_row + r) * p.row_stride + first_column + c : weight;
      CopyAsync16(to + GramOffset(r, c * int{sizeof(Element)}), from, there ? count * int{sizeof(Element)} : 0);
    }
    return;
  }
  const bool down = p.row_stride == 1;  // Neighbouring threads read neighbouring elements.
  for (int i = threadIdx.x; i < kGramTile * kColumns; i += kGramThreads) {
    int r = down ? i % kGramTile : i / kColumns;
    int c = down ? i / kGramTile : i % kColumns;
    if constexpr (sizeof(Element) == 4) {
      // A warp has 32 bytes of four columns each, which fill all banks once.
      const int lane = i % 32, part = i / 32;
      if (down) r = part % (kGramTile / 8) * 8 + lane % 8, c = part / (kGramTile / 8) * 4 + lane / 8;
    }
    const int64_t column = first_column + c;
    const bool there = first_row + r < p.rows && column < p.columns;
    const Element* const from = there ? weight + (first_row + r) * p.row_stride + column * p.column_stride : weight;
    unsigned char* const at = to + GramOffset(r, c * int{sizeof(Element)});
    if constexpr (sizeof(Element) == 4) {
      CopyAsync4(at, from, there ? 4 : 0);
    } else {
      *reinterpret_cast<Element*>(at) = there ? *from : Element(0.f);
    }
  }
}

// out[0] += a times the first 8 rows of b, out[1] the last; the terms of fp32 from the smallest
// on, one after the other for several products, so that none waits for the one before.
template <class Element, int kProducts, class Operand>
__device__ __forceinline__ void MultiplyBlocks(const Operand& a, const Operand (&b)[kProducts],
                                               float (*(&out)[kProducts])[4], bool squares) {
  using Compute = std::conditional_t<GramShape<Element>::kSplit, __nv_bfloat16, Element>;
  const auto multiply = [&](const auto& of_a, auto of_b) {
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned* const y = of_b(b[i]);
        MultiplyAdd<Compute>(of_a, y[half], y[half + 2], out[i][half]);
      }
    }
  };
  const auto large = [](const Operand& x) { return x.large; };
  if constexpr (GramShape<Element>::kSplit) {
    const auto small = [](const Operand& x) { return x.small; };
    if (squares) {  // of the first product
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        MultiplyAdd<Compute>(a.small, b[0].small[half], b[0].small[half + 2], out[0][half]);
      }
    }
    multiply(a.small, large);
    multiply(a.large, small);
  }
  multiply(a.large, large);
}

// One tile of the matrix at gram [rows][stride], which it overwrites, and its mirror image.
// kWhole: it is the whole matrix, which then has room for multiples of 16 rows and columns.
template <class Element, bool kWhole>
__device__ __forceinline__ void ComputeGramTile(const SpectralParams& p, const Element* weight, bool vectorized,
                                                int first_i, int first_j, unsigned char* stages, float* gram,
                                                int stride) {
  using Shape = GramShape<Element>;
  constexpr bool kSplit = Shape::kSplit;
  using Operand = Fragment<4, kSplit>;
  constexpr int kFlush = kGramFlush / Shape::kColumns;  // chunks
  constexpr int kProducts = kWhole ? kGramBlocks / 2 + 1 : kGramBlocks;
  constexpr int kAtOnce = kWhole || kSplit ? 2 : 1;  // as registers allow
  constexpr int kStageBytes = Shape::StageBytes(kWhole ? kGramTile : kGramTile + 1);
  const int rows = static_cast<int>(p.rows);
  const int warp = threadIdx.x / 32;
  const bool diagonal = kWhole || first_i == first_j;
  const bool active = first_i + kGramBlock * warp < rows;
  // Of two blocks half a round apart one has the other.
  const int products = kWhole && warp >= kGramBlocks / 2 ? kProducts - 1 : kProducts;
  const int chunks = static_cast<int>((p.columns + Shape::kColumns - 1) / Shape::kColumns);

  const auto load = [&](int chunk, int stage) {
    if (chunk < chunks) {
      unsigned char* const to = stages + stage * kStageBytes;
      const int64_t column = int64_t{chunk} * Shape::kColumns;
      LoadWeights<!kWhole>(p, weight, first_i, column, vectorized, to);
      if (!diagonal) LoadWeights<!kWhole>(p, weight, first_j, column, vectorized, to + Shape::kOperandBytes);
    }
    CommitCopies();  // Also an empty group, so that the number of groups shows which is there.
  };
  float sum[kProducts][2][4] = {};
  for (int stage = 0; stage < kGramStages - 1; ++stage) load(stage, stage);
  int stage = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    WaitForCopies<kGramStages - 2>();
    __syncthreads();  // All see this stage, and are through with the one before.
    load(chunk + kGramStages - 1, stage == 0 ? kGramStages - 1 : stage - 1);
    if (active) {
      const unsigned char* const a_rows = stages + stage * kStageBytes;
      const unsigned char* const b_rows = diagonal ? a_rows : a_rows + Shape::kOperandBytes;
      int mine = warp;
      if constexpr (!kWhole) asm volatile("" : "+r"(mine));
      const auto block = [&](const unsigned char* of, int next) {
        return of + (mine + next) % kGramBlocks * (kGramBlock * kGramPitch);
      };
#pragma unroll(kWhole ? Shape::kColumns / kStepChannels : 1)
      for (int column = 0; column < Shape::kColumns; column += kStepChannels) {
        Operand a;
        LoadFragment<Element>(block(a_rows, 0), column, a);
        const auto multiply = [&](auto count, int i) {
          Operand b[decltype(count)::value];
          float(*out[decltype(count)::value])[4];
#pragma unroll
          for (int j = 0; j < decltype(count)::value; ++j) {
            if (kWhole && i + j == 0) {
              b[j] = a;
            } else {
              LoadFragment<Element>(block(b_rows, i + j), column, b[j]);
            }
            out[j] = sum[i + j];
          }
          MultiplyBlocks<Element>(a, b, out, i == 0 && diagonal);
        };
#pragma unroll
        for (int i = 0; i + kAtOnce <= kProducts; i += kAtOnce) {
          multiply(std::integral_constant<int, kAtOnce>{}, i);
        }
        if (kProducts % kAtOnce != 0 && products == kProducts) {
          multiply(std::integral_constant<int, 1>{}, kProducts - 1);
        }
      }
    }
    const bool last = chunk + 1 == chunks;
    if (active && ((chunk + 1) % kFlush == 0 || last)) {
      const bool first = chunk < kFlush;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        // Places are worked out anew each time, block after block: more would not fit the registers.
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread)::"memory");
        const int lane = thread % 32, warp = thread / 32;
        const int row = first_i + kGramBlock * warp + lane / 4;
        const int first_column = first_j + (warp + i) % kGramBlocks * kGramBlock;
        const bool there = i < products && first_column < rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = first_column + 8 * half + 2 * (lane % 4);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float* const at = gram + int64_t{row + 8 * r} * stride + column;
            float* const mirror = gram + int64_t{column} * stride + row + 8 * r;
            float(&mine)[4] = sum[i][half];
            float2 total = {mine[2 * r], mine[2 * r + 1]};
            mine[2 * r] = mine[2 * r + 1] = 0.f;
            if (!there) continue;
            if constexpr (kWhole) {
              if (!first) {
                const float2 before = *reinterpret_cast<const float2*>(at);
                total = {before.x + total.x, before.y + total.y};
              }
              *reinterpret_cast<float2*>(at) = total;
              if (i > 0 && last) mirror[0] = total.x, mirror[stride] = total.y;
            } else if (row + 8 * r < rows) {
              const float totals[2] = {total.x, total.y};
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (column + e >= rows) continue;
                const float x = first ? totals[e] : at[e] + totals[e];
                at[e] = x;
                if (!diagonal && last) mirror[int64_t{e} * stride] = x;
              }
            }
          }
        }
      }
    }
    stage = stage + 1 == kGramStages ? 0 : stage + 1;
  }
  __syncthreads();  // The stages are free.
}

// gram [rows][stride].  kOneTile: of up to 128 rows; it has room for whole blocks.  All threads
// call it and see the result.
template <bool kOneTile, class Element>
__device__ __forceinline__ void ComputeGram(const SpectralParams& p, const Element* weight, bool vectorized,
                                            unsigned char* stages, float* gram, int stride) {
  if constexpr (kOneTile) {
    ComputeGramTile<Element, true>(p, weight, vectorized, 0, 0, stages, gram, stride);
  } else {
    for (int i = 0; i < p.rows; i += kGramTile) {
      for (int j = 0; j <= i; j += kGramTile) {
        ComputeGramTile<Element, false>(p, weight, vectorized, i, j, stages, gram, stride);
      }
    }
    __threadfence_block();
    __syncthreads();
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_GRAM_CUH_
