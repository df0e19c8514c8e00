// attention_fwd_params.h: what the Hopper forward adds to the shared parameters.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PARAMS_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PARAMS_H_

#include <cuda.h>

#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda::sm90 {

struct FwdParams : AttentionFwdParams {
  int* counter;  // zeroed; null = tiles are taken round robin
  int tiles;     // numbers of tiles, some of them empty if packed
};

// Rows of O that a warp has; a box of O or O_lo has these or half of them.
inline constexpr int kFwdOutputRows = 16;

// Tensor maps as tensor_map.h makes them: boxes of 64 columns, kRows, kCols or
// kOutRows tokens.  o_lo is not read if there is none.
struct FwdMaps {
  CUtensorMap q, k, v, o, o_lo;
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PARAMS_H_
