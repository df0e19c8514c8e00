#include "cuda/sm90/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdF16Hd128(AttentionMode mode, bool causal) {
  return FindFwdHd128<__half>(mode, causal);
}

}  // namespace bellwether::kernels::cuda::sm90
