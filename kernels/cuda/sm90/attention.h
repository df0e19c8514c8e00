// attention.h: Hopper's column of the attention dispatch.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_H_

#include "bellwether/kernels/attention.h"

namespace bellwether::kernels::cuda::sm90 {

// Parameters are validated.  kUnsupported on any other GPU than 9.0.
Status AttentionForward(const AttentionForwardParams& params, void* stream);
Status AttentionBackward(const AttentionBackwardParams& params, void* stream);
size_t BackwardWorkspaceBytes(const AttentionForwardParams& params);

// kUnavailable without a usable GPU, kUnsupported on another than 9.0.
Status GetMultiprocessors(int* count);

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_H_
