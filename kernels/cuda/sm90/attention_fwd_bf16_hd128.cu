#include "cuda/sm90/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdBf16Hd128(AttentionMode mode, bool short_causal) {
  return FindFwdOf<__nv_bfloat16, 128>(mode, short_causal);
}

}  // namespace bellwether::kernels::cuda::sm90
