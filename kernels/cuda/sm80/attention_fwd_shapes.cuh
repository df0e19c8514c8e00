// attention_fwd_shapes.cuh: the tile shapes that are built.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_SHAPES_CUH_

#include "cuda/sm80/attention_fwd.cuh"
#include "cuda/sm80/attention_fwd_launch.h"

namespace bellwether::kernels::cuda::sm80 {

// A warp's tiles of 16 rows and a step's keys are as many as registers hold: 255,
// with two CTAs a multiprocessor.
template <class T, int kHeadDim, SoftmaxMode kMode, bool kCount>
FwdLauncher MakeFwdLauncher() {
  constexpr int kTiles = kHeadDim == 256 ? 1 : 2;
  constexpr int kCols = kHeadDim == 256 ? 32 : kHeadDim == 64 && !kCount ? 128 : 64;
  using S = FwdShape<T, kHeadDim, kTiles, kCols, kMode, kCount>;
  return {S::kRows, LaunchAttentionFwd<S>};
}

template <class T, int kHeadDim>
FwdLauncher FindFwdOf(const AttentionForwardParams& p) {
  using M = SoftmaxMode;
  if (p.mode == AttentionMode::kPaper) return MakeFwdLauncher<T, kHeadDim, M::kPaper, true>();
  if (p.mode == AttentionMode::kSr) return MakeFwdLauncher<T, kHeadDim, M::kSr, false>();
  if (p.mode == AttentionMode::kFa || p.mode == AttentionMode::kHpNolt) {
    return p.stats != nullptr ? MakeFwdLauncher<T, kHeadDim, M::kFa, true>()
                              : MakeFwdLauncher<T, kHeadDim, M::kFa, false>();
  }
  return p.stats != nullptr ? MakeFwdLauncher<T, kHeadDim, M::kHp, true>()
                            : MakeFwdLauncher<T, kHeadDim, M::kHp, false>();
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_SHAPES_CUH_
