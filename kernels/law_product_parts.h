// law_product_parts.h: what the CPU and the GPU share of law_products.h: a product whose
// dimensions are in order, and the grids.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_LAW_PRODUCT_PARTS_H_
#define BELLWETHER_KERNELS_LAW_PRODUCT_PARTS_H_

#include <cstdint>

#include "bellwether/kernels/law_products.h"

namespace bellwether::kernels {

// Such that (ulp)^2 = 2^(2 max(e, least) + shift - 1023), where e is a float's biased exponent.
struct SquareOfUlp {
  int32_t least = 0;
  int32_t shift = 0;  // 0: not measured
};

constexpr SquareOfUlp SquareOfUlpIn(Grid grid) {
  // 2 (e - 127 - (bits - 1)) + 1023
  const auto of = [](int bits, int exponent_min) { return SquareOfUlp{exponent_min + 127, 1023 - 2 * (126 + bits)}; };
  switch (grid) {
    case Grid::kFloat32:
      return of(24, -126);
    case Grid::kTf32:
      return of(11, -126);
    case Grid::kBFloat16:
      return of(8, -126);
    case Grid::kFloat16:
      return of(11, -14);
    case Grid::kNone:
      break;
  }
  return {};
}

// One product, after Ordered(): the last dimension is the one that lies closest together, and
// what lies in one piece is one dimension.
struct OrderedOperand {
  const void* data;
  int64_t strides[kLawDims];
  DType dtype;
  SquareOfUlp ulp;
};

struct OrderedProduct {
  int64_t extents[kLawDims];
  OrderedOperand x, y;

  constexpr int64_t Elements() const { return extents[0] * extents[1] * extents[2]; }
};

OrderedProduct Ordered(const LawProduct& product);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_LAW_PRODUCT_PARTS_H_
