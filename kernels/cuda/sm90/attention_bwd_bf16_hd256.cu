#include "cuda/sm90/attention_bwd_shapes.cuh"
#include "cuda/sm90/attention_bwd_split.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdBf16Hd256(const AttentionBackwardParams& p) { return FindBwdOf<BwdSplitKernels<__nv_bfloat16>>(p); }

}  // namespace bellwether::kernels::cuda::sm90
