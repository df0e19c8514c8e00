// Sums of a matrix along one of its dimensions: see law_sums.h.
//
// Work      where the summed dimension lies together, a block a result; else a thread a result, of
//           some of the summed elements, so that neighbours read neighbours.
// Memory    reads the matrix once.
// Numerics  double as on the CPU; parts of a result are added in no fixed order.
// Limits    compute capability 8.0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends.h"
#include "cuda/block_sum.cuh"
#include "cuda/launch.h"
#include "error.h"
#include "law_sums_parts.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;          // Elements that are on their way at once.
constexpr int64_t kOfThread = 64;  // Elements of a result, before another block pays.

struct Sums {
  double of[kLawSumStatCount] = {};

  __device__ __forceinline__ void Add(float x, const UlpOf& ulp_of) {
    const unsigned bits = __float_as_uint(x);
    const int exponent = max(static_cast<int>((bits >> 23) & 0xff), ulp_of.least) + ulp_of.shift;
    const double ulp = __hiloint2double(exponent << 20, 0), value = x;
    of[kLawSumSum] += value;
    of[kLawSumAbsSum] += fabs(value);
    of[kLawSumUlpSum] += ulp;
    of[kLawSumVariance] = fma(ulp, ulp, of[kLawSumVariance]);
    if ((bits & 0xffff) != 0) of[kLawSumLowBits] += 1;
  }

  __device__ __forceinline__ double At(int stat) const { return stat == kLawSumVariance ? of[stat] / 12 : of[stat]; }
};

template <class Element>
__device__ __forceinline__ void AddEvery(const Element* x, int64_t from, int64_t to, int64_t step, int64_t stride,
                                         const UlpOf& ulp_of, Sums& sums) {
  int64_t j = from;
  for (; j + (kWidth - 1) * step < to; j += kWidth * step) {
    float at[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) at[i] = static_cast<float>(x[(j + i * step) * stride]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums.Add(at[i], ulp_of);
  }
  for (; j < to; j += step) sums.Add(static_cast<float>(x[j * stride]), ulp_of);
}

// Grid: blocks, each with every so many results.  Block: kThreads.
template <class Element>
__global__ void __launch_bounds__(kThreads) AlongKernel(const LawSumsParams p, const UlpOf ulp_of) {
  __shared__ double scratch[kThreads / 32];
  for (int64_t i = blockIdx.x; i < p.kept; i += gridDim.x) {
    Sums sums;
    AddEvery(static_cast<const Element*>(p.data) + i * p.kept_stride, threadIdx.x, p.summed, kThreads, p.summed_stride,
             ulp_of, sums);
#pragma unroll
    for (int stat = 0; stat < kLawSumStatCount; ++stat) {
      const double sum = SumOverBlock(sums.At(stat), scratch);
      if (threadIdx.x == 0) p.out[i * kLawSumStatCount + stat] += sum;
    }
  }
}

// Grid: [results in blocks of kThreads, parts of the summed dimension].  Block: kThreads.
template <class Element>
__global__ void __launch_bounds__(kThreads) AcrossKernel(const LawSumsParams p, const UlpOf ulp_of) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.kept) return;
  const int64_t part = (p.summed + gridDim.y - 1) / gridDim.y, from = blockIdx.y * part;
  Sums sums;
  AddEvery(static_cast<const Element*>(p.data) + i * p.kept_stride, from, min(p.summed, from + part), 1,
           p.summed_stride, ulp_of, sums);
#pragma unroll
  for (int stat = 0; stat < kLawSumStatCount; ++stat) {
    const double sum = sums.At(stat);
    if (sum != 0) atomicAdd(p.out + i * kLawSumStatCount + stat, sum);  // A NaN is not 0.
  }
}

template <class Element>
void Launch(const LawSumsParams& p, const Gpu& gpu, cudaStream_t stream) {
  const UlpOf ulp_of = UlpOfType(p.dtype);
  if (p.summed_stride <= p.kept_stride) {
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.kept, 16 * gpu.multiprocessors));
    AlongKernel<Element><<<blocks, kThreads, 0, stream>>>(p, ulp_of);
    return;
  }
  const int64_t blocks = (p.kept + kThreads - 1) / kThreads;
  const int64_t wanted = std::max<int64_t>(1, 16 * gpu.multiprocessors / blocks);
  const int64_t parts = std::clamp<int64_t>(p.summed / kOfThread, 1, std::min<int64_t>(wanted, 65535));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  AcrossKernel<Element><<<grid, kThreads, 0, stream>>>(p, ulp_of);
}

}  // namespace

Status LawSums(const LawSumsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const auto on = static_cast<cudaStream_t>(stream);
  if (p.dtype == DType::kBFloat16) {
    Launch<__nv_bfloat16>(p, gpu, on);
  } else if (p.dtype == DType::kFloat16) {
    Launch<__half>(p, gpu, on);
  } else {
    Launch<float>(p, gpu, on);
  }
  return LaunchResult(cudaGetLastError(), "the sums of the laws");
}

}  // namespace bellwether::kernels::cuda
