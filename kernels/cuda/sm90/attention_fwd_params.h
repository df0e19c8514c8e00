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

// Tensor maps as tensor_map.h makes them: boxes of 64 columns, kRows or kCols
// tokens.
struct FwdMaps {
  CUtensorMap q, k, v;
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PARAMS_H_
