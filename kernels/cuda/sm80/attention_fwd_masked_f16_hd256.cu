#include "cuda/sm80/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm80 {

FwdLauncher FindMaskedFwdF16Hd256(const AttentionForwardParams& p, int shared_bytes_sm) {
  return FindMaskedFwdOf<__half, 256>(p, shared_bytes_sm);
}

}  // namespace bellwether::kernels::cuda::sm80
