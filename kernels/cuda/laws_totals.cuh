// laws_totals.cuh: what the sampled rows say of the roundings inside of a kernel, law by law, and all
// blocks' numbers added up in one order, so that a call gives the same bits each time.

#ifndef BELLWETHER_KERNELS_CUDA_LAWS_TOTALS_CUH_
#define BELLWETHER_KERNELS_CUDA_LAWS_TOTALS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/laws_columns.cuh"
#include "cuda/laws_pairs.cuh"
#include "cuda/laws_rows.cuh"

namespace bellwether::kernels::cuda {

// What rounding inside adds to the laws, by row: variances and channels (roundings that are all
// alike), the first five by projection.
enum LawOfRows : int {
  kRowsA1Variance = 0,
  kRowsA1Delta = kLawProjections,   // an error of delta
  kRowsA1Ds = 2 * kLawProjections,  // dS, rounded
  kRowsA2Variance = 3 * kLawProjections,
  kRowsA2P = 4 * kLawProjections,  // P, rounded
  kRowsA4Variance = 5 * kLawProjections,
  kRowsA4P,
  kLawOfRowsCount
};

// Which power of a row's size such a number grows with.
__device__ __forceinline__ LawSize SizeOfRows(int number) {
  if (number < kRowsA1Delta) return kSizeQdo2;
  if (number < kRowsA2Variance) return kSizeQdo;
  const bool is_variance = number < kRowsA2P || number == kRowsA4Variance;
  return is_variance ? kSizeDo2 : kSizeDo;
}
__host__ __device__ constexpr LawSize Squared(LawSize size) {
  return size == kSizeQdo ? kSizeQdo2 : size == kSizeQdo2 ? kSizeQdo4 : size == kSizeDo ? kSizeDo2 : kSizeDo4;
}

// What a block of rows leaves.  Of each number y of size x: its sum, sum y^2, sum x y.  Then the sizes'
// sums, with sinks the sums of rows in A1 and A2 by projection, and how many rows count.
inline constexpr int kRowSums = 0, kRowSquares = kLawOfRowsCount, kRowProducts = 2 * kLawOfRowsCount,
                     kRowSizes = 3 * kLawOfRowsCount, kRowSinkA1 = kRowSizes + kLawSizeCount,
                     kRowSinkA2 = kRowSinkA1 + kLawProjections, kRowCount = kRowSinkA2 + kLawProjections,
                     kRowNumbers = kRowCount + 1;

inline constexpr int kChunkRows = 64;  // of a block of LawOfRowsKernel

__host__ __device__ inline int64_t RowChunks(const LawRowsParams& kernel) {
  return (kernel.rows + kChunkRows - 1) / kChunkRows;
}

struct LawOfRowsParams {
  LawRowsParams rows;
  LawPairsParams pairs;
  double* numbers;  // [batch][heads][chunks][kRowNumbers]
};

// A lane's sums of one number.
struct RowMoments {
  double sum = 0, squares = 0, products = 0;
  __device__ __forceinline__ void Add(double y, double x) {
    sum += y;
    squares += y * y;
    products += x * y;
  }
  __device__ __forceinline__ void Store(double* to, int number) const {
    to[kRowSums + number] = sum;
    to[kRowSquares + number] = squares;
    to[kRowProducts + number] = products;
  }
};

// Grid: [batch * heads * chunks].  Block: kLawThreads, a row a warp.
template <class Element, int kDimMax>
__global__ void __launch_bounds__(kLawThreads) LawOfRowsKernel(const __grid_constant__ LawOfRowsParams params) {
  __shared__ uint8_t signs_k[kDimMax], signs_v[kDimMax];
  __shared__ double of_warps[kLawWarps][kRowNumbers];
  const LawRowsParams& kernel = params.rows;
  const ProbeParams& p = kernel.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const auto fill = [](uint8_t* signs, int64_t dim) {
    for (int c = threadIdx.x; c < dim; c += kLawThreads) {
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < kLawProjections; ++i) {
        bits |= static_cast<unsigned>(ProbeMix(static_cast<uint64_t>(i) * dim + c) & 1) << i;
      }
      signs[c] = static_cast<uint8_t>(bits);
    }
  };
  fill(signs_k, p.head_dim);
  fill(signs_v, p.v_dim);
  __syncthreads();
  const int64_t chunks = RowChunks(kernel), chunk = blockIdx.x % chunks, sequence_head = blockIdx.x / chunks;
  const int64_t head = sequence_head % p.heads, batch = sequence_head / p.heads, all_rows = AllRows(kernel);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane % kLawProjections;
  constexpr double kVariance = kVarianceOfBase<Element>, kFp32 = 0x1p-24;
  RowMoments a1_variance, a1_delta, a1_ds, a2_variance, a2_p, a4_variance, a4_p;
  double sizes[kLawSizeCount] = {}, sink_a1 = 0, sink_a2 = 0, count = 0;
  for (int64_t index = chunk * kChunkRows + warp; index < min((chunk + 1) * kChunkRows, kernel.rows);
       index += kLawWarps) {
    const int64_t at = sequence_head * kernel.rows + index;
    const LawRow known = kernel.known[at];
    const int64_t row = kernel.places[at].row;
    if (known.inverse_l == 0.f) continue;
    double size[kLawSizeCount];
    RowSizes(params.pairs, sequence_head, row, size);
#pragma unroll
    for (int i = 0; i < kLawSizeCount; ++i) sizes[i] += size[i];
    count += 1;
    const Element* const q = LawRowOf<Element>(p.q, batch, head, row);
    const Element* const o = LawRowOf<Element>(p.o, batch, head, row);
    const Element* const d_o = LawRowOf<Element>(p.d_o, batch, head, row);
    float of_q[kLawProjections] = {}, of_d_o[kLawProjections] = {};
    double delta = 0;
    float products = 0, of_o = 0;
    for (int c = lane; c < p.head_dim; c += 32) {
      const float x = static_cast<float>(q[c]);
#pragma unroll
      for (int i = 0; i < kLawProjections; ++i) of_q[i] += signs_k[c] >> i & 1 ? x : -x;
    }
    for (int c = lane; c < p.v_dim; c += 32) {
      const float x = static_cast<float>(d_o[c]), y = static_cast<float>(o[c]);
#pragma unroll
      for (int i = 0; i < kLawProjections; ++i) of_d_o[i] += signs_v[c] >> i & 1 ? x : -x;
      delta = fma(static_cast<double>(x), static_cast<double>(y), delta);
      products += fabsf(x * y);
      const float base = x * BaseOf<Element>(y);
      of_o = fmaf(base, base, of_o);
    }
    float inside = 0, my_q = 0, my_d_o = 0;  // inside: number `lane`
    if (lane < kInsideCount) {
      for (int part = 0; part < kernel.parts; ++part) {
        inside += kernel.inside[(part * all_rows + at) * kInsideCount + lane];
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < kLawProjections; ++i) {
        of_q[i] += __shfl_xor_sync(0xffffffffu, of_q[i], offset);
        of_d_o[i] += __shfl_xor_sync(0xffffffffu, of_d_o[i], offset);
      }
      delta += __shfl_xor_sync(0xffffffffu, delta, offset);
      products += __shfl_xor_sync(0xffffffffu, products, offset);
      of_o += __shfl_xor_sync(0xffffffffu, of_o, offset);
    }
#pragma unroll
    for (int i = 0; i < kLawProjections; ++i) {
      my_q = mine == i ? of_q[i] : my_q;
      my_d_o = mine == i ? of_d_o[i] : my_d_o;
    }
    const auto number = [&](LawInside which) {
      return static_cast<double>(__shfl_sync(0xffffffffu, inside, static_cast<int>(which)));
    };
    const double p_error = number(kInsidePError), p_bases = number(kInsidePBases);
    const double p_error_of_dp = number(kInsidePErrorOfDp), p_bases_of_dp = number(kInsidePBasesOfDp);
    const double ds_error = number(kInsideDsError), ds_variance = number(kInsideDsVariance);
    const double q8 = static_cast<double>(p.scale) * static_cast<double>(my_q), o8 = static_cast<double>(my_d_o);
    const double in_fp32 = kFp32 * static_cast<double>(products);
    const double of_delta = kVariance * (p_bases_of_dp + static_cast<double>(of_o)) + in_fp32 * in_fp32;
    const double weight = static_cast<double>(known.weight), exact = static_cast<double>(known.delta);
    constexpr double kTimes = 2;  // That a rounding inside counts: once in each direction.
    a1_variance.Add(kTimes * q8 * q8 * (ds_variance + of_delta), size[kSizeQdo2]);
    a1_delta.Add(-q8 * weight * (delta - exact), size[kSizeQdo]);
    a1_ds.Add(q8 * ds_error, size[kSizeQdo]);
    const auto of_row = static_cast<double>(OfScoresInFp32(kernel.roundings, known.first));
    a2_variance.Add(kTimes * o8 * o8 * (kVariance * p_bases + of_row * weight * weight), size[kSizeDo2]);
    a2_p.Add(o8 * p_error, size[kSizeDo]);
    // Forward and backward.
    a4_variance.Add(2 * kTimes * (kVariance * p_bases_of_dp + of_row * exact * exact), size[kSizeDo2]);
    a4_p.Add(p_error_of_dp, size[kSizeDo]);
    if (p.sinks != nullptr) {
      sink_a1 += q8 * exact * (1 - weight);  // sum_j dS_Tj
      sink_a2 += o8 * weight;                // By itself: where a sink takes all there is exactly nothing.
    }
  }
  double* const to = of_warps[warp];
  if (lane < kLawProjections) {
    a1_variance.Store(to, kRowsA1Variance + lane);
    a1_delta.Store(to, kRowsA1Delta + lane);
    a1_ds.Store(to, kRowsA1Ds + lane);
    a2_variance.Store(to, kRowsA2Variance + lane);
    a2_p.Store(to, kRowsA2P + lane);
    to[kRowSinkA1 + lane] = sink_a1;
    to[kRowSinkA2 + lane] = sink_a2;
  }
  if (lane == 0) {
    a4_variance.Store(to, kRowsA4Variance);
    a4_p.Store(to, kRowsA4P);
    to[kRowCount] = count;
#pragma unroll
    for (int i = 0; i < kLawSizeCount; ++i) to[kRowSizes + i] = sizes[i];
  }
  __syncthreads();
  if (threadIdx.x >= kRowNumbers) return;
  double sum = 0;
  for (int w = 0; w < kLawWarps; ++w) sum += of_warps[w][threadIdx.x];
  params.numbers[int64_t{blockIdx.x} * kRowNumbers + threadIdx.x] = sum;
}
static_assert(kRowNumbers <= kLawThreads);

struct LawTotalsParams {
  LawPairsParams pairs;
  LawRowsParams rows;
  LawHeadsParams heads;
  LawOutputs to;
  const double* numbers;            // [batch][heads][chunks][kRowNumbers]
  double variance_scale;            // kVarianceOfBase
  double roundings, key_roundings;  // how often the last rounding of a result counts; of dk and dv
  bool with_laws, with_a1, with_a2;
  bool every_row;  // is sampled
};

// The blocks' sums of one pair and head, over all sequences, into out [kLawSumCount] of shared memory.
__device__ __forceinline__ void SumBlocks(const LawPairsParams& pairs, PairOf which, int64_t head,
                                          double (&scratch)[kLawThreads], double* out) {
  constexpr int kLanes = kLawThreads / kLawSumCount;
  const LawPair& pair = pairs.pairs[static_cast<int>(which)];
  const int64_t of_head = int64_t{pair.slices} * pair.chunks, count = pairs.p.batch * of_head;
  const int number = threadIdx.x % kLawSumCount;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x / kLawSumCount; i < count; i += kLanes) {
    const int64_t block = pair.first_block + (i / of_head * pair.heads + head) * of_head + i % of_head;
    sum += number <= kLawUnknown ? pairs.sums[block * kLawSumCount + number] : 0;
  }
  __syncthreads();  // The scratch is free.
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < kLawSumCount) {
    double total = 0;
    for (int i = 0; i < kLanes; ++i) total += scratch[i * kLawSumCount + threadIdx.x];
    out[threadIdx.x] = total;
  }
  __syncthreads();
}

// Of all rows what the sampled ones say: the sum, its error squared, and whether they say anything.
struct RowEstimate {
  double sum = 0, error2 = 0;
  bool unknown = false;
};

__device__ __forceinline__ void AddEstimate(const LawTotalsParams& kernel, int64_t sequence_head, int number,
                                            RowEstimate& to) {
  const int64_t chunks = RowChunks(kernel.rows);
  const LawSize size = SizeOfRows(number), square = Squared(size);
  double y = 0, yy = 0, xy = 0, x = 0, xx = 0, n = 0;
#pragma unroll 2
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const double* const of = kernel.numbers + (sequence_head * chunks + chunk) * kRowNumbers;
    y += of[kRowSums + number];
    yy += of[kRowSquares + number];
    xy += of[kRowProducts + number];
    x += of[kRowSizes + size];
    xx += of[kRowSizes + square];
    n += of[kRowCount];
  }
  const double* const all = kernel.heads.sizes + sequence_head * kLawSizeCount;
  const double others = all[size] - x;
  // Sums in another order differ that much.
  const bool complete = kernel.every_row || (isfinite(others) && others <= 1e-12 * all[size]);
  if (complete || n < 2 || x == 0) {
    to.sum += y;
    to.unknown |= !complete;
    return;
  }
  const double ratio = y / x;
  const double squares = fmax(yy - 2 * ratio * xy + ratio * ratio * xx, 0.);  // of y less ratio x
  const double variance = n / (n - 1) * squares / xx;
  const double rest = others / x;
  to.sum += ratio * all[size];
  to.error2 += variance * (rest * rest * xx + fmax(all[square] - xx, 0.));
}

__device__ __forceinline__ void AddTo(float* out, double x) { *out += static_cast<float>(x); }
// A difference that has a part that is not finite is NaN.
__device__ __forceinline__ double OrNan(double x) { return isfinite(x) ? x : static_cast<double>(NAN); }

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAWS_TOTALS_CUH_
