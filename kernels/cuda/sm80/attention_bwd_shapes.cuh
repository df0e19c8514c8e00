// attention_bwd_shapes.cuh: the backward kernels that are built.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_

#include "cuda/sm80/attention_bwd.cuh"
#include "cuda/sm80/attention_bwd_launch.h"

namespace bellwether::kernels::cuda::sm80 {

template <class T, int kHeadDim, int kWarps, bool kRounded>
BwdLauncher MakeBwdLauncher(bool row_sums) {
  const auto make = [](auto shape) -> BwdLauncher {
    using S = decltype(shape);
    return {S::kCols, S::kSharedBytes, LaunchAttentionBwd<S>};
  };
  if (row_sums) return make(BwdShape<T, kHeadDim, kWarps, kRounded, true>{});
  return make(BwdShape<T, kHeadDim, kWarps, kRounded, false>{});
}

template <class T, int kHeadDim, int kWarps>
BwdLauncher FindBwdMode(const AttentionBackwardParams& p) {
  const bool row_sums = p.center || p.forward.stats != nullptr;
  return p.forward.mode == AttentionMode::kHpm ? MakeBwdLauncher<T, kHeadDim, kWarps, true>(row_sums)
                                               : MakeBwdLauncher<T, kHeadDim, kWarps, false>(row_sums);
}

// Head dim 128: eight warps on 128 keys, half of that where shared memory is short.
template <class T, int kHeadDim>
BwdLauncher FindBwdOf(const AttentionBackwardParams& p, int shared_bytes_max) {
  if constexpr (kHeadDim == 128) {
    const BwdLauncher wide = FindBwdMode<T, 128, 8>(p);
    if (wide.shared_bytes <= shared_bytes_max) return wide;
  }
  return FindBwdMode<T, kHeadDim, 4>(p);
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_
