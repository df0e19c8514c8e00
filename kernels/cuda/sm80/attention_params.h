// attention_params.h: what the portable path adds to the shared parameters: where
// the operands lie that the other path reads through tensor maps.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_PARAMS_H_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_PARAMS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda::sm80 {

struct FwdParams : AttentionFwdParams {
  const void *q, *k, *v;
  Strides q_stride, k_stride, v_stride;
};

struct BwdParams : AttentionBwdParams {
  const void *q, *v;
  Strides q_stride, v_stride;
};

// Channel 0 of a sequence's row 0 in one head.
__device__ __forceinline__ const uint16_t* TokensOf(const void* base, const Strides& stride, int sequence, int head,
                                                    int start) {
  return static_cast<const uint16_t*>(base) + sequence * stride.batch + head * stride.head + start * stride.token;
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_PARAMS_H_
