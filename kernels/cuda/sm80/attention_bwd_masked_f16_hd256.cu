#include "cuda/sm80/attention_bwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm80 {

BwdLauncher FindMaskedBwdF16Hd256(const AttentionBackwardParams& p, int shared_bytes_max) {
  return FindBwdOf<__half, 256, true>(p, shared_bytes_max);
}

}  // namespace bellwether::kernels::cuda::sm80
