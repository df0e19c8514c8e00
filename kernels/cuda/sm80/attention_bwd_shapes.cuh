// attention_bwd_shapes.cuh: the backward kernels that are built.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_

#include "cuda/attention_workspace.h"
#include "cuda/sm80/attention_bwd.cuh"
#include "cuda/sm80/attention_bwd_launch.h"

namespace bellwether::kernels::cuda::sm80 {

template <class S>
BwdLauncher MakeBwdLauncher() {
  return {S::kCols, S::kSharedBytes, LaunchAttentionBwd<S>};
}

// Masked ones of mode hpm are built with row sums alone.
template <class T, int kHeadDim, bool kMasked, int kWarps, int kShare, int kStages = 1>
BwdLauncher FindBwdMode(const AttentionBackwardParams& p) {
  const bool row_sums = NeedsRowSums(p);
  if (p.forward.mode != AttentionMode::kHpm) {
    return row_sums ? MakeBwdLauncher<BwdShape<T, kHeadDim, kWarps, kShare, kStages, false, true, kMasked>>()
                    : MakeBwdLauncher<BwdShape<T, kHeadDim, kWarps, kShare, kStages, false, false, kMasked>>();
  }
  if constexpr (!kMasked) {
    if (!row_sums) return MakeBwdLauncher<BwdShape<T, kHeadDim, kWarps, kShare, kStages, true, false, kMasked>>();
  }
  return MakeBwdLauncher<BwdShape<T, kHeadDim, kWarps, kShare, kStages, true, true, kMasked>>();
}

// Where shared memory is short, head dim 128 first has one stage and then half the
// warps and keys, and head dim 256 warps with keys of their own.
template <class T, int kHeadDim, bool kMasked = false>
BwdLauncher FindBwdOf(const AttentionBackwardParams& p, int shared_bytes_max) {
  if constexpr (kHeadDim == 128) {
    const BwdLauncher apart = FindBwdMode<T, kHeadDim, kMasked, 8, kHeadDim / 64, 2>(p);
    if (apart.shared_bytes <= shared_bytes_max) return apart;
  }
  if constexpr (kHeadDim == 256 || (kHeadDim == 128 && !kMasked)) {
    const BwdLauncher wide = FindBwdMode<T, kHeadDim, kMasked, 8, kHeadDim / 64>(p);
    if (wide.shared_bytes <= shared_bytes_max) return wide;
  }
  constexpr int kShare = kHeadDim == 96 || kHeadDim == 128 ? 2 : 1;
  return FindBwdMode<T, kHeadDim, kMasked, 4, kShare>(p);
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_SHAPES_CUH_
