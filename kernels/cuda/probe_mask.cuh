// probe_mask.cuh: what a mask's tensor adds to scores, read where it lies.

#ifndef BELLWETHER_KERNELS_CUDA_PROBE_MASK_CUH_
#define BELLWETHER_KERNELS_CUDA_PROBE_MASK_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "bellwether/kernels/probe.h"

namespace bellwether::kernels::cuda {

// Where a mask's row begins, in elements.
__device__ __forceinline__ int64_t MaskRowAt(const ProbeMask& mask, int64_t batch, int64_t head, int64_t row) {
  return batch * mask.batch_stride + head * mask.head_stride + row * mask.row_stride;
}

// What is added to a score; -inf hides the key.
__device__ __forceinline__ float BiasAt(const ProbeMask& mask, int64_t at) {
  float value, hidden = kHiddenFrom;
  switch (mask.dtype) {
    case MaskDType::kBool:
      return static_cast<const uint8_t*>(mask.data)[at] != 0 ? 0.f : -INFINITY;
    case MaskDType::kBFloat16:
      value = __bfloat162float(static_cast<const __nv_bfloat16*>(mask.data)[at]);
      hidden = kHiddenFromBf16;
      break;
    case MaskDType::kFloat16:
      value = __half2float(static_cast<const __half*>(mask.data)[at]);
      break;
    default:
      value = static_cast<const float*>(mask.data)[at];
  }
  return value <= hidden ? -INFINITY : value;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_PROBE_MASK_CUH_
