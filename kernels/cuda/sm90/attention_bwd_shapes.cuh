// attention_bwd_shapes.cuh: the backward kernels that are built.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_

#include "cuda/sm90/attention_bwd.cuh"
#include "cuda/sm90/attention_bwd_launch.h"

namespace bellwether::kernels::cuda::sm90 {

// The errors of delta are exact where registers suffice for that; else they come from
// rowsum(dS), which has the noise of rounding dS.
template <class T, int kHeadDim, bool kGeneral, bool kRounded>
BwdLauncher MakeBwdLauncher(const AttentionBackwardParams& p) {
  const auto make = [](auto shape) -> BwdLauncher {
    using S = decltype(shape);
    return {S::kRows, S::kCount, LaunchAttentionBwd<S>};
  };
  constexpr bool kExact = !kGeneral && !(kRounded && kHeadDim == 64);
  const bool counts = p.forward.stats != nullptr;
  if (p.center || (!kExact && counts)) return make(BwdShape<T, kHeadDim, kGeneral, kRounded, true, false>{});
  if constexpr (kExact) {
    if (counts) return make(BwdShape<T, kHeadDim, false, kRounded, false, true>{});
  }
  return make(BwdShape<T, kHeadDim, kGeneral, kRounded, false, false>{});
}

template <class T, int kHeadDim>
BwdLauncher FindBwdOf(const AttentionBackwardParams& p) {
  const AttentionForwardParams& f = p.forward;
  const bool general = f.cu_seqlens_q != nullptr || f.window > 0 || f.softcap > 0 || p.deterministic;
  if (f.mode == AttentionMode::kHpm) {
    return general ? MakeBwdLauncher<T, kHeadDim, true, true>(p) : MakeBwdLauncher<T, kHeadDim, false, true>(p);
  }
  return general ? MakeBwdLauncher<T, kHeadDim, true, false>(p) : MakeBwdLauncher<T, kHeadDim, false, false>(p);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_
