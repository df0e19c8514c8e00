#include "cuda/sm90/attention_bwd.cuh"
#include "cuda/sm90/attention_bwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdF16Hd128(const AttentionBackwardParams& p) { return FindBwdOf<BwdKernels<__half, 128>>(p); }

}  // namespace bellwether::kernels::cuda::sm90
