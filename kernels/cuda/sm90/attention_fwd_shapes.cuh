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

// Head dim 64: three warpgroups, because the exponentials bound it.
template <class T>
FwdLauncher FindFwdHd64(AttentionMode mode, bool /*causal*/) {
  switch (mode) {
    case AttentionMode::kFa:
      return MakeFwdLauncher<FwdShape<T, 64, 3, 128, 2, SoftmaxMode::kFa>>();
    case AttentionMode::kHp:
      return MakeFwdLauncher<FwdShape<T, 64, 3, 128, 2, SoftmaxMode::kHp>>();
    case AttentionMode::kHpm:
      return MakeFwdLauncher<FwdShape<T, 64, 3, 128, 2, SoftmaxMode::kHpm>>();
  }
  return {};
}

// Head dim 128: two warpgroups with 232 registers; without a diagonal the wider
// tile of keys fits better.
template <class T>
FwdLauncher FindFwdHd128(AttentionMode mode, bool causal) {
  constexpr int kWide = 160;
  switch (mode) {
    case AttentionMode::kFa:
      return causal ? MakeFwdLauncher<FwdShape<T, 128, 2, 128, 2, SoftmaxMode::kFa>>()
                    : MakeFwdLauncher<FwdShape<T, 128, 2, kWide, 2, SoftmaxMode::kFa>>();
    case AttentionMode::kHp:
      return causal ? MakeFwdLauncher<FwdShape<T, 128, 2, 128, 2, SoftmaxMode::kHp>>()
                    : MakeFwdLauncher<FwdShape<T, 128, 2, kWide, 2, SoftmaxMode::kHp>>();
    case AttentionMode::kHpm:
      return causal ? MakeFwdLauncher<FwdShape<T, 128, 2, 128, 2, SoftmaxMode::kHpm>>()
                    : MakeFwdLauncher<FwdShape<T, 128, 2, kWide, 2, SoftmaxMode::kHpm>>();
  }
  return {};
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_SHAPES_CUH_
