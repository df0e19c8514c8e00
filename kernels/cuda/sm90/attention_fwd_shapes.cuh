// attention_fwd_shapes.cuh: the tile shapes that are built; LADDER.md says why.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_

#include "cuda/sm90/attention_fwd.cuh"
#include "cuda/sm90/attention_fwd_launch.h"

namespace bellwether::kernels::cuda::sm90 {

template <class S>
FwdLauncher MakeFwdLauncher() {
  return {S::kRows, S::kCols, LaunchAttentionFwd<S>};
}

template <class T, int kHeadDim, int kWarpgroups>
FwdLauncher MakeFwdOf(AttentionMode mode) {
  if (mode == AttentionMode::kFa) {
    return MakeFwdLauncher<FwdShape<T, kHeadDim, kWarpgroups, 128, 2, SoftmaxMode::kFa>>();
  }
  return MakeFwdLauncher<FwdShape<T, kHeadDim, kWarpgroups, 128, 2, SoftmaxMode::kHp>>();
}

// Tiles of 128 keys.  Head dim 64: three warpgroups, because the exponentials
// bound it, but two where 192 rows would waste too much of a short diagonal; 128:
// two, with 232 registers.
template <class T, int kHeadDim>
FwdLauncher FindFwdOf(AttentionMode mode, bool short_causal) {
  if constexpr (kHeadDim == 64) {
    if (!short_causal) return MakeFwdOf<T, kHeadDim, 3>(mode);
  }
  return MakeFwdOf<T, kHeadDim, 2>(mode);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_
