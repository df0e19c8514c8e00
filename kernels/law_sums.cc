#include "bellwether/kernels/law_sums.h"

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

constexpr int64_t kElementsMax = int64_t{1} << 48;
constexpr int64_t kStrideMax = INT64_MAX / (kTokensMax + 1);

}  // namespace

Status LawSums(const LawSumsParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kept", p.kept, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("summed", p.summed, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kept_stride", p.kept_stride, 0, kStrideMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("summed_stride", p.summed_stride, 0, kStrideMax));
  if (p.summed > 0 && p.kept > kElementsMax / p.summed) {
    return Fail(Status::kInvalidArgument, "kept and summed have more than 2^48 elements together");
  }
  if (p.kept == 0 || p.summed == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("data", p.data, SizeOf(p.dtype)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(double)));
  if (device.backend == Backend::kCuda) return cuda::LawSums(p, device.stream);
  return cpu::LawSums(p, device.threads);
}

}  // namespace bellwether::kernels
