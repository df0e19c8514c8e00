#include "bellwether/kernels/law_products.h"

#include <algorithm>
#include <cstdint>

#include "backends.h"
#include "error.h"
#include "law_product_parts.h"

namespace bellwether::kernels {
namespace {

constexpr int64_t kElementsMax = int64_t{1} << 48;
constexpr int64_t kStrideMax = INT64_MAX / (kTokensMax + 1);

Status CheckOperand(const char* name, const LawOperand& operand, bool empty) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(operand.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(
      CheckRange("grid", static_cast<int>(operand.grid), 0, static_cast<int>(Grid::kFloat16)));
  for (const int64_t stride : operand.strides) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("stride", stride, 0, kStrideMax));
  }
  return empty ? Status::kOk : CheckPointer(name, operand.data, SizeOf(operand.dtype));
}

Status CheckProduct(const LawProduct& product) {
  int64_t elements = 1;
  for (const int64_t extent : product.extents) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("extent", extent, 0, kTokensMax));
    if (extent > 0 && elements > kElementsMax / extent) {
      return Fail(Status::kInvalidArgument, "extents have more than 2^48 elements together");
    }
    elements *= extent;
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOperand("x", product.x, elements == 0));
  return CheckOperand("y", product.y, elements == 0);
}

int64_t Distance(const LawProduct& product, int dim) {
  return std::max(product.x.strides[dim], product.y.strides[dim]);
}

}  // namespace

OrderedProduct Ordered(const LawProduct& product) {
  int order[kLawDims] = {0, 1, 2};
  // What has one element goes first, and then the dimension of the longest strides.
  std::sort(order, order + kLawDims, [&](int a, int b) {
    const bool one_a = product.extents[a] == 1, one_b = product.extents[b] == 1;
    if (one_a != one_b) return one_a;
    const int64_t of_a = Distance(product, a), of_b = Distance(product, b);
    return of_a != of_b ? of_a > of_b : a < b;
  });
  OrderedProduct ordered = {};
  const auto take = [](OrderedOperand& to, const LawOperand& from) {
    to.data = from.data;
    to.dtype = from.dtype;
    to.ulp = SquareOfUlpIn(from.grid);
  };
  take(ordered.x, product.x);
  take(ordered.y, product.y);
  for (int64_t& extent : ordered.extents) extent = 1;
  int at = kLawDims;  // The dimension that was filled last.
  for (int i = kLawDims - 1; i >= 0; --i) {
    const int dim = order[i];
    const int64_t extent = product.extents[dim];
    if (extent == 1) continue;
    const int64_t of_x = product.x.strides[dim], of_y = product.y.strides[dim];
    if (at < kLawDims && of_x == ordered.x.strides[at] * ordered.extents[at] &&
        of_y == ordered.y.strides[at] * ordered.extents[at]) {
      ordered.extents[at] *= extent;
      continue;
    }
    --at;
    ordered.extents[at] = extent;
    ordered.x.strides[at] = of_x;
    ordered.y.strides[at] = of_y;
  }
  return ordered;
}

Status LawProducts(const LawProductsParams& params, const Device& device) {
  const LawProductsParams& p = params;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("count", p.count, 1, kLawProductsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("products", p.products, alignof(LawProduct)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(double)));
  for (int64_t i = 0; i < p.count; ++i) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckProduct(p.products[i]));
  }
  if (device.backend == Backend::kCuda) return cuda::LawProducts(p, device.stream);
  return cpu::LawProducts(p, device.threads);
}

}  // namespace bellwether::kernels
