// tensor_stats.h: norms, extremes and counts of many parameters in one call.
//
// A parameter has up to five tensors of the same elements in the same order: its gradient g, its
// weight w, the weight u before the optimizer's step, and the optimizer's moments m and v.  Any may be
// absent, and each has a type of its own.  Of each parameter, in double:
//
//   elements          n
//   grad_sumsq        sum of g^2                        grad_max          largest |g|
//   grad_nonfinite    elements of g, NaN or infinite    grad_zeros        elements of g that are 0
//   weight_sumsq      sum of w^2                        weight_max        largest |w|
//   weight_nonfinite  elements of w, NaN or infinite    weight_bits       a sum of the bits of w
//   change_sumsq      sum of (w - u)^2                  changed           elements where w is not u
//   lag_sum           sum of g^2 / max(vhat, eps^2)
//   dot               sum of g m                        moment_sumsq      sum of m^2
//
// g is what lies there, divided by *scale: what the loss was multiplied by.  vhat is the second moment
// behind the coming step: (beta2 v + (1 - beta2) g^2) / (1 - beta2^t), with v from before it and t its
// number, from 1 on.  sqrt(lag_sum / n) is near 1 while gradients are what v expects, and rises before
// v follows; StableAdamW (arXiv 2304.13013) calls it RMS_t.  An element with g = 0 adds 0.
//
// weight_bits is sum of bits(w_i) (i 2654435761 mod 2^32 | 1), modulo 2^52: an element that changes
// alone always changes it.  Equal before and after a step, it says that nothing has moved.
//
// Elements that are not finite are counted and left out of the sums and extremes, both of a pair.
// What breaks it: weight_bits of parts of a tensor do not add up to that of the whole.  Padding is
// counted as elements are.

#ifndef BELLWETHER_KERNELS_TENSOR_STATS_H_
#define BELLWETHER_KERNELS_TENSOR_STATS_H_

#include <cstddef>
#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

// What lacks a tensor is 0.
enum TensorStat : int {
  kTensorElements = 0,
  kTensorGradSumsq,
  kTensorGradMax,
  kTensorGradNonfinite,
  kTensorGradZeros,
  kTensorWeightSumsq,
  kTensorWeightMax,
  kTensorWeightNonfinite,
  kTensorWeightBits,
  kTensorChangeSumsq,  // with weight and before
  kTensorChanged,
  kTensorLagSum,  // with grad and second
  kTensorDot,     // with grad and moment
  kTensorMomentSumsq,
  kTensorStatCount
};

struct TensorPart {
  const void* data = nullptr;  // [elements], aligned to the element; null = absent
  DType dtype = DType::kFloat32;
};

struct TensorOfStep {
  int64_t elements = 0;  // 0..2^40
  TensorPart grad, weight, before, moment, second;
  double beta2 = 0;                 // 0..1, less than 1
  double eps = 0;                   // >= 0
  double steps = 0;                 // t, if steps_at is null; > 0 with grad and second, else >= 0
  const float* steps_at = nullptr;  // else t is *steps_at + steps; where the kernel runs
};

inline constexpr int64_t kTensorsMax = 1 << 20;
inline constexpr int64_t kTensorElementsMax = int64_t{1} << 40;

struct TensorStatsParams {
  const TensorOfStep* tensors = nullptr;  // [count], in host memory; may go when the call returns
  int64_t count = 0;                      // 0..kTensorsMax
  const float* scale = nullptr;           // where the kernel runs; null = 1
  double* out = nullptr;                  // [count][kTensorStatCount], written; where the kernel runs
  void* workspace = nullptr;              // kCuda: TensorStatsWorkspaceBytes(), aligned to 8 bytes
};

// Of kCuda: 112 bytes for 32,768 elements, and at least as many for each tensor.  0 if a size is illegal.
size_t TensorStatsWorkspaceBytes(const TensorStatsParams& params);

// One pass over what is there.  Sums have one order: the same bits for any number of threads, and in
// each call on one kind of device.  kCpu is done on return.  kCuda enqueues two kernels for each 40
// tensors, allocates and waits for nothing, and may be captured into a graph.
// kInvalidArgument, kUnavailable, kDeviceError: nothing was written.  Any thread; calls that write
// the same memory must not overlap.
[[nodiscard]] Status TensorStats(const TensorStatsParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_TENSOR_STATS_H_
