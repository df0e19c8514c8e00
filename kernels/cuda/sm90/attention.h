// attention.h: Hopper's column of the attention dispatch.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_H_

#include "bellwether/kernels/attention.h"

namespace bellwether::kernels::cuda::sm90 {

// Parameters are validated; the GPU has compute capability 9.0, head_dim is <= 256.
Status AttentionForward(const AttentionForwardParams& params, int multiprocessors, void* stream);
Status AttentionBackward(const AttentionBackwardParams& params, void* stream);

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_H_
