#include "cuda/sm80/attention_bwd_launch.h"

#include "cuda/attention_convert.h"

namespace bellwether::kernels::cuda::sm80 {

BwdLauncher FindBwdLauncher(const AttentionBackwardParams& p, int shared_bytes_max) {
  const int64_t dim = WidestDim(p.forward);
  const bool bf16 = p.forward.dtype == DType::kBFloat16;
  if (IsMasked(p.forward)) {
    if (dim <= 64) return (bf16 ? FindMaskedBwdBf16Hd64 : FindMaskedBwdF16Hd64)(p, shared_bytes_max);
    if (dim <= 96) return (bf16 ? FindMaskedBwdBf16Hd96 : FindMaskedBwdF16Hd96)(p, shared_bytes_max);
    if (dim <= 128) return (bf16 ? FindMaskedBwdBf16Hd128 : FindMaskedBwdF16Hd128)(p, shared_bytes_max);
    return (bf16 ? FindMaskedBwdBf16Hd256 : FindMaskedBwdF16Hd256)(p, shared_bytes_max);
  }
  if (dim <= 64) return (bf16 ? FindBwdBf16Hd64 : FindBwdF16Hd64)(p, shared_bytes_max);
  if (dim <= 96) return (bf16 ? FindBwdBf16Hd96 : FindBwdF16Hd96)(p, shared_bytes_max);
  if (dim <= 128) return (bf16 ? FindBwdBf16Hd128 : FindBwdF16Hd128)(p, shared_bytes_max);
  return (bf16 ? FindBwdBf16Hd256 : FindBwdF16Hd256)(p, shared_bytes_max);
}

}  // namespace bellwether::kernels::cuda::sm80
