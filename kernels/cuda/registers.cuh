// registers.cuh: holds of the compiler's allocation and order.

#ifndef BELLWETHER_KERNELS_CUDA_REGISTERS_CUH_
#define BELLWETHER_KERNELS_CUDA_REGISTERS_CUH_

#include <cstdint>

namespace bellwether::kernels::cuda {

// Keeps the compiler from moving work on these registers across this point.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void PinRegisters(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// threadIdx.x, read anew: what is computed from it need not stay in registers.
__device__ __forceinline__ int ThreadIndexAgain() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  __builtin_assume(index >= 0 && index < 1024);
  return index;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_REGISTERS_CUH_
