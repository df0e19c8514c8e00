// attention_fwd_shapes.cuh: the tile shapes that are built; RESULTS.md says why.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_

#include "cuda/sm90/attention_fwd.cuh"
#include "cuda/sm90/attention_fwd_launch.h"

namespace bellwether::kernels::cuda::sm90 {

template <class S>
FwdLauncher MakeFwdLauncher() {
  return {S::kRows, S::kCols, LaunchAttentionFwd<S>};
}

// kHpNolt is kFa, kLt is kHp: the caller says whether there is a residual.
template <class T, int kHeadDim, int kWarpgroups, bool kGeneral, bool kCount>
FwdLauncher FindFwdMode(AttentionMode mode) {
  using M = SoftmaxMode;
  if (mode == AttentionMode::kFa || mode == AttentionMode::kHpNolt) {
    return MakeFwdLauncher<FwdShape<T, kHeadDim, kWarpgroups, M::kFa, kGeneral, kCount>>();
  }
  return MakeFwdLauncher<FwdShape<T, kHeadDim, kWarpgroups, M::kHp, kGeneral, kCount>>();
}

// Tiles of 128 keys.  Head dim 64: three warpgroups, because the exponentials
// bound it, but two where 192 rows would waste too much of a short diagonal or
// where 160 registers do not suffice; 128: two, with 232 registers.
template <class T, int kHeadDim>
FwdLauncher FindFwdOf(const AttentionForwardParams& p) {
  constexpr int64_t kShortMax = 1024;
  if (p.mode == AttentionMode::kPaper) {
    return MakeFwdLauncher<FwdShape<T, kHeadDim, 2, SoftmaxMode::kPaper, true, true>>();
  }
  if (p.mode == AttentionMode::kSr) {
    return MakeFwdLauncher<FwdShape<T, kHeadDim, 2, SoftmaxMode::kSr, true, false>>();
  }
  if (p.cu_seqlens_q != nullptr || p.window > 0 || p.softcap > 0) {
    return p.stats != nullptr ? FindFwdMode<T, kHeadDim, 2, true, true>(p.mode)
                              : FindFwdMode<T, kHeadDim, 2, true, false>(p.mode);
  }
  if (p.stats != nullptr) return FindFwdMode<T, kHeadDim, 2, false, true>(p.mode);
  if constexpr (kHeadDim == 64) {
    if (!p.causal || p.q_len > kShortMax) return FindFwdMode<T, 64, 3, false, false>(p.mode);
  }
  return FindFwdMode<T, kHeadDim, 2, false, false>(p.mode);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_
