// attention_bwd_shares.h: how many CTAs of the Hopper backward share the steps of a tile of keys.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SHARES_H_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SHARES_H_

#include "bellwether/kernels/attention.h"

namespace bellwether::kernels::cuda {

// 1 where tiles fill a whole Hopper GPU.  By the call alone, as the workspace is: gradients do
// not depend on the GPU.
int BackwardShares(const AttentionForwardParams& params);

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SHARES_H_
