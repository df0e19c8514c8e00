// Norms, extremes and counts of parameters: see tensor_stats.h.
//
// Work      a block for each 32,768 elements of a tensor, of up to kTensors tensors in a launch, whose
//           descriptions are the kernel's parameters; then a block for each tensor adds its blocks'.
// Memory    reads each tensor once, four elements at a time where all lie so.
// Numerics  double as on the CPU, in one order.
// Limits    compute capability 8.0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends.h"
#include "cuda/launch.h"
#include "error.h"
#include "tensor_stats_parts.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWidth = 4;
constexpr int kTensors = 40;  // A launch's parameters have 4 KB.

enum Part { kGrad, kWeight, kBefore, kMoment, kSecond, kParts };

struct Entry {
  const void* data[kParts];
  int64_t elements;
  double beta2, least, steps;
  const float* steps_at;
  int first;  // Its first block in the launch.
  unsigned char dtypes[kParts];
};

struct StatsKernelParams {
  Entry tensors[kTensors];
  int count;
  const float* scale;
  double* partial;  // [blocks][kTensorStatCount]
  double* out;      // [count][kTensorStatCount]
};
static_assert(sizeof(StatsKernelParams) <= 4096);

template <class Element>
struct alignas(sizeof(Element) * kWidth) Four {
  Element at[kWidth];
};

// kWidth elements, or the `count` that there are; the others are 0.  `aligned`: to all of them.
template <class Element>
__device__ __forceinline__ void Read(const void* data, int64_t at, int count, bool aligned, float* to) {
  const auto* const from = static_cast<const Element*>(data) + at;
  if (aligned && count == kWidth) {
    const auto four = *reinterpret_cast<const Four<Element>*>(from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<float>(four.at[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
}

__device__ __forceinline__ void ReadPart(const Entry& t, int part, int64_t at, int count, float* to) {
  const auto dtype = static_cast<DType>(t.dtypes[part]);
  const void* const data = t.data[part];
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (dtype == DType::kBFloat16) {
    Read<__nv_bfloat16>(data, at, count, address % 8 == 0, to);
  } else if (dtype == DType::kFloat16) {
    Read<__half>(data, at, count, address % 8 == 0, to);
  } else {
    Read<float>(data, at, count, address % 16 == 0, to);
  }
}

__device__ __forceinline__ bool IsFinite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ double Finite(float x) { return IsFinite(x) ? static_cast<double>(x) : 0.0; }

// Over the threads of a block, in one order; the result is in thread 0.
template <class Value, class Combine>
__device__ __forceinline__ Value OverBlock(Value x, Value* scratch, const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();  // Of what came before: the scratch is free.
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  Value all = scratch[0];
  for (int warp = 1; warp < kWarps; ++warp) all = combine(all, scratch[warp]);
  return all;
}

struct Add {
  template <class Value>
  __device__ __forceinline__ Value operator()(Value a, Value b) const {
    return a + b;
  }
};

struct Larger {
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

__host__ __device__ constexpr bool IsLargest(int stat) { return stat == kTensorGradMax || stat == kTensorWeightMax; }

// Writes `sums` and `bits` of all threads to out[kTensorStatCount]: the bits as an integer, or,
// if it is `last`, as the double that the caller gets.
__device__ __forceinline__ void Store(const double* sums, unsigned long long bits, bool last, double* out) {
  __shared__ double scratch[kWarps];
  __shared__ unsigned long long integers[kWarps];
#pragma unroll
  for (int stat = 0; stat < kTensorStatCount; ++stat) {
    if (stat == kTensorWeightBits) continue;
    const double of =
        IsLargest(stat) ? OverBlock(sums[stat], scratch, Larger()) : OverBlock(sums[stat], scratch, Add());
    if (threadIdx.x == 0) out[stat] = of;
  }
  const unsigned long long all = OverBlock(bits, integers, Add());
  if (threadIdx.x == 0) {
    out[kTensorWeightBits] =
        last ? static_cast<double>(all & kBitsMask) : __longlong_as_double(static_cast<long long>(all & kBitsMask));
  }
}

// Grid: blocks of all tensors of the launch.  Block: kThreads.
__global__ void __launch_bounds__(kThreads) ChunksKernel(const StatsKernelParams p) {
  __shared__ double of_v, of_square;
  const int block = static_cast<int>(blockIdx.x);
  int number = 0;
  for (int i = 1; i < p.count; ++i) number += p.tensors[i].first <= block;
  const Entry& t = p.tensors[number];
  const bool grads = t.data[kGrad] != nullptr, weights = t.data[kWeight] != nullptr;
  const bool changes = weights && t.data[kBefore] != nullptr, moments = t.data[kMoment] != nullptr;
  const bool lags = grads && t.data[kSecond] != nullptr;
  if (lags && threadIdx.x == 0) {
    const double steps = t.steps + (t.steps_at != nullptr ? static_cast<double>(*t.steps_at) : 0.0);
    const double correction = 1 - pow(t.beta2, steps);
    of_v = t.beta2 / correction;
    of_square = (1 - t.beta2) / correction;
  }
  __syncthreads();
  const double factor = p.scale != nullptr ? 1 / static_cast<double>(*p.scale) : 1.0;
  const int64_t from = int64_t{block - t.first} * kTensorChunk;
  const int64_t to = min(t.elements, from + kTensorChunk);

  double sums[kTensorStatCount] = {};
  unsigned long long bits = 0;
  for (int64_t at = from + threadIdx.x * kWidth; at < to; at += kThreads * kWidth) {
    const int count = static_cast<int>(min(to - at, int64_t{kWidth}));
    float g[kWidth] = {}, w[kWidth] = {}, u[kWidth] = {}, m[kWidth] = {}, v[kWidth] = {};
    if (grads) ReadPart(t, kGrad, at, count, g);
    if (weights) ReadPart(t, kWeight, at, count, w);
    if (changes) ReadPart(t, kBefore, at, count, u);
    if (moments) ReadPart(t, kMoment, at, count, m);
    if (lags) ReadPart(t, kSecond, at, count, v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= count) break;
      if (grads) {
        const double value = Finite(g[i]) * factor, square = value * value;
        sums[kTensorGradSumsq] += square;
        sums[kTensorGradMax] = fmax(sums[kTensorGradMax], fabs(value));
        if (!IsFinite(g[i])) sums[kTensorGradNonfinite] += 1;
        if (g[i] == 0) sums[kTensorGradZeros] += 1;
        if (moments && IsFinite(m[i])) sums[kTensorDot] = fma(value, static_cast<double>(m[i]), sums[kTensorDot]);
        if (lags && square > 0 && IsFinite(v[i])) {
          sums[kTensorLagSum] += square / fmax(of_v * static_cast<double>(v[i]) + of_square * square, t.least);
        }
      }
      if (weights) {
        const double value = Finite(w[i]);
        sums[kTensorWeightSumsq] = fma(value, value, sums[kTensorWeightSumsq]);
        sums[kTensorWeightMax] = fmax(sums[kTensorWeightMax], fabs(value));
        if (!IsFinite(w[i])) sums[kTensorWeightNonfinite] += 1;
        const void* const data = t.data[kWeight];
        const unsigned raw = static_cast<DType>(t.dtypes[kWeight]) == DType::kFloat32
                                 ? static_cast<const unsigned*>(data)[at + i]
                                 : static_cast<const unsigned short*>(data)[at + i];
        bits += static_cast<unsigned long long>(raw) * BitsWeight(at + i);
      }
      if (changes) {
        const double by =
            IsFinite(w[i]) && IsFinite(u[i]) ? static_cast<double>(w[i]) - static_cast<double>(u[i]) : 0.0;
        sums[kTensorChangeSumsq] = fma(by, by, sums[kTensorChangeSumsq]);
        if (w[i] != u[i] && !(isnan(w[i]) && isnan(u[i]))) sums[kTensorChanged] += 1;
      }
      if (moments) {
        const double value = Finite(m[i]);
        sums[kTensorMomentSumsq] = fma(value, value, sums[kTensorMomentSumsq]);
      }
    }
  }
  if (threadIdx.x == 0) sums[kTensorElements] = static_cast<double>(to - from);
  Store(sums, bits, false, p.partial + int64_t{block} * kTensorStatCount);
}

// Grid: tensors of the launch.  Block: kThreads.
__global__ void __launch_bounds__(kThreads) JoinKernel(const StatsKernelParams p) {
  const int number = static_cast<int>(blockIdx.x);
  const Entry& t = p.tensors[number];
  const int blocks = static_cast<int>(ChunksOf(t.elements));
  double sums[kTensorStatCount] = {};
  unsigned long long bits = 0;
  for (int block = static_cast<int>(threadIdx.x); block < blocks; block += kThreads) {
    const double* const of = p.partial + int64_t{t.first + block} * kTensorStatCount;
#pragma unroll
    for (int stat = 0; stat < kTensorStatCount; ++stat) {
      if (stat == kTensorWeightBits) continue;
      sums[stat] = IsLargest(stat) ? fmax(sums[stat], of[stat]) : sums[stat] + of[stat];
    }
    bits += static_cast<unsigned long long>(__double_as_longlong(of[kTensorWeightBits]));
  }
  Store(sums, bits, true, p.out + int64_t{number} * kTensorStatCount);
}

Entry EntryOf(const TensorOfStep& t, int64_t first) {
  Entry entry = {};
  const TensorPart* const parts[kParts] = {&t.grad, &t.weight, &t.before, &t.moment, &t.second};
  for (int part = 0; part < kParts; ++part) {
    entry.data[part] = t.elements > 0 ? parts[part]->data : nullptr;
    entry.dtypes[part] = static_cast<unsigned char>(parts[part]->dtype);
  }
  entry.elements = t.elements;
  entry.beta2 = t.beta2;
  entry.least = t.eps * t.eps;
  entry.steps = t.steps;
  entry.steps_at = t.steps_at;
  entry.first = static_cast<int>(first);
  return entry;
}

}  // namespace

Status TensorStats(const TensorStatsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const auto on = static_cast<cudaStream_t>(stream);
  auto* partial = static_cast<double*>(p.workspace);
  for (int64_t begin = 0; begin < p.count; begin += kTensors) {
    StatsKernelParams kernel = {};
    kernel.count = static_cast<int>(std::min<int64_t>(kTensors, p.count - begin));
    kernel.scale = p.scale;
    kernel.partial = partial;
    kernel.out = p.out + begin * kTensorStatCount;
    int64_t blocks = 0;
    for (int i = 0; i < kernel.count; ++i) {
      kernel.tensors[i] = EntryOf(p.tensors[begin + i], blocks);
      blocks += ChunksOf(p.tensors[begin + i].elements);
    }
    ChunksKernel<<<static_cast<unsigned>(blocks), kThreads, 0, on>>>(kernel);
    BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchResult(cudaGetLastError(), "the statistics of tensors"));
    JoinKernel<<<static_cast<unsigned>(kernel.count), kThreads, 0, on>>>(kernel);
    BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchResult(cudaGetLastError(), "the statistics of tensors"));
    partial += blocks * kTensorStatCount;
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cuda
