// memory.cuh: accesses to memory that CUDA C++ has no name for.  Every wrapper is
// one instruction; shared memory addresses are 32-bit, as the instructions take them.

#ifndef BELLWETHER_KERNELS_CUDA_MEMORY_CUH_
#define BELLWETHER_KERNELS_CUDA_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace bellwether::kernels::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ float2 LoadShared2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Additions to global memory; their order is not fixed.
__device__ __forceinline__ void ReduceAdd(float* p, float a) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(a) : "memory");
}

__device__ __forceinline__ void ReduceAddRelease(int* p, int a) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(a) : "memory");
}

__device__ __forceinline__ int LoadAcquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_MEMORY_CUH_
