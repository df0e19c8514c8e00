// moment_lag_parts.h: what the CPU and the GPU share of moment_lag.h.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_MOMENT_LAG_PARTS_H_
#define BELLWETHER_KERNELS_MOMENT_LAG_PARTS_H_

#include "bellwether/kernels/device.h"

namespace bellwether::kernels {

// The largest number that is finite.
constexpr float LargestOf(DType dtype) {
  if (dtype == DType::kBFloat16) return 0x1.fep127f;
  return dtype == DType::kFloat16 ? 65504.0f : 0x1.fffffep127f;
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_MOMENT_LAG_PARTS_H_
