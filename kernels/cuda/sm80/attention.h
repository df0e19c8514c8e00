// attention.h: the portable column of the attention dispatch.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_H_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_H_

#include "bellwether/kernels/attention.h"

namespace bellwether::kernels::cuda::sm80 {

// Parameters are validated; the GPU has compute capability 8.0 or later, shared_bytes_sm
// bytes of shared memory a multiprocessor and shared_bytes_max for a block, head_dim is
// <= 256.
Status AttentionForward(const AttentionForwardParams& params, int shared_bytes_sm, void* stream);
Status AttentionBackward(const AttentionBackwardParams& params, int shared_bytes_max, void* stream);

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_H_
