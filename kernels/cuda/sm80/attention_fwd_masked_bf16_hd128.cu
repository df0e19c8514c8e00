#include "cuda/sm80/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm80 {

FwdLauncher FindMaskedFwdBf16Hd128(const AttentionForwardParams& p, int shared_bytes_sm) {
  return FindMaskedFwdOf<__nv_bfloat16, 128>(p, shared_bytes_sm);
}

}  // namespace bellwether::kernels::cuda::sm80
