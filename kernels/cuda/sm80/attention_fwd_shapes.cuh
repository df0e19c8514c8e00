// attention_fwd_shapes.cuh: the tile shapes that are built.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_SHAPES_CUH_

#include "cuda/sm80/attention_fwd.cuh"
#include "cuda/sm80/attention_fwd_launch.h"

namespace bellwether::kernels::cuda::sm80 {

// A warp's tiles of 16 rows and a step's keys are as many as registers hold: 255,
// with two CTAs a multiprocessor.  V has two stages where two such CTAs still fit: up
// to head dim 96 wherever two with one stage do, at 128 where shared memory allows.
template <class T, int kHeadDim, SoftmaxMode kMode, bool kCount, bool kMasked = false>
FwdLauncher MakeFwdLauncher(int shared_bytes_sm) {
  // A mask takes registers; so do the anchors that follow, and the two largest scores.
  constexpr bool kOneTile = kHeadDim == 256 || (kMasked && kHeadDim == 128 && !kDividesByRounded<kMode>);
  constexpr int kTiles = kOneTile ? 1 : 2;
  constexpr int kPlainCols = kHeadDim == 256 ? 32 : kHeadDim > 64 ? 64 : kMode == SoftmaxMode::kPaper ? 96 : 128;
  constexpr int kCols = !kMasked ? kPlainCols : kHeadDim <= 64 || (kOneTile && kHeadDim == 128) ? 64 : 32;
  using One = FwdShape<T, kHeadDim, kTiles, kCols, 1, kMode, kCount, kMasked>;
  using Two = FwdShape<T, kHeadDim, kTiles, kCols, 2, kMode, kCount, kMasked>;
  if constexpr (kHeadDim <= 96) {
    return {Two::kRows, LaunchAttentionFwd<Two>};
  } else {
    if constexpr (kHeadDim == 128 && !kMasked && (kMode == SoftmaxMode::kFa || kMode == SoftmaxMode::kHp)) {
      constexpr int kReservedBytes = 1024;  // of each CTA
      if (Two::kBlocks * (Two::kSharedBytes + kReservedBytes) <= shared_bytes_sm) {
        return {Two::kRows, LaunchAttentionFwd<Two>};
      }
    }
    return {One::kRows, LaunchAttentionFwd<One>};
  }
}

// kHpNolt is kFa, kLt is kHp: the caller says whether there is a residual.
template <class T, int kHeadDim>
FwdLauncher FindFwdOf(const AttentionForwardParams& p, int shared_bytes_sm) {
  using M = SoftmaxMode;
  const auto make = [&](auto mode, auto count) {
    return MakeFwdLauncher<T, kHeadDim, decltype(mode)::value, decltype(count)::value>(shared_bytes_sm);
  };
  const auto count_or_not = [&](auto mode) {
    return p.stats != nullptr ? make(mode, std::true_type{}) : make(mode, std::false_type{});
  };
  switch (p.mode) {
    case AttentionMode::kPaper:
      return make(std::integral_constant<M, M::kPaper>{}, std::true_type{});
    case AttentionMode::kSr:
      return make(std::integral_constant<M, M::kSr>{}, std::false_type{});
    case AttentionMode::kFa:
    case AttentionMode::kHpNolt:
      return count_or_not(std::integral_constant<M, M::kFa>{});
    default:
      return count_or_not(std::integral_constant<M, M::kHp>{});
  }
}

// The same with a mask, key bounds or sinks.
template <class T, int kHeadDim>
FwdLauncher FindMaskedFwdOf(const AttentionForwardParams& p, int shared_bytes_sm) {
  using M = SoftmaxMode;
  switch (p.mode) {
    case AttentionMode::kPaper:
      return MakeFwdLauncher<T, kHeadDim, M::kPaper, true, true>(shared_bytes_sm);
    case AttentionMode::kSr:
      return MakeFwdLauncher<T, kHeadDim, M::kSr, false, true>(shared_bytes_sm);
    case AttentionMode::kFa:
    case AttentionMode::kHpNolt:
      return MakeFwdLauncher<T, kHeadDim, M::kFa, true, true>(shared_bytes_sm);
    default:
      return MakeFwdLauncher<T, kHeadDim, M::kHp, true, true>(shared_bytes_sm);
  }
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_SHAPES_CUH_
