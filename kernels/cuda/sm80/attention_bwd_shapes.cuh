// attention_bwd_shapes.cuh: the backward kernels that are built.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_

#include "cuda/sm80/attention_bwd.cuh"
#include "cuda/sm80/attention_bwd_launch.h"

namespace bellwether::kernels::cuda::sm80 {

template <class T, int kHeadDim, int kWarps, int kShare, int kStages, bool kRounded>
BwdLauncher MakeBwdLauncher(bool row_sums) {
  const auto make = [](auto shape) -> BwdLauncher {
    using S = decltype(shape);
    return {S::kCols, S::kSharedBytes, LaunchAttentionBwd<S>};
  };
  if (row_sums) return make(BwdShape<T, kHeadDim, kWarps, kShare, kStages, kRounded, true>{});
  return make(BwdShape<T, kHeadDim, kWarps, kShare, kStages, kRounded, false>{});
}

template <class T, int kHeadDim, int kWarps, int kShare, int kStages = 1>
BwdLauncher FindBwdMode(const AttentionBackwardParams& p) {
  const bool row_sums = p.center || p.forward.stats != nullptr;
  return p.forward.mode == AttentionMode::kHpm ? MakeBwdLauncher<T, kHeadDim, kWarps, kShare, kStages, true>(row_sums)
                                               : MakeBwdLauncher<T, kHeadDim, kWarps, kShare, kStages, false>(row_sums);
}

// Where shared memory is short, head dim 128 first has one stage and then half the
// warps and keys, and head dim 256 warps with keys of their own.
template <class T, int kHeadDim>
BwdLauncher FindBwdOf(const AttentionBackwardParams& p, int shared_bytes_max) {
  if constexpr (kHeadDim == 128) {
    const BwdLauncher apart = FindBwdMode<T, kHeadDim, 8, kHeadDim / 64, 2>(p);
    if (apart.shared_bytes <= shared_bytes_max) return apart;
  }
  if constexpr (kHeadDim >= 128) {
    const BwdLauncher wide = FindBwdMode<T, kHeadDim, 8, kHeadDim / 64>(p);
    if (wide.shared_bytes <= shared_bytes_max) return wide;
  }
  constexpr int kShare = kHeadDim == 96 || kHeadDim == 128 ? 2 : 1;
  return FindBwdMode<T, kHeadDim, 4, kShare>(p);
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_
