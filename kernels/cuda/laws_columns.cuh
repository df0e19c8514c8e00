// laws_columns.cuh: of each sequence and head, what rounding its stored elements may have added to the
// laws, and how large its rows are; from what laws_pairs.cuh found.
//
// Elements of a column that are the same are rounded alike: attention_laws.h says how that counts.

#ifndef BELLWETHER_KERNELS_CUDA_LAWS_COLUMNS_CUH_
#define BELLWETHER_KERNELS_CUDA_LAWS_COLUMNS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/block_sum.cuh"
#include "cuda/laws_pairs.cuh"

namespace bellwether::kernels::cuda {

// Sums over rows of powers of their sizes.
enum LawSize : int {
  kSizeQdo = 0,  // |q| |dO|
  kSizeQdo2,     // its square
  kSizeQdo4,
  kSizeDo,  // |dO|
  kSizeDo2,
  kSizeDo4,
  kLawSizeCount
};

// A sequence and query head, or key head: the first two in units of kVarianceOfBase.
struct LawHead {
  double plain;     // dk, dv: of the elements
  double partners;  // of the elements times those of the other tensor
  double product;   // of both tensors
};

struct LawHeadsParams {
  LawPairsParams pairs;
  LawHead* heads[static_cast<int>(PairOf::kCount)];  // [batch][heads or kv_heads]
  double* sizes;                                     // [batch][heads][kLawSizeCount]
};

__device__ __forceinline__ void RowSizes(const LawPairsParams& pairs, int64_t sequence_head, int64_t row,
                                         double (&sizes)[kLawSizeCount]) {
  const int64_t all = pairs.p.batch * pairs.p.heads * pairs.p.q_len, at = sequence_head * pairs.p.q_len + row;
  double q = 0, d_o = 0;
  for (int s = 0; s < pairs.pairs[static_cast<int>(PairOf::kQueries)].slices; ++s) {
    q += static_cast<double>(pairs.q_sizes[s * all + at]);
  }
  for (int s = 0; s < pairs.pairs[static_cast<int>(PairOf::kOutputs)].slices; ++s) {
    d_o += static_cast<double>(pairs.do_sizes[s * all + at]);
  }
  const double both = q * d_o;
  sizes[kSizeQdo] = sqrt(both);
  sizes[kSizeQdo2] = both;
  sizes[kSizeQdo4] = both * both;
  sizes[kSizeDo] = sqrt(d_o);
  sizes[kSizeDo2] = d_o;
  sizes[kSizeDo4] = d_o * d_o;
}

__device__ __forceinline__ LawHead SumColumns(const LawPairsParams& kernel, PairOf which, int64_t sequence_head,
                                              double* scratch) {
  const LawPair& pair = kernel.pairs[static_cast<int>(which)];
  double plain = 0, partners = 0;
  for (int channel = threadIdx.x; channel < pair.dim; channel += kLawThreads) {
    const int slice = channel / kernel.held, in_slice = channel % kernel.held;
    const int64_t block = pair.first_block + (sequence_head * pair.slices + slice) * pair.chunks;
    const float* const at = kernel.columns + block * kLawColumnCount * kernel.held + in_slice;
    double sums[kLawColumnCount] = {};
#pragma unroll 2
    for (int chunk = 0; chunk < pair.chunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kLawColumnCount; ++i) {
        sums[i] += static_cast<double>(at[(int64_t{chunk} * kLawColumnCount + i) * kernel.held]);
      }
    }
    const double share = sums[kColumnNonzero] > 0 ? sums[kColumnEqual] / sums[kColumnNonzero] : 0;
    const double whole = fmin(fmax((share - kLawSameFrom) / (kLawSameTo - kLawSameFrom), 0.), 1.);
    const double alike = fmax(whole, share * share);  // One run of all that are the same, at most.
    plain += (1 - alike) * sums[kColumnSquares] + alike * sums[kColumnBases] * sums[kColumnBases];
    partners += (1 - alike) * sums[kColumnPartSquares] + alike * sums[kColumnParts] * sums[kColumnParts];
  }
  double product = 0;
  const int64_t of_head = int64_t{pair.slices} * pair.chunks, first = pair.first_block + sequence_head * of_head;
  for (int64_t block = first + threadIdx.x; block < first + of_head; block += kLawThreads) {
    product += kernel.sums[block * kLawSumCount + kLawDot];
  }
  return {SumOverBlock(plain, scratch), SumOverBlock(partners, scratch), SumOverBlock(product, scratch)};
}

// Grid: [batch * kv_heads + batch * heads].  Block: kLawThreads.
static __global__ void __launch_bounds__(kLawThreads, 3) LawHeadsKernel(const __grid_constant__ LawHeadsParams kernel) {
  __shared__ double scratch[kLawWarps];
  const ProbeParams& p = kernel.pairs.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const int64_t of_keys = p.batch * p.kv_heads;
  const bool keys = blockIdx.x < of_keys;
  const int64_t at = keys ? blockIdx.x : blockIdx.x - of_keys;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const auto which =
        static_cast<PairOf>(i + (keys ? static_cast<int>(PairOf::kKeys) : static_cast<int>(PairOf::kQueries)));
    const LawHead found = SumColumns(kernel.pairs, which, at, scratch);
    if (threadIdx.x == 0) kernel.heads[static_cast<int>(which)][at] = found;
  }
  if (keys) return;
  double sums[kLawSizeCount] = {};
  for (int64_t row = threadIdx.x; row < p.q_len; row += kLawThreads) {
    double of_row[kLawSizeCount];
    RowSizes(kernel.pairs, at, row, of_row);
#pragma unroll
    for (int i = 0; i < kLawSizeCount; ++i) sums[i] += of_row[i];
  }
#pragma unroll
  for (int i = 0; i < kLawSizeCount; ++i) {
    const double sum = SumOverBlock(sums[i], scratch);
    if (threadIdx.x == 0) kernel.sizes[at * kLawSizeCount + i] = sum;
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAWS_COLUMNS_CUH_
