#include "cuda/sm90/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdF16Hd128(const AttentionForwardParams& p) { return FindFwdOf<__half, 128>(p); }

}  // namespace bellwether::kernels::cuda::sm90
