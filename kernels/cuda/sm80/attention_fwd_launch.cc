#include "cuda/sm80/attention_fwd_launch.h"

namespace bellwether::kernels::cuda::sm80 {

FwdLauncher FindFwdLauncher(const AttentionForwardParams& p, int shared_bytes_sm) {
  const bool bf16 = p.dtype == DType::kBFloat16;
  if (p.head_dim <= 64) return (bf16 ? FindFwdBf16Hd64 : FindFwdF16Hd64)(p, shared_bytes_sm);
  if (p.head_dim <= 96) return (bf16 ? FindFwdBf16Hd96 : FindFwdF16Hd96)(p, shared_bytes_sm);
  if (p.head_dim <= 128) return (bf16 ? FindFwdBf16Hd128 : FindFwdF16Hd128)(p, shared_bytes_sm);
  return (bf16 ? FindFwdBf16Hd256 : FindFwdF16Hd256)(p, shared_bytes_sm);
}

}  // namespace bellwether::kernels::cuda::sm80
