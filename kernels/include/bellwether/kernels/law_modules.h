// law_modules.h: what the laws of norms, of lm_head and of linear layers need beside sums of
// products: one pass each, so that a module costs a GPU's host a few calls.
//
// Norms.  y = g (x - m) / r + b for each row, with r^2 = mean (x - m)^2 + eps.  m is the row's mean,
// or 0.  Below c = x - m, w = y - b, s = eps / r^2, off = |m| / r, ulp() the distance between
// neighbours in the tensor's own type, and ulp2 its square, added over the parts of a gradient.  lost() is
// half of the least distance for each part that is next to 0.  Roundings of numbers that have so few
// values are alike, and what underflows may all point along x.
//
//   row: scale_difference   sum c dx - s sum w dy
//        scale_variance     (sum c^2 ulp2(dx) + s^2 sum (dy^2 ulp2(y) + w^2 ulp2(dy))) / 12
//        scale_alike        inside (1 + 2 off) |c| |g dy| / r + sum |c| lost(dx), and underflow in float32
//        mean_difference    sum dx
//        mean_variance      sum ulp2(dx) / 12
//        mean_alike         inside (1 + 2 off) sqrt(n) |g dy| / r + sum lost(dx), and underflow in float32
//        off
//   feature: sum w dy; its variance, where each product may be rounded to y's type; what its
//        roundings may add up to if they are alike; sum |w dy|
//   rest: sum (y - what the formula gives)^2, sum y^2
//
// Logits.  Of each row: 1 - p of the likeliest class, however small, and 1 + 2 log(Z) + the entropy
// that the other classes add, where Z is the sum of exponentials by the largest one.
//
// Equal rows.  A row is known by a few of its columns, in kEqualGroups groups of kEqualColumns: rows
// that are equal nearly everywhere are equal in some group.  Of each group: the rows of which not
// all columns are zero, and the sum over them of how many rows are like the row, itself included.

#ifndef BELLWETHER_KERNELS_LAW_MODULES_H_
#define BELLWETHER_KERNELS_LAW_MODULES_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

// The rows of a matrix; elements of a row lie together.
struct LawMatrix {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;  // elements, >= 0
};

inline constexpr int kLawPartsMax = 4;

// A gradient: its parts add up to it.
struct LawParts {
  LawMatrix parts[kLawPartsMax];
  int64_t count = 0;  // 1..kLawPartsMax
};

enum LawNormRow : int {
  kLawNormScaleDifference = 0,
  kLawNormScaleVariance,
  kLawNormScaleAlike,
  kLawNormMeanDifference,
  kLawNormMeanVariance,
  kLawNormMeanAlike,
  kLawNormOff,
  kLawNormRowCount
};

enum LawNormFeature : int { kLawNormSum = 0, kLawNormVariance, kLawNormAlike, kLawNormAbsSum, kLawNormFeatureCount };

// What roundings inside of a norm may add to a feature, of the product of the sizes.
inline constexpr double kLawNormInside = 0x1p-20;
// What a product in float32 may lose by underflow.
inline constexpr double kLawFlushed = 0x1p-126;

struct LawNormsParams {
  int64_t rows = 0, n = 0;  // 0..2^31-1 each, 2^48 elements together
  LawMatrix x, y;
  LawParts d_x, d_y;
  const double* gain = nullptr;   // [n], where the kernel runs
  const double* shift = nullptr;  // [n]
  double eps = 0;
  bool centred = false;
  double inside = kLawNormInside;   // of the product of the norms
  double* row_stats = nullptr;      // [kLawNormRowCount][rows], written; the mean's are 0 if it is not taken off
  double* feature_stats = nullptr;  // [kLawNormFeatureCount][n], added to
  double* rest = nullptr;           // [2], added to
};

enum LawLogitStat : int { kLawLogitUnsure = 0, kLawLogitRoundings, kLawLogitStatCount };

struct LawLogitsParams {
  int64_t rows = 0, classes = 0;  // 0..2^31-1 each, 2^48 elements together
  LawMatrix z;
  double* out = nullptr;  // [kLawLogitStatCount][rows], written
};

inline constexpr int kEqualGroups = 4, kEqualColumns = 4;
inline constexpr int64_t kEqualRowsMax = int64_t{1} << 30;

enum LawEqualStat : int { kLawEqualThere = 0, kLawEqualAlike, kLawEqualStatCount };

struct LawEqualRowsParams {
  int64_t rows = 0, width = 0;  // 0..2^30, 0..2^31-1
  const void* data = nullptr;   // element (i, j) at i * row_stride + j * column_stride
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0, column_stride = 0;  // elements, >= 0
  // kCuda: memory of LawEqualRowsScratch() bytes, on multiples of 8.
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
  double* out = nullptr;  // [kEqualGroups][kLawEqualStatCount], added to
};

// The least power of two that is twice `rows` or more, and 12 bytes in each group for each of it.
constexpr int64_t LawEqualRowsSlots(int64_t rows) {
  int64_t slots = 1;
  while (slots < 2 * rows) slots *= 2;
  return slots;
}
constexpr int64_t LawEqualRowsScratch(int64_t rows) { return LawEqualRowsSlots(rows) * kEqualGroups * 12; }

// Sums in double; a NaN or infinity makes those it enters so.  kCpu is done on return, and gives the
// same bits for any number of threads.  kCuda enqueues one or two kernels; what is added up over rows
// comes in no fixed order.
// kInvalidArgument, kUnavailable, kDeviceError: nothing was written.  Any thread; calls that write
// the same memory must not overlap.
[[nodiscard]] Status LawNorms(const LawNormsParams& params, const Device& device);
[[nodiscard]] Status LawLogits(const LawLogitsParams& params, const Device& device);
[[nodiscard]] Status LawEqualRows(const LawEqualRowsParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_LAW_MODULES_H_
