#include "cuda/sm90/attention_bwd_launch.h"

#include "cuda/sm90/attention_bwd.cuh"

namespace bellwether::kernels::cuda::sm90 {
namespace {

template <class S>
BwdLauncher MakeBwdLauncher() {
  return {S::kRows, LaunchAttentionBwd<S>};
}

template <class T>
BwdLauncher FindBwdOf(int64_t head_dim) {
  if (head_dim == 64) return MakeBwdLauncher<BwdShape<T, 64>>();
  if (head_dim == 128) return MakeBwdLauncher<BwdShape<T, 128>>();
  return {};
}

}  // namespace

BwdLauncher FindBwdLauncher(const AttentionForwardParams& p) {
  if (p.dtype == DType::kBFloat16) return FindBwdOf<__nv_bfloat16>(p.head_dim);
  return FindBwdOf<__half>(p.head_dim);
}

}  // namespace bellwether::kernels::cuda::sm90
