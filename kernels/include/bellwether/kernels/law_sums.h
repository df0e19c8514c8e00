// law_sums.h: sums of a matrix along one of its dimensions, for the laws whose sums are zero.
//
// Behind a softmax and its cross entropy the gradients of a row's logits add up to zero, and so do
// the rows of the weight's gradient.  Of each row, or column, of the matrix x:
//
//   sum       += sum of x
//   abs_sum   += sum of |x|
//   ulp_sum   += sum of ulp(x): roundings that are all alike make half of it at most
//   variance  += sum of ulp(x)^2 / 12, what independent roundings have added to the sum
//   low_bits  += elements of kFloat32 that no kBFloat16 equals
//
// ulp(x) is the distance between neighbours of x in its own type: with p bits of significand and an
// exponent e it is 2^(e - p + 1).  Subnormal numbers have the least exponent.

#ifndef BELLWETHER_KERNELS_LAW_SUMS_H_
#define BELLWETHER_KERNELS_LAW_SUMS_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

enum LawSumStat : int {
  kLawSumSum = 0,
  kLawSumAbsSum,
  kLawSumUlpSum,
  kLawSumVariance,
  kLawSumLowBits,
  kLawSumStatCount
};

struct LawSumsParams {
  DType dtype = DType::kFloat32;
  const void* data = nullptr;    // element (i, j) at i * kept_stride + j * summed_stride, aligned
  int64_t kept = 0, summed = 0;  // 0..2^31-1 each, 2^48 elements together; one result for each i
  int64_t kept_stride = 0;       // elements, >= 0
  int64_t summed_stride = 0;     // elements, >= 0
  double* out = nullptr;         // [kept][kLawSumStatCount] where the kernel runs, added to
};

// Sums in double; a NaN or infinity makes those of its row so.  One pass over the matrix.  kCpu is done
// on return, and gives the same bits for any number of threads.  kCuda enqueues one kernel; its sums
// come in no fixed order where the kept dimension is the one that lies together.
// kInvalidArgument, kUnavailable, kDeviceError: nothing was written.  Any thread; calls that add to
// the same memory must not overlap.
[[nodiscard]] Status LawSums(const LawSumsParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_LAW_SUMS_H_
