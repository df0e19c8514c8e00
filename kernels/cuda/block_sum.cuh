// block_sum.cuh: sums over the threads of a block, and over those of a warp.

#ifndef BELLWETHER_KERNELS_CUDA_BLOCK_SUM_CUH_
#define BELLWETHER_KERNELS_CUDA_BLOCK_SUM_CUH_

#include <cuda_runtime.h>

namespace bellwether::kernels::cuda {

// The sum of x, in every thread and always in one order.  All threads of the warp call it.
__device__ __forceinline__ double SumOverWarp(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The same over a block.  scratch: a double for each warp,
// in shared memory, for nothing else.  All threads call it.
__device__ __forceinline__ double SumOverBlock(double x, double* scratch) {
  x = SumOverWarp(x);
  __syncthreads();  // Of what came before: the scratch is free, too.
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += scratch[warp];
  return sum;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_BLOCK_SUM_CUH_
