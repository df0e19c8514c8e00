// module_stats.h: size, extremes and shape of an activation, in one pass.
//
// An activation x has rows, one for each token, and channels.  In double, over all its elements:
//
//   elements    rows channels                nonfinite    elements that are NaN or infinite
//   sumsq       sum of x^2                   largest      largest |x|
//   fourths     sum of x^4
//   top_sumsq   largest of the channels' sums of x^2
//   top         the channel that has it, the first one of equals
//
// With m = elements - nonfinite, sqrt(sumsq / m) is the root mean square, m fourths / sumsq^2 the
// kurtosis about zero, 3 where x is normal, and top_sumsq / sumsq the top channel's share.
//
// Calls add to what earlier calls left there, and keep the larger one: several calls, for the parts of
// a batch, say what one call with all rows says.  The caller sets the memory to 0 before the first.
// Elements that are not finite are counted and left out of the rest.

#ifndef BELLWETHER_KERNELS_MODULE_STATS_H_
#define BELLWETHER_KERNELS_MODULE_STATS_H_

#include <cstddef>
#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

enum ModuleStat : int {
  kModuleElements = 0,
  kModuleSumsq,
  kModuleLargest,
  kModuleNonfinite,
  kModuleFourths,
  kModuleTopSumsq,  // 0 without channel_sumsq
  kModuleTop,       // 0 without channel_sumsq
  kModuleStatCount
};

inline constexpr int64_t kModuleChannelsMax = 1 << 24;

struct ModuleStatsParams {
  DType dtype = DType::kFloat32;
  const void* data = nullptr;       // element (i, j) at i * row_stride + j, aligned to the element
  int64_t rows = 0;                 // 0..2^31-1, 2^48 elements together
  int64_t channels = 0;             // 0..kModuleChannelsMax
  int64_t row_stride = 0;           // elements, >= 0
  double* channel_sumsq = nullptr;  // [channels], added to; where the kernel runs; null = no top channel
  double* out = nullptr;            // [kModuleStatCount], added to; where the kernel runs
  void* workspace = nullptr;        // kCuda: ModuleStatsWorkspaceBytes(), aligned to 8 bytes
};

// Of kCuda: at most 1.1 MB, or 8.2 bytes a channel where that is more.  0 if a size is illegal, or there
// are no elements.
size_t ModuleStatsWorkspaceBytes(const ModuleStatsParams& params);

// One pass over x.  Sums have one order: the same bits for any number of threads, and in each call on
// one kind of device.  kCpu is done on return.  kCuda enqueues three kernels, allocates and waits for
// nothing, and may be captured into a graph.
// kInvalidArgument, kUnavailable, kDeviceError: nothing was written.  Any thread; calls that write
// the same memory must not overlap.
[[nodiscard]] Status ModuleStats(const ModuleStatsParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_MODULE_STATS_H_
