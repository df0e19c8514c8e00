// One pass over both tensors, sums in double.  Units are pieces of a product of about kPiece
// elements; their sums are added in order, whatever the threads.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "backends.h"
#include "cpu/element.h"
#include "cpu/parallel.h"
#include "error.h"
#include "law_product_parts.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int64_t kPiece = 1 << 16;
constexpr int64_t kLanes = 8;  // Independent chains.

struct Sums {
  double of[kLawProductStatCount] = {};
};

// A piece of a product: some elements of the last dimension, for some of the rows before it.
struct Piece {
  const OrderedProduct* product;
  int64_t number;  // in the caller's list
  int64_t row, rows;
  int64_t first, count;
};

inline double SquareOfUlpAt(float x, SquareOfUlp ulp) {
  const auto exponent = static_cast<int32_t>((std::bit_cast<uint32_t>(x) >> 23) & 0xff);
  const auto biased = static_cast<uint64_t>(2 * std::max(exponent, ulp.least) + ulp.shift);
  return std::bit_cast<double>(biased << 52);
}

inline bool IsNonfinite(float x) { return (std::bit_cast<uint32_t>(x) & 0x7f800000u) == 0x7f800000u; }

struct Lanes {
  double sum[kLanes] = {}, abs_sum[kLanes] = {}, x_variance[kLanes] = {}, y_variance[kLanes] = {};
  int64_t x_bad[kLanes] = {}, y_bad[kLanes] = {};
};

template <bool kX, bool kY>
inline void Add(Lanes& lanes, int64_t lane, float x, float y, SquareOfUlp of_x, SquareOfUlp of_y) {
  const double a = static_cast<double>(x), b = static_cast<double>(y), product = a * b;
  lanes.sum[lane] += product;
  lanes.abs_sum[lane] += std::fabs(product);
  if (kX) lanes.x_variance[lane] += SquareOfUlpAt(x, of_x) * (b * b);
  if (kY) lanes.y_variance[lane] += SquareOfUlpAt(y, of_y) * (a * a);
  lanes.x_bad[lane] += IsNonfinite(x);
  lanes.y_bad[lane] += IsNonfinite(y);
}

template <bool kX, bool kY, typename X, typename Y>
void AddPiece(const Piece& piece, Sums* sums) {
  const OrderedProduct& p = *piece.product;
  const SquareOfUlp of_x = p.x.ulp, of_y = p.y.ulp;
  Lanes lanes;
  for (int64_t row = piece.row; row < piece.row + piece.rows; ++row) {
    const int64_t outer = row / p.extents[1], inner = row % p.extents[1];
    const int64_t x_stride = p.x.strides[2], y_stride = p.y.strides[2];
    const X* x =
        static_cast<const X*>(p.x.data) + outer * p.x.strides[0] + inner * p.x.strides[1] + piece.first * x_stride;
    const Y* y =
        static_cast<const Y*>(p.y.data) + outer * p.y.strides[0] + inner * p.y.strides[1] + piece.first * y_stride;
    int64_t i = 0;
    if (x_stride == 1 && y_stride == 1) {
      for (; i + kLanes <= piece.count; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          Add<kX, kY>(lanes, lane, ToFloat(x[i + lane]), ToFloat(y[i + lane]), of_x, of_y);
        }
      }
    }
    for (; i < piece.count; ++i) {
      Add<kX, kY>(lanes, i % kLanes, ToFloat(x[i * x_stride]), ToFloat(y[i * y_stride]), of_x, of_y);
    }
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sums->of[kLawProductSum] += lanes.sum[lane];
    sums->of[kLawProductAbsSum] += lanes.abs_sum[lane];
    sums->of[kLawProductXVariance] += lanes.x_variance[lane] / 12;
    sums->of[kLawProductYVariance] += lanes.y_variance[lane] / 12;
    sums->of[kLawProductXNonfinite] += static_cast<double>(lanes.x_bad[lane]);
    sums->of[kLawProductYNonfinite] += static_cast<double>(lanes.y_bad[lane]);
  }
}

template <typename X, typename Y>
void AddPieceOf(const Piece& piece, Sums* sums) {
  const bool of_x = piece.product->x.ulp.shift != 0, of_y = piece.product->y.ulp.shift != 0;
  if (of_x && of_y) return AddPiece<true, true, X, Y>(piece, sums);
  if (of_x) return AddPiece<true, false, X, Y>(piece, sums);
  if (of_y) return AddPiece<false, true, X, Y>(piece, sums);
  AddPiece<false, false, X, Y>(piece, sums);
}

void Cut(const OrderedProduct& product, int64_t number, std::vector<Piece>* pieces) {
  if (product.Elements() == 0) return;
  const int64_t rows = product.extents[0] * product.extents[1], width = product.extents[2];
  const int64_t columns = std::min(width, kPiece);
  const int64_t together = std::max<int64_t>(1, kPiece / columns);
  for (int64_t row = 0; row < rows; row += together) {
    for (int64_t first = 0; first < width; first += columns) {
      pieces->push_back(
          {&product, number, row, std::min(together, rows - row), first, std::min(columns, width - first)});
    }
  }
}

}  // namespace

Status LawProducts(const LawProductsParams& p, uint32_t threads) {
  OrderedProduct products[kLawProductsMax];
  std::vector<Piece> pieces;
  std::vector<Sums> sums;
  double elements = 0;
  try {
    for (int64_t i = 0; i < p.count; ++i) {
      products[i] = Ordered(p.products[i]);
      elements += static_cast<double>(products[i].Elements());
      Cut(products[i], i, &pieces);
    }
    sums.resize(pieces.size());
  } catch (const std::bad_alloc&) {
    return Fail(Status::kDeviceError, "out of memory for the pieces of %lld products", static_cast<long long>(p.count));
  }
  const auto units = static_cast<int64_t>(pieces.size());
  ParallelFor(units, UsefulThreads(threads, units, elements), [&](int64_t unit) {
    const auto at = static_cast<size_t>(unit);
    const OrderedProduct& product = *pieces[at].product;
    WithElement(product.x.dtype, [&]<typename X>(const X*) {
      WithElement(product.y.dtype, [&]<typename Y>(const Y*) { AddPieceOf<X, Y>(pieces[at], &sums[at]); });
    });
  });
  for (size_t unit = 0; unit < pieces.size(); ++unit) {
    double* const out = p.out + pieces[unit].number * kLawProductStatCount;
    for (int stat = 0; stat < kLawProductStatCount; ++stat) out[stat] += sums[unit].of[stat];
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
