// How far gradients are beyond their second moments: see moment_lag.h.
//
// Work      a block for each part, whose descriptions are the kernel's parameters.
// Memory    reads each element by itself: a part's lie far from each other.
// Numerics  double as on the CPU, in one order.
// Limits    compute capability 8.0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends.h"
#include "cuda/block_sum.cuh"
#include "cuda/launch.h"
#include "error.h"
#include "moment_lag_parts.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kLagThreads = 1024;
constexpr int kAhead = 4;  // Elements that a thread waits for at once.

struct LagEntry {
  const void* grad;
  const void* second;
  int64_t count, stride;
  double beta2, least, steps;
  const float* steps_at;
  unsigned char grad_dtype, second_dtype;
};

struct LagKernelParams {
  LagEntry parts[kMomentLagPartsMax];
  const float* scale;
  const float* skip;
  double* out;  // [count][kMomentLagStatCount]
};
static_assert(sizeof(LagKernelParams) <= 4096);

__device__ __forceinline__ float ReadOne(const void* data, unsigned char dtype, int64_t at) {
  switch (static_cast<DType>(dtype)) {
    case DType::kBFloat16:
      return static_cast<float>(static_cast<const __nv_bfloat16*>(data)[at]);
    case DType::kFloat16:
      return static_cast<float>(static_cast<const __half*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

__device__ __forceinline__ bool IsFiniteLag(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Grid: parts.  Block: kLagThreads.
__global__ void __launch_bounds__(kLagThreads) LagKernel(const LagKernelParams p) {
  __shared__ double scratch[kLagThreads / 32];
  __shared__ double of_v, of_square;
  if (p.skip != nullptr && *p.skip > 0) return;  // All threads of it.
  const LagEntry& part = p.parts[blockIdx.x];
  if (part.grad == nullptr) return;
  if (threadIdx.x == 0) {
    const double steps = part.steps + (part.steps_at != nullptr ? static_cast<double>(*part.steps_at) : 0.0);
    const double correction = 1 - pow(part.beta2, steps);
    of_v = part.beta2 / correction;
    of_square = (1 - part.beta2) / correction;
  }
  __syncthreads();
  const double factor = p.scale != nullptr ? 1 / static_cast<double>(*p.scale) : 1.0;
  const float largest = LargestOf(static_cast<DType>(part.grad_dtype));
  double lag = 0, saturated = 0;
  for (int64_t from = threadIdx.x; from < part.count; from += int64_t{kLagThreads} * kAhead) {
    float g[kAhead], v[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t element = from + int64_t{i} * kLagThreads;
      const bool there = element < part.count;
      g[i] = there ? ReadOne(part.grad, part.grad_dtype, element * part.stride) : 0.0f;
      v[i] = there ? ReadOne(part.second, part.second_dtype, element * part.stride) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!(fabsf(g[i]) < largest)) saturated += 1;  // A NaN is, too.
      if (!IsFiniteLag(g[i]) || !IsFiniteLag(v[i])) continue;
      const double value = static_cast<double>(g[i]) * factor, square = value * value;
      if (square > 0) lag += square / fmax(of_v * static_cast<double>(v[i]) + of_square * square, part.least);
    }
  }
  lag = SumOverBlock(lag, scratch);
  saturated = SumOverBlock(saturated, scratch);
  if (threadIdx.x == 0) {
    double* const out = p.out + int64_t{blockIdx.x} * kMomentLagStatCount;
    out[kMomentLagMax] = fmax(out[kMomentLagMax], lag / static_cast<double>(part.count));
    out[kMomentLagSaturated] += saturated;
  }
}

}  // namespace

Status MomentLags(const MomentLagsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  LagKernelParams kernel = {};
  for (int64_t i = 0; i < p.count; ++i) {
    const MomentLagPart& part = p.parts[i];
    LagEntry& entry = kernel.parts[i];
    entry = {part.grad,
             part.second,
             part.count,
             part.stride,
             part.beta2,
             part.eps * part.eps,
             part.steps,
             part.steps_at,
             static_cast<unsigned char>(part.grad_dtype),
             static_cast<unsigned char>(part.second_dtype)};
  }
  kernel.scale = p.scale;
  kernel.skip = p.skip;
  kernel.out = p.out;
  LagKernel<<<static_cast<unsigned>(p.count), kLagThreads, 0, static_cast<cudaStream_t>(stream)>>>(kernel);
  return LaunchResult(cudaGetLastError(), "the lags of second moments");
}

}  // namespace bellwether::kernels::cuda
