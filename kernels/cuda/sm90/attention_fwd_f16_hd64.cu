#include "cuda/sm90/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdF16Hd64(AttentionMode mode, bool short_causal) {
  return FindFwdOf<__half, 64>(mode, short_causal);
}

}  // namespace bellwether::kernels::cuda::sm90
