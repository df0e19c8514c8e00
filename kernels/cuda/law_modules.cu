// What the laws of norms, lm_head and linear layers need: see law_modules.h.
//
// Work      norms: a warp a row, and then a thread a feature, of some of the rows.  Logits: a block
//           a row, twice through it.  Equal rows: a thread a row and group, into a table of keys.
// Memory    reads each tensor of a norm three times, of which caches have all but the first; logits
//           twice; of rows 16 columns.
// Numerics  double as on the CPU; exponentials in float32.  What is added over rows comes in no fixed
//           order.
// Limits    compute capability 8.0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends.h"
#include "cuda/block_sum.cuh"
#include "cuda/launch.h"
#include "error.h"
#include "law_modules_parts.h"
#include "law_sums_parts.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kOfThread = 64;  // Rows of a feature, before another block pays.

__device__ __forceinline__ float ElementAt(const LawMatrix& matrix, int64_t row, int64_t column) {
  const int64_t at = row * matrix.row_stride + column;
  if (matrix.dtype == DType::kBFloat16) return static_cast<float>(static_cast<const __nv_bfloat16*>(matrix.data)[at]);
  if (matrix.dtype == DType::kFloat16) return static_cast<float>(static_cast<const __half*>(matrix.data)[at]);
  return static_cast<const float*>(matrix.data)[at];
}

__device__ __forceinline__ double UlpAt(float x, DType dtype) {
  const UlpOf of = UlpOfType(dtype);
  const int exponent = static_cast<int>((__float_as_uint(x) >> 23) & 0xff);
  return __hiloint2double((max(exponent, of.least) + of.shift) << 20, 0);
}

struct Value {
  double value = 0, ulp2 = 0, lost = 0;
};

__device__ __forceinline__ Value ValueAt(const LawMatrix& matrix, int64_t row, int64_t column) {
  const float x = ElementAt(matrix, row, column);
  const double ulp = UlpAt(x, matrix.dtype);
  return {x, ulp * ulp, fabs(static_cast<double>(x)) <= kFewDistances * UlpAt(0, matrix.dtype) ? ulp / 2 : 0};
}

__device__ __forceinline__ Value ValueAt(const LawParts& gradient, int64_t row, int64_t column) {
  Value sum;
  for (int64_t part = 0; part < gradient.count; ++part) {
    const Value of_part = ValueAt(gradient.parts[part], row, column);
    sum.value += of_part.value;
    sum.ulp2 += of_part.ulp2;
    sum.lost += of_part.lost;
  }
  return sum;
}

__device__ __forceinline__ float RoundedTo(DType dtype, double x) {
  const auto value = static_cast<float>(x);
  if (dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(value));
  return dtype == DType::kFloat16 ? __half2float(__float2half_rn(value)) : value;
}

// A warp a row: of a block's many sums each would wait twice.
// Grid: blocks, each with every so many rows.  Block: kThreads.
__global__ void __launch_bounds__(kThreads) NormRowsKernel(const LawNormsParams p) {
  __shared__ double scratch[kThreads / 32];
  double unlike = 0, size = 0;
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < p.rows; i += int64_t{gridDim.x} * kWarps) {
    double mean = 0;
    if (p.centred) {
      for (int64_t j = lane; j < p.n; j += 32) mean += ElementAt(p.x, i, j);
      mean = SumOverWarp(mean) / static_cast<double>(p.n);
    }
    NormRow row;
    for (int64_t j = lane; j < p.n; j += 32) {
      const Value y = ValueAt(p.y, i, j), d_x = ValueAt(p.d_x, i, j), d_y = ValueAt(p.d_y, i, j);
      const double c = ElementAt(p.x, i, j) - mean, w = y.value - p.shift[j], gained = p.gain[j] * d_y.value;
      row.squares += c * c;
      row.sizes += fabs(c);
      row.c_d_x += c * d_x.value;
      row.w_d_y += w * d_y.value;
      row.d_x += d_x.value;
      row.d_x_ulp2 += d_x.ulp2;
      row.lost += d_x.lost;
      row.c_lost += fabs(c) * d_x.lost;
      row.variance += c * c * d_x.ulp2;
      row.inside += d_y.value * d_y.value * y.ulp2 + w * w * d_y.ulp2;
      row.gained += gained * gained;
    }
    row.squares = SumOverWarp(row.squares);
    row.sizes = SumOverWarp(row.sizes);
    row.c_d_x = SumOverWarp(row.c_d_x);
    row.w_d_y = SumOverWarp(row.w_d_y);
    row.d_x = SumOverWarp(row.d_x);
    row.d_x_ulp2 = SumOverWarp(row.d_x_ulp2);
    row.lost = SumOverWarp(row.lost);
    row.c_lost = SumOverWarp(row.c_lost);
    row.variance = SumOverWarp(row.variance);
    row.inside = SumOverWarp(row.inside);
    row.gained = SumOverWarp(row.gained);
    if (lane == 0) {
      StoreNormRow(
          p, row, mean, [](double x) { return sqrt(x); }, p.rows, p.row_stats + i);
    }
    const double r = sqrt(row.squares / static_cast<double>(p.n) + p.eps);
    for (int64_t j = lane; j < p.n; j += 32) {
      const double y = ElementAt(p.y, i, j), c = ElementAt(p.x, i, j) - mean;
      const double left = y - (c / r * p.gain[j] + p.shift[j]);
      unlike += left * left;
      size += y * y;
    }
  }
  unlike = SumOverBlock(unlike, scratch);
  size = SumOverBlock(size, scratch);
  if (threadIdx.x == 0) {
    atomicAdd(p.rest, unlike);
    atomicAdd(p.rest + 1, size);
  }
}

// Behind NormRowsKernel.  Grid: [features in blocks of kThreads, parts of the rows].  Block: kThreads.
__global__ void __launch_bounds__(kThreads) NormFeaturesKernel(const LawNormsParams p) {
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= p.n) return;
  const int64_t part = (p.rows + gridDim.y - 1) / gridDim.y, from = blockIdx.y * part;
  const int64_t to = min(p.rows, from + part);
  const double shift = p.shift[j], gain = fabs(p.gain[j]);
  const double* const off = p.row_stats + kLawNormOff * p.rows;
  double sums[kLawNormFeatureCount] = {};
  for (int64_t i = from; i < to; ++i) {
    const Value y = ValueAt(p.y, i, j), d_y = ValueAt(p.d_y, i, j);
    const double product = (y.value - shift) * d_y.value, size = fabs(d_y.value);
    // A product may be rounded before it is added up.
    const double ulp = UlpAt(RoundedTo(p.y.dtype, product), p.y.dtype);
    sums[kLawNormSum] += product;
    sums[kLawNormVariance] += d_y.value * d_y.value * y.ulp2 + ulp * ulp;
    sums[kLawNormAlike] += (size * sqrt(y.ulp2) + ulp) / 2 + kLawNormInside * 2 * off[i] * gain * size;
    sums[kLawNormAbsSum] += fabs(product);
  }
#pragma unroll
  for (int stat = 0; stat < kLawNormFeatureCount; ++stat) {
    const double sum = stat == kLawNormVariance ? sums[stat] / 12 : sums[stat];
    if (sum != 0) atomicAdd(p.feature_stats + stat * p.n + j, sum);  // A NaN is not 0.
  }
}

// Of a block.  NaN is never the largest.
__device__ __forceinline__ float LargestOfBlock(float x, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float largest = scratch[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) largest = fmaxf(largest, scratch[warp]);
  return largest;
}

// Grid: blocks, each with every so many rows.  Block: kThreads.
template <class Element>
__global__ void __launch_bounds__(kThreads) LogitsKernel(const LawLogitsParams p) {
  __shared__ double scratch[kThreads / 32];
  __shared__ float tops[kThreads / 32];
  for (int64_t i = blockIdx.x; i < p.rows; i += gridDim.x) {
    const auto* const z = static_cast<const Element*>(p.z.data) + i * p.z.row_stride;
    float top = -INFINITY;
#pragma unroll 4
    for (int64_t j = threadIdx.x; j < p.classes; j += kThreads) top = fmaxf(top, static_cast<float>(z[j]));
    top = LargestOfBlock(top, tops);
    double others = 0, size = 0, equal = 0;
#pragma unroll 4
    for (int64_t j = threadIdx.x; j < p.classes; j += kThreads) {
      const float value = static_cast<float>(z[j]);
      if (value == top) {
        equal += 1;
        continue;
      }
      float below = value - top;
      if (below < kFarBelow) below = kFarBelow;  // A NaN stays.
      const double e = expf(below);
      others += e;
      size = fma(e, static_cast<double>(below), size);
    }
    others = SumOverBlock(others, scratch);
    size = SumOverBlock(size, scratch);
    equal = SumOverBlock(equal, scratch);
    if (threadIdx.x == 0) {
      // Where nothing is the largest all are NaN.
      const double total = equal > 0 ? others + (equal - 1) : static_cast<double>(NAN);
      p.out[kLawLogitUnsure * p.rows + i] = total / (1 + total);
      p.out[kLawLogitRoundings * p.rows + i] = 1 + 2 * log1p(total) - size / (1 + total);
    }
  }
}

__device__ __forceinline__ uint32_t BitsAt(const void* data, int64_t at, bool in_16_bits) {
  return in_16_bits ? static_cast<const uint16_t*>(data)[at] : static_cast<const uint32_t*>(data)[at];
}

// Grid: [rows in blocks of kThreads, groups].  Block: kThreads.  The tables are zero.
__global__ void __launch_bounds__(kThreads) EqualRowsKernel(const LawEqualRowsParams p, const int64_t slots) {
  __shared__ double scratch[kThreads / 32];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, group = blockIdx.y;
  auto* const keys = static_cast<unsigned long long*>(p.scratch) + group * slots;
  auto* const counts =
      reinterpret_cast<uint32_t*>(static_cast<unsigned long long*>(p.scratch) + kEqualGroups * slots) + group * slots;
  const bool in_16_bits = p.dtype != DType::kFloat32;
  double there = 0, alike = 0;
  if (i < p.rows) {
    uint32_t bits[kEqualColumns], any = 0;
#pragma unroll
    for (int k = 0; k < kEqualColumns; ++k) {
      const int64_t column = (group * kEqualColumns + k) * p.width / (kEqualGroups * kEqualColumns);
      bits[k] = BitsAt(p.data, i * p.row_stride + column * p.column_stride, in_16_bits);
      any |= bits[k] & (in_16_bits ? 0x7fffu : 0x7fffffffu);  // A zero may have a sign.
    }
    if (any != 0) {
      const unsigned long long key = KeyOf(bits, in_16_bits);
      uint64_t slot = MixedKey(key) & static_cast<uint64_t>(slots - 1);
      while (true) {
        const unsigned long long was = atomicCAS(keys + slot, 0ull, key);
        if (was == 0 || was == key) break;
        slot = (slot + 1) & static_cast<uint64_t>(slots - 1);
      }
      // m rows that are alike add 1, 3, 5, ..: m^2 together.
      alike = 2.0 * atomicAdd(counts + slot, 1u) + 1;
      there = 1;
    }
  }
  there = SumOverBlock(there, scratch);
  alike = SumOverBlock(alike, scratch);
  if (threadIdx.x != 0 || there == 0) return;
  atomicAdd(p.out + group * kLawEqualStatCount + kLawEqualThere, there);
  atomicAdd(p.out + group * kLawEqualStatCount + kLawEqualAlike, alike);
}

}  // namespace

Status LawNorms(const LawNormsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const auto on = static_cast<cudaStream_t>(stream);
  constexpr int64_t kOfBlock = kThreads / 32;  // Rows.
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>((p.rows + kOfBlock - 1) / kOfBlock, 16 * gpu.multiprocessors));
  NormRowsKernel<<<blocks, kThreads, 0, on>>>(p);
  const int64_t columns = (p.n + kThreads - 1) / kThreads;
  const int64_t wanted = std::max<int64_t>(1, 16 * gpu.multiprocessors / columns);
  const int64_t parts = std::clamp<int64_t>(p.rows / kOfThread, 1, std::min<int64_t>(wanted, 65535));
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(parts));
  NormFeaturesKernel<<<grid, kThreads, 0, on>>>(p);
  return LaunchResult(cudaGetLastError(), "the sums of a norm");
}

Status LawLogits(const LawLogitsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const auto on = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.rows, 16 * gpu.multiprocessors));
  if (p.z.dtype == DType::kBFloat16) {
    LogitsKernel<__nv_bfloat16><<<blocks, kThreads, 0, on>>>(p);
  } else if (p.z.dtype == DType::kFloat16) {
    LogitsKernel<__half><<<blocks, kThreads, 0, on>>>(p);
  } else {
    LogitsKernel<float><<<blocks, kThreads, 0, on>>>(p);
  }
  return LaunchResult(cudaGetLastError(), "what logits say");
}

Status LawEqualRows(const LawEqualRowsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaMemsetAsync(p.scratch, 0, static_cast<size_t>(LawEqualRowsScratch(p.rows)), on);
  if (error != cudaSuccess) return LaunchResult(error, "the rows that are equal");
  const dim3 grid(static_cast<unsigned>((p.rows + kThreads - 1) / kThreads), kEqualGroups);
  EqualRowsKernel<<<grid, kThreads, 0, on>>>(p, LawEqualRowsSlots(p.rows));
  return LaunchResult(cudaGetLastError(), "the rows that are equal");
}

}  // namespace bellwether::kernels::cuda
