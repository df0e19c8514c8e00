#include "cuda/sm90/attention_bwd.cuh"
#include "cuda/sm90/attention_bwd_shapes.cuh"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdF16Hd128(const AttentionBackwardParams& p) {
  if (IsPlain(p) && WidestDim(p.forward) <= 96) {
    return BwdKernels<__half, 128, 96>::Make<false, false, false, false>();
  }
  return FindBwdOf<BwdKernels<__half, 128>>(p);
}

}  // namespace bellwether::kernels::cuda::sm90
