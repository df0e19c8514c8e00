// tensor_map.h: how the copy engine sees a [batch][head][token][channel] view.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_TENSOR_MAP_H_
#define BELLWETHER_KERNELS_CUDA_SM90_TENSOR_MAP_H_

#include <cuda.h>

#include <array>
#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels::cuda::sm90 {

// `sizes` innermost first: channel, token, head, batch.  A box is 64 channels of
// `box_tokens` tokens, swizzled by 128 bytes; what lies outside reads as 0.
// Needs no link to libcuda: the driver's entry point is looked up at run time.
// kUnavailable without a driver, kUnsupported if it refuses the strides.
Status EncodeTensorMap(const char* field, const Tensor4& tensor,
                       const std::array<int64_t, 4>& sizes, DType dtype, int box_tokens,
                       CUtensorMap* map);

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_TENSOR_MAP_H_
