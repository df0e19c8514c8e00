// attention_bwd_sinks.cuh: the gradient of the sinks, -sum_T P_T delta_T with P_T the
// probability that the sink has in row T.
//
// Work      a block per head adds what PrepareBwdKernel left of its rows, always in one
//           order: the sum repeats bit for bit.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SINKS_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SINKS_CUH_

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda {

inline constexpr int kSumSinksThreads = 1024;

// Grid: [heads].
template <int kThreads>
__global__ void __launch_bounds__(kThreads) SumSinksKernel(const __grid_constant__ AttentionBwdParams p) {
  static_assert(kThreads == 1024, "a warp's lanes add the warps' sums");
  __shared__ float sums[kThreads / 32];
  const int head = blockIdx.x, sequences = p.seq.q_starts != nullptr ? 1 : p.seq.batch;
  const float sink = p.mask.sinks[head] * kLog2E;
  float sum = 0.f;
  for (int sequence = 0; sequence < sequences; ++sequence) {
    const int64_t base = head * p.rows_per_head + sequence * p.rows_per_sequence;
    for (int64_t row = base + threadIdx.x; row < base + p.rows_per_head; row += kThreads) {
      float weight = sink == -INFINITY ? 0.f : Exp2(sink - p.lse_log2[row]);  // 0 beyond the last row
      if (p.rounded) weight *= p.inverse[row];
      sum -= weight * p.delta[row];
    }
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = sums[threadIdx.x];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  if (threadIdx.x == 0) p.d_sinks[head] = sum;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SINKS_CUH_
