// attention_bwd_scores.cuh: from S^T and dP^T to P^T and dS^T, in accumulators whose
// columns are queries.
//
// What belongs to a query lies in shared memory, one float each: `lse`, `delta` and
// `inverse` are the addresses of this thread's first query.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SCORES_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SCORES_CUH_

#include "cuda/memory.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda {

// P = exp2(x - L); kRounded: what the forward's product read, round(exp2(x - a)) / lt.
// `pr` may be `s`.
template <class T, bool kRounded, int kCount>
__device__ __forceinline__ void ToProbabilities(const float (&s)[kCount], float (&pr)[kCount], float scale_log2,
                                                uint32_t lse, uint32_t inverse) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 l = LoadShared2(lse + i * 8);
    pr[i] = Exp2(fmaf(s[i], scale_log2, -l.x));
    pr[i + 1] = Exp2(fmaf(s[i + 1], scale_log2, -l.y));
    pr[i + 2] = Exp2(fmaf(s[i + 2], scale_log2, -l.x));
    pr[i + 3] = Exp2(fmaf(s[i + 3], scale_log2, -l.y));
    if constexpr (kRounded) {
      const float2 v = LoadShared2(inverse + i * 8);
      const float2 low = UnpackPair<T>(PackPair<T>(pr[i], pr[i + 1]));
      const float2 high = UnpackPair<T>(PackPair<T>(pr[i + 2], pr[i + 3]));
      pr[i] = low.x * v.x;
      pr[i + 1] = low.y * v.y;
      pr[i + 2] = high.x * v.x;
      pr[i + 3] = high.y * v.y;
    }
  }
}

// What was added to the capped scores, in log2 units: nothing.
struct NoBias {
  static constexpr bool kNone = true;
};

// dP - delta times the derivative of the cap, plus delta.  The capped score comes
// back from P, so that it need not be kept: 1 - tanh^2, in [0, 1].  bias(i) was added to it.
template <bool kRounded, int kCount, class Bias = NoBias>
__device__ __forceinline__ void ApplyCapDerivative(float (&dp)[kCount], const float (&pr)[kCount], float scale_log2,
                                                   uint32_t lse, uint32_t delta, uint32_t inverse,
                                                   const Bias& bias = {}) {
  const float inverse_scale = 1.f / scale_log2;
  const auto derivative = [&](float x, float probability, float row_lse, float d) {
    const float t = fminf(fmaxf((Log2(probability) + row_lse) * inverse_scale, -1.f), 1.f);
    return fmaf(x - d, 1.f - t * t, d);
  };
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float2 l = LoadShared2(lse + i * 8);
    const float2 d = LoadShared2(delta + i * 8);
    if constexpr (kRounded) {  // P carries a factor 1 / lt
      const float2 v = LoadShared2(inverse + i * 8);
      l.x -= Log2(v.x);
      l.y -= Log2(v.y);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float row_lse = j % 2 == 0 ? l.x : l.y;
      if constexpr (!Bias::kNone) row_lse -= bias(i + j);
      dp[i + j] = derivative(dp[i + j], pr[i + j], row_lse, j % 2 == 0 ? d.x : d.y);
    }
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SCORES_CUH_
