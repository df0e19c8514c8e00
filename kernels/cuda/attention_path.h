// attention_path.h: which kernels serve a call.
//
// sm90 are Hopper's own and serve compute capability 9.0; sm80 run on 8.0 and later.  Both
// have head_dim up to 256, forward and backward; what either forward wrote serves either
// backward.  Calls with a mask or sinks are sm80's, even where sm90 is forced, and with key bounds
// those above head_dim 128 and the backward of centred keys.  The environment variable
// BELLWETHER_ATTENTION_PATH, sm80 or sm90, says which for tests and benchmarks; it is read at every call.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_PATH_H_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_PATH_H_

#include <cstdint>

#include "bellwether/kernels/status.h"

namespace bellwether::kernels::cuda {

enum class AttentionPath { kSm80, kSm90 };

struct AttentionGpu {
  AttentionPath path;
  int multiprocessors;
  int shared_bytes_max;  // of a block
  int shared_bytes_sm;   // of a multiprocessor
};

// kUnavailable without a usable GPU; kUnsupported if it, or the path that is forced,
// does not serve the larger of head_dim and v_dim; kInvalidArgument for another value of the variable.
Status ChooseAttentionPath(int64_t widest_dim, AttentionGpu* gpu);

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_PATH_H_
