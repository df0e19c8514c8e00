#include "cuda/sm90/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdBf16Hd128(AttentionMode mode, bool causal) {
  return FindFwdHd128<__nv_bfloat16>(mode, causal);
}

}  // namespace bellwether::kernels::cuda::sm90
