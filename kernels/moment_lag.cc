#include "bellwether/kernels/moment_lag.h"

#include <cmath>
#include <cstdint>

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

Status CheckMomentPart(const MomentLagPart& part) {
  if (part.grad == nullptr) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(part.grad_dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(part.second_dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("grad", part.grad, SizeOf(part.grad_dtype)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("second", part.second, SizeOf(part.second_dtype)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("count", part.count, 1, kMomentLagCountMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("stride", part.stride, 1, int64_t{1} << 40));
  if (part.steps_at != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("steps_at", part.steps_at, alignof(float)));
  }
  if (!(part.beta2 >= 0 && part.beta2 < 1)) {
    return Fail(Status::kInvalidArgument, "beta2 is %g, but must be 0 or more and less than 1", part.beta2);
  }
  if (!(part.eps >= 0 && std::isfinite(part.eps))) {
    return Fail(Status::kInvalidArgument, "eps is %g, but must be finite and 0 or more", part.eps);
  }
  if (!std::isfinite(part.steps) || part.steps < 0 || (part.steps_at == nullptr && part.steps == 0)) {
    return Fail(Status::kInvalidArgument, "steps is %g, but must be finite and more than 0", part.steps);
  }
  return Status::kOk;
}

}  // namespace

Status MomentLags(const MomentLagsParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("count", p.count, 0, kMomentLagPartsMax));
  if (p.count == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("parts", p.parts, alignof(MomentLagPart)));
  for (int64_t i = 0; i < p.count; ++i) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMomentPart(p.parts[i]));
  if (p.scale != nullptr) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("scale", p.scale, alignof(float)));
  if (p.skip != nullptr) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("skip", p.skip, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(double)));
  return device.backend == Backend::kCpu ? cpu::MomentLags(p) : cuda::MomentLags(p, device.stream);
}

}  // namespace bellwether::kernels
