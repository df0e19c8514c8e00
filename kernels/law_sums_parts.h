// law_sums_parts.h: what the CPU and the GPU share of law_sums.h.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_LAW_SUMS_PARTS_H_
#define BELLWETHER_KERNELS_LAW_SUMS_PARTS_H_

#include <cstdint>

#include "bellwether/kernels/device.h"

namespace bellwether::kernels {

// Such that ulp = 2^(max(e, least) + shift - 1023), where e is a float's biased exponent.
struct UlpOf {
  int32_t least, shift;
};

constexpr UlpOf UlpOfType(DType dtype) {
  // e - 127 - (bits - 1) + 1023
  const auto of = [](int bits, int exponent_min) { return UlpOf{exponent_min + 127, 1023 - 126 - bits}; };
  return dtype == DType::kBFloat16 ? of(8, -126) : dtype == DType::kFloat16 ? of(11, -14) : of(24, -126);
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_LAW_SUMS_PARTS_H_
