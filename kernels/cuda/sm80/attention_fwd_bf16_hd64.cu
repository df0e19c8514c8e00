#include "cuda/sm80/attention_fwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm80 {

FwdLauncher FindFwdBf16Hd64(const AttentionForwardParams& p) { return FindFwdOf<__nv_bfloat16, 64>(p); }

}  // namespace bellwether::kernels::cuda::sm80
