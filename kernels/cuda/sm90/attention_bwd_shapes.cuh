// attention_bwd_shapes.cuh: the backward kernels that are built.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_

#include "cuda/sm90/attention_bwd.cuh"
#include "cuda/sm90/attention_bwd_launch.h"

namespace bellwether::kernels::cuda::sm90 {

template <class T, int kHeadDim, bool kGeneral, bool kRounded>
BwdLauncher MakeBwdLauncher(bool row_sums) {
  const auto make = [](auto shape) -> BwdLauncher {
    using S = decltype(shape);
    return {S::kRows, LaunchAttentionBwd<S>};
  };
  if (row_sums) return make(BwdShape<T, kHeadDim, kGeneral, kRounded, true>{});
  return make(BwdShape<T, kHeadDim, kGeneral, kRounded, false>{});
}

template <class T, int kHeadDim>
BwdLauncher FindBwdOf(const AttentionBackwardParams& p) {
  const AttentionForwardParams& f = p.forward;
  const bool general = f.cu_seqlens_q != nullptr || f.window > 0 || f.softcap > 0 || p.deterministic;
  const bool row_sums = p.center || f.stats != nullptr;
  if (f.mode == AttentionMode::kHpm) {
    return general ? MakeBwdLauncher<T, kHeadDim, true, true>(row_sums)
                   : MakeBwdLauncher<T, kHeadDim, false, true>(row_sums);
  }
  return general ? MakeBwdLauncher<T, kHeadDim, true, false>(row_sums)
                 : MakeBwdLauncher<T, kHeadDim, false, false>(row_sums);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SHAPES_CUH_
