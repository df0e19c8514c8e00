#include "cuda/sm90/attention_bwd_pair.cuh"
#include "cuda/sm90/attention_bwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdBf16Hd256(const AttentionBackwardParams& p) { return FindBwdOf<BwdPairKernels<__nv_bfloat16>>(p); }

}  // namespace bellwether::kernels::cuda::sm90
