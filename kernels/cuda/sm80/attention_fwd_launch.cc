#include "cuda/sm80/attention_fwd_launch.h"

#include "cuda/attention_convert.h"

namespace bellwether::kernels::cuda::sm80 {

FwdLauncher FindFwdLauncher(const AttentionForwardParams& p, int shared_bytes_sm) {
  const int64_t dim = WidestDim(p);
  const bool bf16 = p.dtype == DType::kBFloat16;
  if (IsMasked(p)) {
    if (dim <= 64) return (bf16 ? FindMaskedFwdBf16Hd64 : FindMaskedFwdF16Hd64)(p, shared_bytes_sm);
    if (dim <= 96) return (bf16 ? FindMaskedFwdBf16Hd96 : FindMaskedFwdF16Hd96)(p, shared_bytes_sm);
    if (dim <= 128) return (bf16 ? FindMaskedFwdBf16Hd128 : FindMaskedFwdF16Hd128)(p, shared_bytes_sm);
    return (bf16 ? FindMaskedFwdBf16Hd256 : FindMaskedFwdF16Hd256)(p, shared_bytes_sm);
  }
  if (dim <= 64) return (bf16 ? FindFwdBf16Hd64 : FindFwdF16Hd64)(p, shared_bytes_sm);
  if (dim <= 96) return (bf16 ? FindFwdBf16Hd96 : FindFwdF16Hd96)(p, shared_bytes_sm);
  if (dim <= 128) return (bf16 ? FindFwdBf16Hd128 : FindFwdF16Hd128)(p, shared_bytes_sm);
  return (bf16 ? FindFwdBf16Hd256 : FindFwdF16Hd256)(p, shared_bytes_sm);
}

}  // namespace bellwether::kernels::cuda::sm80
