#include "cuda/sm90/attention_bwd_launch.h"

#include "cuda/attention_convert.h"

namespace bellwether::kernels::cuda::sm90 {

BwdLauncher FindBwdLauncher(const AttentionBackwardParams& p) {
  const bool bf16 = p.forward.dtype == DType::kBFloat16;
  const int64_t dim = WidestDim(p.forward);
  if (dim <= 64) return (bf16 ? FindBwdBf16Hd64 : FindBwdF16Hd64)(p);
  if (dim <= 128) return (bf16 ? FindBwdBf16Hd128 : FindBwdF16Hd128)(p);
  // That kernel has no registers for rowsum(dS) beside what general calls need.
  const bool sums = p.center || p.forward.stats != nullptr;
  if (HasNarrowValues(p.forward) && !(sums && IsGeneral(p))) {
    return (bf16 ? FindBwdBf16Hd192 : FindBwdF16Hd192)(p);
  }
  return (bf16 ? FindBwdBf16Hd256 : FindBwdF16Hd256)(p);
}

}  // namespace bellwether::kernels::cuda::sm90
