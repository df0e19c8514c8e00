// attention_workspace.h: how the backward's workspace is divided.
//
// Its size depends on the call alone, not on the GPU or the path that serves it.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_WORKSPACE_H_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_WORKSPACE_H_

#include <cstddef>

#include "bellwether/kernels/attention.h"
#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda {

size_t BackwardWorkspaceBytes(const AttentionForwardParams& params);

// Whether the kernels of a call take rowsum(dS).
bool NeedsRowSums(const AttentionBackwardParams& params);

// Points p's workspace fields into params.workspace.
void PlaceWorkspace(const AttentionBackwardParams& params, AttentionBwdParams* p);

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_WORKSPACE_H_
