#include "cuda/sm90/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdF16Hd256(const AttentionForwardParams& p) { return FindFwdOf<__half, 256>(p); }

}  // namespace bellwether::kernels::cuda::sm90
