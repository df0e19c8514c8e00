// block_sum.cuh: a sum over the threads of a block.

#ifndef BELLWETHER_KERNELS_CUDA_BLOCK_SUM_CUH_
#define BELLWETHER_KERNELS_CUDA_BLOCK_SUM_CUH_

#include <cuda_runtime.h>

namespace bellwether::kernels::cuda {

// The sum of x, in every thread and always in one order.  scratch: a double for each warp,
// in shared memory, for nothing else.  All threads call it.
__device__ __forceinline__ double SumOverBlock(double x, double* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  __syncthreads();  // Of what came before: the scratch is free, too.
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += scratch[warp];
  return sum;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_BLOCK_SUM_CUH_
