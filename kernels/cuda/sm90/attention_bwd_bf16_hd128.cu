#include "cuda/sm90/attention_bwd.cuh"
#include "cuda/sm90/attention_bwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdBf16Hd128(const AttentionBackwardParams& p) {
  if (IsPlain(p) && WidestDim(p.forward) <= 96) {
    return BwdKernels<__nv_bfloat16, 128, 96>::Make<false, false, false, false>();
  }
  return FindBwdOf<BwdKernels<__nv_bfloat16, 128>>(p);
}

}  // namespace bellwether::kernels::cuda::sm90
