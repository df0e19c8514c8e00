#include "cuda/sm90/attention_bwd_shapes.cuh"
#include "cuda/sm90/attention_bwd_wide.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdF16Hd192(const AttentionBackwardParams& p) { return FindBwdOf<BwdWideKernels<__half>>(p); }

}  // namespace bellwether::kernels::cuda::sm90
