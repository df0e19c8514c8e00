#include "cuda/sm80/attention_bwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm80 {

BwdLauncher FindMaskedBwdBf16Hd128(const AttentionBackwardParams& p, int shared_bytes_max) {
  return FindBwdOf<__nv_bfloat16, 128, true>(p, shared_bytes_max);
}

}  // namespace bellwether::kernels::cuda::sm80
