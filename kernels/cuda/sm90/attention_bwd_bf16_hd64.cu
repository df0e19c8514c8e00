#include "cuda/sm90/attention_bwd.cuh"
#include "cuda/sm90/attention_bwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdBf16Hd64(const AttentionBackwardParams& p) { return FindBwdOf<BwdKernels<__nv_bfloat16, 64>>(p); }

}  // namespace bellwether::kernels::cuda::sm90
