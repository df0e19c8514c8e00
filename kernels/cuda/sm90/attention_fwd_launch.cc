#include "cuda/sm90/attention_fwd_launch.h"

#include "cuda/attention_convert.h"

namespace bellwether::kernels::cuda::sm90 {

FwdLauncher FindFwdLauncher(const AttentionForwardParams& p) {
  const bool bf16 = p.dtype == DType::kBFloat16;
  const int64_t dim = WidestDim(p);
  if (dim <= 64) return (bf16 ? FindFwdBf16Hd64 : FindFwdF16Hd64)(p);
  if (dim <= 128) return (bf16 ? FindFwdBf16Hd128 : FindFwdF16Hd128)(p);
  return (bf16 ? FindFwdBf16Hd256 : FindFwdF16Hd256)(p);
}

}  // namespace bellwether::kernels::cuda::sm90
