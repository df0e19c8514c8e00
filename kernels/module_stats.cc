#include "bellwether/kernels/module_stats.h"

#include "backends.h"
#include "error.h"
#include "module_stats_parts.h"

namespace bellwether::kernels {
namespace {

constexpr int64_t kElementsMax = int64_t{1} << 48;
constexpr int64_t kStrideMax = INT64_MAX / (kTokensMax + 1);

Status CheckSizes(const ModuleStatsParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("rows", p.rows, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("channels", p.channels, 0, kModuleChannelsMax));
  if (p.channels > 0 && p.rows > kElementsMax / p.channels) {
    return Fail(Status::kInvalidArgument, "rows and channels have more than 2^48 elements together");
  }
  return Status::kOk;
}

}  // namespace

size_t ModuleStatsWorkspaceBytes(const ModuleStatsParams& p) {
  if (CheckSizes(p) != Status::kOk) return 0;
  return static_cast<size_t>(PartsOfModule(p.rows, p.channels).Doubles(p.channels)) * sizeof(double);
}

Status ModuleStats(const ModuleStatsParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSizes(p));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("row_stride", p.row_stride, 0, kStrideMax));
  if (p.rows == 0 || p.channels == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("data", p.data, SizeOf(p.dtype)));
  if (p.channel_sumsq != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("channel_sumsq", p.channel_sumsq, alignof(double)));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(double)));
  if (device.backend == Backend::kCpu) return cpu::ModuleStats(p, device.threads);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("workspace", p.workspace, alignof(double)));
  return cuda::ModuleStats(p, device.stream);
}

}  // namespace bellwether::kernels
