// laws_pairs.cuh: one pass over the eight tensors of a call of attention.
//
// They come in pairs: dk with k, dv with v, dq with q, dO with o.  A block has some tokens of a pair's
// sequence and head, and some channels where they are more than 32 lanes hold.  It adds up products,
// elements, absolute values and squares.  Channels become projections at once.  Of columns
// laws_columns.cuh makes what rounding may have added.
//
// Numerics  a lane adds up to 32 tokens in fp32, the rest is double.
// Memory    each tensor once, 16 bytes a load where its layout allows that; a group of lanes has
//           neighbouring tokens, since a column's elements are compared with the ones before them.

#ifndef BELLWETHER_KERNELS_CUDA_LAWS_PAIRS_CUH_
#define BELLWETHER_KERNELS_CUDA_LAWS_PAIRS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "bellwether/kernels/attention_laws.h"
#include "cuda/block_sum.cuh"
#include "cuda/launch.h"
#include "cuda/laws_rounding.cuh"
#include "cuda/probe_mask.cuh"
#include "probe_sampling.h"

namespace bellwether::kernels::cuda {

inline constexpr int kLawThreads = 256;
inline constexpr int kLawWarps = kLawThreads / 32;

// Numbers of a block.
enum LawSum : int {
  kLawProjection = 0,         // of the graded elements' sum over tokens
  kLawDot = kLawProjections,  // graded . partner
  kLawTotal,                  // of the graded elements
  kLawAbs,
  kLawSquares,
  kLawNonfinite,
  kLawLeftOut,  // rows
  kLawUnknown,  // |dO| of rows of which a mask by sample does not say whether they see a key
  kLawSumCount = 16
};

// Of a column, by block.  Elements are the graded tensor's, of dO with o those of o; bases as in
// laws_rounding.cuh; c is the other tensor's element.
enum LawColumn : int {
  kColumnBases = 0,  // sum of bases
  kColumnSquares,    // sum of their squares
  kColumnParts,      // sum c base
  kColumnPartSquares,
  kColumnEqual,  // elements that equal the one before and are not 0
  kColumnNonzero,
  kLawColumnCount
};

enum class PairOf : int { kKeys = 0, kValues, kQueries, kOutputs, kCount };

// Where the blocks of a pair are, and what they share.
struct LawPair {
  Tensor4 graded, partner;
  int64_t heads, tokens, first_block;
  int dim, slices, chunks, lanes;
};

struct LawPairsParams {
  ProbeParams p;
  LawPair pairs[static_cast<int>(PairOf::kCount)];
  int of_thread;    // tokens
  int held;         // channels of a block: 32 vectors
  double* sums;     // [blocks][kLawSumCount]
  float* columns;   // [blocks][kLawColumnCount][held]
  float* q_sizes;   // [slices][batch][heads][q_len], |q_T|^2
  float* do_sizes;  // the same of dO
};

template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) LawVector {
  Element at[kWidth];
};

// Whether the mask leaves a row no key.  Lanes `group` of a warp ask for the same row together.
__device__ __forceinline__ bool SeesNothing(const ProbeParams& p, int64_t batch, int64_t head, int64_t row,
                                            int64_t mask_row, int lane, int lanes, unsigned group) {
  const KeyRange keys = AllowedKeys(p, batch, row);
  if (keys.begin >= keys.end) return true;
  if (p.mask.data == nullptr) return false;
  const int64_t at = MaskRowAt(p.mask, batch, head, mask_row);
  for (int64_t key = keys.begin; key < keys.end; key += lanes) {
    const bool seen = key + lane < keys.end && BiasAt(p.mask, at + (key + lane) * p.mask.key_stride) != -INFINITY;
    if (__any_sync(group, seen)) return false;
  }
  return true;
}

enum class RowOutput : int { kCounts, kBlank, kLeftOut, kUnknown };

// What a row's output is, of all lanes of the group.
template <class Element>
__device__ __forceinline__ RowOutput OutputIs(const ProbeParams& p, int64_t batch, int64_t head, int64_t row, int lane,
                                              int lanes, unsigned group) {
  const auto* const o = static_cast<const Element*>(p.o.data) + batch * p.o.batch_stride + head * p.o.head_stride +
                        row * p.o.token_stride;
  bool nonzero = false, nonfinite = false;
  for (int64_t c = lane; c < p.v_dim; c += lanes) {
    const float x = static_cast<float>(o[c]);
    nonzero |= x != 0.f;
    nonfinite |= !isfinite(x);
  }
  if (__any_sync(group, nonfinite)) return RowOutput::kLeftOut;
  return __any_sync(group, nonzero) ? RowOutput::kCounts : RowOutput::kBlank;
}

// What becomes of a row whose output is 0 in these channels, or not finite: its weight is 1, or it has
// none, or it is NaN and left out.
template <class Element>
__device__ __noinline__ RowOutput OutputOf(const ProbeParams& p, int64_t batch, int64_t head, int64_t row, int lane,
                                           int lanes, unsigned group) {
  const RowOutput output = OutputIs<Element>(p, batch, head, row, lane, lanes, group);
  if (output == RowOutput::kCounts) return output;
  const KeyRange keys = AllowedKeys(p, batch, row);
  if (p.mask.data != nullptr && p.mask.by_sample && SampledRows(p) != p.q_len && keys.begin < keys.end) {
    return output == RowOutput::kBlank ? RowOutput::kUnknown : output;
  }
  return SeesNothing(p, batch, head, row, row, lane, lanes, group) ? output : RowOutput::kCounts;
}

// The sums of one lane.
template <int kWidth>
struct LaneSums {
  float channel[kWidth] = {};
  float column[kColumnEqual][kWidth] = {};
  unsigned equal_nonzero[kWidth] = {};  // two counts: 16 bits each
  float dot = 0, total = 0, absolute = 0, squares = 0;
  int nonfinite = 0, left_out = 0;
  float unknown = 0;
};

// Adds the tokens of a block.  Of dk and dv channels and all of a column; of dq and dO with o, what is a
// part of A3 and A4.
template <class Element, int kWidth, PairOf kPair>
__device__ __forceinline__ void AddPairs(const LawPairsParams& kernel, const LawPair& pair, int64_t batch, int64_t head,
                                         int slice, int chunk, LaneSums<kWidth>& sums) {
  constexpr int kAtOnce = 2;
  constexpr bool kOutputs = kPair == PairOf::kOutputs, kQueries = kPair == PairOf::kQueries;
  constexpr bool kOfKeys = !kOutputs && !kQueries;
  using Vector = LawVector<Element, kWidth>;
  const int lanes = pair.lanes, lane = threadIdx.x % lanes;
  const unsigned group = lanes == 32 ? ~0u : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  const int channel = (slice * 32 + lane) * kWidth;  // With more slices than one there are 32 lanes.
  const bool has = channel < pair.dim;
  const auto place = [&](const Tensor4& t) {
    return static_cast<const Element*>(t.data) + batch * t.batch_stride + head * t.head_stride + channel;
  };
  const Element* const graded = place(pair.graded);
  const Element* const partner = place(pair.partner);
  const int64_t begin = (int64_t{chunk} * (kLawThreads / lanes) + threadIdx.x / lanes) * kernel.of_thread;
  // What a pair of elements adds; `equal` is the element before.
  const auto add_product = [&](int c, float a, float b, float equal, bool counts) {
    const float element = kOutputs ? b : a, other = kOutputs ? a : b;
    sums.dot = fmaf(a, b, sums.dot);
    if (!kQueries && counts) sums.channel[c] += a;
    const float base = BaseOf<Element>(element), part = base * other;
    if (kOfKeys) {
      sums.column[kColumnBases][c] += base;
      sums.column[kColumnSquares][c] = fmaf(base, base, sums.column[kColumnSquares][c]);
    }
    sums.column[kColumnParts][c] += part;
    sums.column[kColumnPartSquares][c] = fmaf(part, part, sums.column[kColumnPartSquares][c]);
    if (element != 0.f) {
      sums.equal_nonzero[c] += element == equal ? 0x10001u : 1u;
    }
  };
  const auto elements_before = [&](int64_t row, float(&to)[kWidth]) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c) to[c] = NAN;  // It equals nothing.
    if (!has || row <= 0 || row >= pair.tokens) return;
    const Element* const from =
        kOutputs ? partner + (row - 1) * pair.partner.token_stride : graded + (row - 1) * pair.graded.token_stride;
    const Vector x = *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) to[c] = static_cast<float>(x.at[c]);
  };
  float before[kWidth];
  elements_before(begin, before);
  for (int step = 0; step < kernel.of_thread; step += kAtOnce) {
    Vector x[kAtOnce] = {}, y[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t row = begin + step + i;
      if (!has || row >= pair.tokens) continue;
      x[i] = *reinterpret_cast<const Vector*>(graded + row * pair.graded.token_stride);
      y[i] = *reinterpret_cast<const Vector*>(partner + row * pair.partner.token_stride);
    }
    unsigned odd = 0;  // Rows whose output is 0 or not finite; of dq, not finite.
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t row = begin + step + i;
      const bool there = row < pair.tokens;  // Alike for the lanes of a group.
      float of_graded = 0, of_partner = 0;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const float a = static_cast<float>(x[i].at[c]), b = static_cast<float>(y[i].at[c]);
        sums.absolute += fabsf(a);
        of_graded = fmaf(a, a, of_graded);
        if (!kOfKeys) of_partner = fmaf(b, b, of_partner);
        if (!kOfKeys) sums.total += a;
      }
      sums.squares += of_graded;
      if (!isfinite(of_graded)) {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) sums.nonfinite += !isfinite(static_cast<float>(x[i].at[c]));
      }
      bool is_odd = false;
      if constexpr (!kOfKeys) {
        const float looked_at = kOutputs ? of_partner : of_graded;
        const unsigned nonzero = __ballot_sync(~0u, looked_at != 0.f);
        const unsigned nonfinite = __ballot_sync(~0u, !isfinite(looked_at));
        is_odd = there && ((kOutputs && (nonzero & group) == 0) || (nonfinite & group) != 0);
        odd |= static_cast<unsigned>(is_odd) << i;
        float size = kOutputs ? of_graded : of_partner;
        for (int offset = 1; offset < lanes; offset *= 2) size += __shfl_xor_sync(0xffffffffu, size, offset);
        if (lane == 0 && there) {
          float* const sizes = kOutputs ? kernel.do_sizes : kernel.q_sizes;
          sizes[((slice * kernel.p.batch + batch) * pair.heads + head) * pair.tokens + row] = size;
        }
      }
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const float a = static_cast<float>(x[i].at[c]), b = static_cast<float>(y[i].at[c]);
        if (has && there && !is_odd) add_product(c, a, b, before[c], true);
        before[c] = kOutputs ? b : a;
      }
    }
    if (!kOfKeys && odd != 0) {  // Rare, and so it reads them once more.  Alike for the lanes of a group.
#pragma unroll 1
      for (int i = 0; i < kAtOnce; ++i) {
        if ((odd >> i & 1) == 0) continue;
        const int64_t row = begin + step + i;
        const RowOutput output = OutputOf<Element>(kernel.p, batch, head, row, lane, lanes, group);
        if (kOutputs && output != RowOutput::kCounts && lane == 0) {
          if (output == RowOutput::kLeftOut && slice == 0) ++sums.left_out;
          kernel.do_sizes[((slice * kernel.p.batch + batch) * pair.heads + head) * pair.tokens + row] = 0;
        }
        if (output == RowOutput::kLeftOut || !has) continue;
        const Vector again_x = *reinterpret_cast<const Vector*>(graded + row * pair.graded.token_stride);
        const Vector again_y = *reinterpret_cast<const Vector*>(partner + row * pair.partner.token_stride);
        float equal[kWidth];
        elements_before(row, equal);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          const float a = static_cast<float>(again_x.at[c]), b = static_cast<float>(again_y.at[c]);
          add_product(c, a, b, equal[c], output == RowOutput::kCounts);
          if (kOutputs && output == RowOutput::kUnknown) sums.unknown += fabsf(a);
        }
      }
      __syncwarp(group);
    }
  }
  if (kOfKeys) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c) sums.total += sums.channel[c];
  }
}

// Grid: all blocks of all pairs.  Block: kLawThreads.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kLawThreads, 2) LawPairsKernel(const __grid_constant__ LawPairsParams kernel) {
  constexpr int kHeld = 32 * kWidth;
  __shared__ float of_warps[kLawWarps][kHeld];
  __shared__ double scratch[kLawWarps];
  if (kernel.p.gate != nullptr && kernel.p.gate[kGateOpen] == 0) return;
  int of = 0;
  while (of + 1 < static_cast<int>(PairOf::kCount) && blockIdx.x >= kernel.pairs[of + 1].first_block) ++of;
  const LawPair& pair = kernel.pairs[of];
  int64_t place = blockIdx.x - pair.first_block;
  const int chunk = static_cast<int>(place % pair.chunks);
  place /= pair.chunks;
  const int slice = static_cast<int>(place % pair.slices);
  place /= pair.slices;
  const int64_t head = place % pair.heads, batch = place / pair.heads;

  LaneSums<kWidth> sums;
  if (of == static_cast<int>(PairOf::kOutputs)) {
    AddPairs<Element, kWidth, PairOf::kOutputs>(kernel, pair, batch, head, slice, chunk, sums);
  } else if (of == static_cast<int>(PairOf::kQueries)) {
    AddPairs<Element, kWidth, PairOf::kQueries>(kernel, pair, batch, head, slice, chunk, sums);
  } else {
    AddPairs<Element, kWidth, PairOf::kKeys>(kernel, pair, batch, head, slice, chunk, sums);
  }

  // The groups of a warp; then the warps.  Channels last: they become projections.
  const int lanes = pair.lanes, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double* const out = kernel.sums + int64_t{blockIdx.x} * kLawSumCount;
  float* const columns = kernel.columns + int64_t{blockIdx.x} * kLawColumnCount * kHeld;
#pragma unroll
  for (int which = 0; which <= kLawColumnCount; ++which) {
    __syncthreads();  // The numbers before have been read.
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      float x = sums.channel[c];
      if (which < kColumnEqual) x = sums.column[which % kColumnEqual][c];
      if (which == kColumnEqual) x = static_cast<float>(sums.equal_nonzero[c] >> 16);
      if (which == kColumnNonzero) x = static_cast<float>(sums.equal_nonzero[c] & 0xffffu);
      for (int offset = lanes; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
      if (lane < lanes) of_warps[warp][lane * kWidth + c] = x;
    }
    __syncthreads();
    if (which == kLawColumnCount) break;
    for (int c = threadIdx.x; c < lanes * kWidth; c += kLawThreads) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kLawWarps; ++w) total += of_warps[w][c];
      columns[which * kHeld + c] = total;
    }
  }
  double projection = 0;  // Of warp `warp`.
  const int first_channel = slice * kHeld;
  for (int c = lane; c < lanes * kWidth && first_channel + c < pair.dim; c += 32) {
    double total = 0;
#pragma unroll
    for (int w = 0; w < kLawWarps; ++w) total += static_cast<double>(of_warps[w][c]);
    const auto at = static_cast<uint64_t>(warp) * pair.dim + first_channel + c;
    projection += (ProbeMix(at) & 1) != 0 ? total : -total;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) projection += __shfl_xor_sync(0xffffffffu, projection, offset);
  if (lane == 0) out[warp] = projection;
  const auto add = [&](LawSum which, double x) {
    const double total = SumOverBlock(x, scratch);
    if (threadIdx.x == 0) out[which] = total;
  };
  add(kLawDot, sums.dot);
  add(kLawTotal, sums.total);
  add(kLawAbs, sums.absolute);
  add(kLawSquares, sums.squares);
  add(kLawNonfinite, sums.nonfinite);
  add(kLawLeftOut, sums.left_out);
  add(kLawUnknown, sums.unknown);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAWS_PAIRS_CUH_
