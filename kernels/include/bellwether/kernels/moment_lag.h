// moment_lag.h: how far gradients are beyond what the second moment expects, of some elements of a few
// parameters, as a maximum over calls.  Cheap enough for every step.
//
// Of each part, over its `count` elements of g and v at 0, stride, 2 stride, ..., both of one place in
// the parameter:
//
//   lag        sum of g^2 / max(vhat, eps^2), over count
//   saturated  elements of g that are NaN, infinite, or as large as their type can hold
//
// g, v and vhat are those of tensor_stats.h.  Elements that are not finite are left out of the sum.  A
// part with a step that no optimizer takes (*skip > 0) changes nothing.

#ifndef BELLWETHER_KERNELS_MOMENT_LAG_H_
#define BELLWETHER_KERNELS_MOMENT_LAG_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

// Of a part, in double; both are 0 at first.
enum MomentLagStat : int {
  kMomentLagMax = 0,    // largest lag of all calls
  kMomentLagSaturated,  // sum over all calls
  kMomentLagStatCount
};

struct MomentLagPart {
  const void* grad = nullptr;    // aligned to the element; null: the part is left out of this call
  const void* second = nullptr;  // aligned to the element; v before the coming step
  DType grad_dtype = DType::kFloat32, second_dtype = DType::kFloat32;
  int64_t count = 0;                // 1..2^20
  int64_t stride = 1;               // elements, 1..2^40
  double beta2 = 0;                 // 0..1, less than 1
  double eps = 0;                   // >= 0
  double steps = 0;                 // t, > 0, if steps_at is null
  const float* steps_at = nullptr;  // else t is *steps_at + steps; where the kernel runs
};

inline constexpr int64_t kMomentLagPartsMax = 16;
inline constexpr int64_t kMomentLagCountMax = 1 << 20;

struct MomentLagsParams {
  const MomentLagPart* parts = nullptr;  // [count], in host memory; may go when the call returns
  int64_t count = 0;                     // 0..kMomentLagPartsMax
  const float* scale = nullptr;          // where the kernel runs: what divides g; null = 1
  const float* skip = nullptr;           // where the kernel runs; null = 0
  double* out = nullptr;                 // [count][kMomentLagStatCount], updated; where the kernel runs
};

// Sums have one order on one kind of device.  kCpu is done on return, by the caller's thread.  kCuda
// enqueues one kernel, allocates and waits for nothing, and may be captured into a graph.
// kInvalidArgument, kUnavailable, kDeviceError: nothing was written.  Any thread; calls that update the
// same memory must not overlap.
[[nodiscard]] Status MomentLags(const MomentLagsParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_MOMENT_LAG_H_
