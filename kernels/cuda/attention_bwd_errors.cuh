// attention_bwd_errors.cuh: the errors of delta, for the statistics: of each query
// e = -sum_j P_j (dP_j - delta), with P and dP as the backward has them, before dS is
// rounded.  What rounding adds to rowsum(dS) has no bias but is larger than what hp
// leaves of e.
//
// Only in steps whose rows count, since a query's keys lie across a warp.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_ERRORS_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_ERRORS_CUH_

#include "cuda/memory.cuh"

namespace bellwether::kernels::cuda {

// Adds a warp's part to the sums of 2 kCount queries.  term(i, delta) is P (dP - delta)
// of accumulator i, or a sum of such; `delta` is the address of this thread's first.
// Eight queries at a time, since more take registers; kEights of these in one addition,
// 4, or 1 for the same reason.
template <int kEights, int kCount, class Term>
__device__ __forceinline__ void AddErrors(float* sums, uint32_t delta, int lane, const Term& term) {
  const bool odd = lane / 4 % 2;
  float mine = 0.f;  // of query lane / 8 * 8 + lane % 4 * 2 + odd
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 d = LoadShared2(delta + i * 8);
    const float even_query = term(i, d.x) + term(i + 2, d.x), odd_query = term(i + 1, d.y) + term(i + 3, d.y);
    float sum = odd ? odd_query : even_query;
    sum += __shfl_xor_sync(0xffffffffu, odd ? even_query : odd_query, 4);
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    const int eight = i / 4 % kEights;
    if (kEights == 1 || lane / 8 == eight) mine = sum;
    if ((eight == kEights - 1 || i + 4 == kCount) && lane / 8 <= eight) {
      ReduceAdd(sums + (i / 4 - eight) * 8 + lane / 8 * 8 + lane % 4 * 2 + odd, -mine);
    }
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_ERRORS_CUH_
