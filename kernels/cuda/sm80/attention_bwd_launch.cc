#include "cuda/sm80/attention_bwd_launch.h"

namespace bellwether::kernels::cuda::sm80 {

BwdLauncher FindBwdLauncher(const AttentionBackwardParams& p, int shared_bytes_max) {
  const bool bf16 = p.forward.dtype == DType::kBFloat16;
  if (p.forward.head_dim <= 64) return (bf16 ? FindBwdBf16Hd64 : FindBwdF16Hd64)(p, shared_bytes_max);
  if (p.forward.head_dim <= 96) return (bf16 ? FindBwdBf16Hd96 : FindBwdF16Hd96)(p, shared_bytes_max);
  if (p.forward.head_dim <= 128) return (bf16 ? FindBwdBf16Hd128 : FindBwdF16Hd128)(p, shared_bytes_max);
  return (bf16 ? FindBwdBf16Hd256 : FindBwdF16Hd256)(p, shared_bytes_max);
}

}  // namespace bellwether::kernels::cuda::sm80
