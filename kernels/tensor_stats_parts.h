// tensor_stats_parts.h: what the CPU and the GPU share of tensor_stats.h.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_TENSOR_STATS_PARTS_H_
#define BELLWETHER_KERNELS_TENSOR_STATS_PARTS_H_

#include <cstdint>

#include "bellwether/kernels/tensor_stats.h"

namespace bellwether::kernels {

// Elements whose sums are made together; those of a tensor's chunks are then added in their order.
inline constexpr int64_t kTensorChunk = 32768;

constexpr int64_t ChunksOf(int64_t elements) { return elements > 0 ? (elements + kTensorChunk - 1) / kTensorChunk : 1; }

constexpr uint32_t BitsWeight(int64_t i) { return static_cast<uint32_t>(i) * 2654435761u | 1u; }

inline constexpr uint64_t kBitsMask = (uint64_t{1} << 52) - 1;  // What a double holds, and one bit less.

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_TENSOR_STATS_PARTS_H_
