// law_products.h: sums of products of two tensors, for the laws of linear layers.
//
// For y = x W^T + b, and for every y, dy that a loss may give,
//
//   <y - b, dy> = <x, dx> = <W, dW>,   dx = dy W and dW = dy^T x of the same call,
//
// since all three are sum_tij dy_ti W_ij x_tj.  They are sums over other tensors, which other
// matrix products have made: where two of them agree and the third does not, its product is
// wrong.  A product that is wrong, a flipped bit in any of the six tensors, a scale of a quantised
// product that is off break them; no rounding to the nearest does.
// Source: checksums of products are algorithm-based fault tolerance (Huang and Abraham 1984).
//
//   sum          += sum of x y
//   abs_sum      += sum of |x y|
//   x_variance   += sum of (ulp(x) y)^2 / 12, what rounding x has added to the sum: its variance
//   y_variance   += sum of (x ulp(y))^2 / 12
//   x_nonfinite, y_nonfinite   += elements that are NaN or infinite
//
// ulp(x) is the distance between neighbours of x in the grid that it was rounded to.  With p bits of
// significand and an exponent e it is 2^(e - p + 1).  Subnormal numbers have the least exponent.

#ifndef BELLWETHER_KERNELS_LAW_PRODUCTS_H_
#define BELLWETHER_KERNELS_LAW_PRODUCTS_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

enum LawProductStat : int {
  kLawProductSum = 0,
  kLawProductAbsSum,
  kLawProductXVariance,
  kLawProductYVariance,
  kLawProductXNonfinite,
  kLawProductYNonfinite,
  kLawProductStatCount
};

// Numbers that a tensor's elements were rounded to.
enum class Grid : int { kNone = 0, kFloat32 = 1, kTf32 = 2, kBFloat16 = 3, kFloat16 = 4 };

inline constexpr int kLawDims = 3;
inline constexpr int64_t kLawProductsMax = 16;  // of one call

struct LawOperand {
  const void* data = nullptr;  // aligned to the element
  DType dtype = DType::kFloat32;
  Grid grid = Grid::kNone;         // kNone: its variance is not measured
  int64_t strides[kLawDims] = {};  // elements, >= 0; 0 broadcasts
};

struct LawProduct {
  int64_t extents[kLawDims] = {};  // 0..2^31-1 each, 2^48 elements together
  LawOperand x, y;
};

struct LawProductsParams {
  const LawProduct* products = nullptr;  // [count], in host memory
  int64_t count = 0;                     // 1..kLawProductsMax
  double* out = nullptr;                 // [count][kLawProductStatCount] where the kernel runs, added to
};

// Sums in double.  A NaN or infinity in an operand is counted, and makes the sums NaN or infinite.
// kCpu is done on return, and gives the same bits for any number of threads; kCuda enqueues one
// kernel, and its sums come in no fixed order.  kInvalidArgument, kUnavailable, kDeviceError:
// nothing was written.  Any thread; calls that add to the same memory must not overlap.
[[nodiscard]] Status LawProducts(const LawProductsParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_LAW_PRODUCTS_H_
