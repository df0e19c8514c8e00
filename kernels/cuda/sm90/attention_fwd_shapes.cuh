// attention_fwd_shapes.cuh: the tile shapes that are built; RESULTS.md says why.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_

#include "cuda/attention_convert.h"
#include "cuda/sm90/attention_fwd.cuh"
#include "cuda/sm90/attention_fwd_launch.h"

namespace bellwether::kernels::cuda::sm90 {

template <class S>
FwdLauncher MakeFwdLauncher() {
  return {S::kRows, S::kCols, S::kOutRows, LaunchAttentionFwd<S>};
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

// Packed sequences, key bounds, windows, caps: registers and instructions that others need not pay for.
inline bool IsGeneral(const AttentionForwardParams& p) {
  return p.cu_seqlens_q != nullptr || p.key_bounds != nullptr || p.window > 0 || p.softcap > 0;
}

// Tiles of 128 keys.  Head dim 64: three warpgroups, because the exponentials
// bound it, but two where 192 rows would waste too much of a short diagonal or
// where 160 registers do not suffice; 128: two, with 232 registers.  256: two, and
// tiles of 64 keys.
template <class T, int kHeadDim, bool kCount>
FwdLauncher FindFwdPlain(const AttentionForwardParams& p) {
  constexpr int64_t kShortMax = 1024;
  if constexpr (kHeadDim == 64) {
    if (!p.causal || p.q_len > kShortMax) return FindFwdMode<T, 64, 3, false, kCount>(p.mode);
  }
  return FindFwdMode<T, kHeadDim, 2, false, kCount>(p.mode);
}

template <class T, int kHeadDim, bool kCount>
FwdLauncher FindFwdCount(const AttentionForwardParams& p) {
  if (IsGeneral(p)) return FindFwdMode<T, kHeadDim, 2, true, kCount>(p.mode);
  // Of 96 only what is common: the rest runs as 128.
  if constexpr (kHeadDim == 128) {
    if (WidestDim(p) <= 96) return FindFwdPlain<T, 96, kCount>(p);
  }
  return FindFwdPlain<T, kHeadDim, kCount>(p);
}

template <class T, int kHeadDim>
FwdLauncher FindFwdOf(const AttentionForwardParams& p) {
  if (p.mode == AttentionMode::kPaper) {
    return MakeFwdLauncher<FwdShape<T, kHeadDim, 2, SoftmaxMode::kPaper, true, true>>();
  }
  if (p.mode == AttentionMode::kSr) {
    return MakeFwdLauncher<FwdShape<T, kHeadDim, 2, SoftmaxMode::kSr, true, false>>();
  }
  return p.stats != nullptr ? FindFwdCount<T, kHeadDim, true>(p) : FindFwdCount<T, kHeadDim, false>(p);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_
