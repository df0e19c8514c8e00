#include "cuda/sm90/attention_bwd_shapes.cuh"
#include "cuda/sm90/attention_bwd_wide.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdBf16Hd192(const AttentionBackwardParams& p) { return FindBwdOf<BwdWideKernels<__nv_bfloat16>>(p); }

}  // namespace bellwether::kernels::cuda::sm90
