// accumulator_sums.cuh: a tile in global memory to which blocks add what their
// threads hold of it in registers.
//
// It lies in the order of the registers, so that a warp adds to whole sectors.
// Word i of thread t is at (i / kUnit * threads + t) * kUnit + i % kUnit.
// kUnit is the number of words that one instruction adds.

#ifndef BELLWETHER_KERNELS_CUDA_ACCUMULATOR_SUMS_CUH_
#define BELLWETHER_KERNELS_CUDA_ACCUMULATOR_SUMS_CUH_

#include "cuda/memory.cuh"

namespace bellwether::kernels::cuda {

// Adds the first kCount words of `x`; kCount is a multiple of 4.
template <int kCount, int kThreads, int kSize>
__device__ __forceinline__ void AddToSums(float* sums, int thread, const float (&x)[kSize]) {
  static_assert(kCount % 4 == 0 && kCount <= kSize);
#if __CUDA_ARCH__ >= 900
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + i * kThreads + thread * 4),
                 "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3])
                 : "memory");
  }
#else
#pragma unroll
  for (int i = 0; i < kCount; ++i) ReduceAdd(sums + i * kThreads + thread, x[i]);
#endif
}

// What thread `thread` of the same architecture added in all.
template <int kThreads, int kCount>
__device__ __forceinline__ void LoadSums(const float* sums, int thread, float (&x)[kCount]) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(sums + i * kThreads + thread * 4);
    x[i] = v.x;
    x[i + 1] = v.y;
    x[i + 2] = v.z;
    x[i + 3] = v.w;
  }
#else
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = sums[i * kThreads + thread];
#endif
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ACCUMULATOR_SUMS_CUH_
