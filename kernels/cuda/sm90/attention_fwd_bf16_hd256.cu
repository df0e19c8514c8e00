#include "cuda/sm90/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdBf16Hd256(const AttentionForwardParams& p) { return FindFwdOf<__nv_bfloat16, 256>(p); }

}  // namespace bellwether::kernels::cuda::sm90
