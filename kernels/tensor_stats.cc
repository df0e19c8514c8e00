#include "bellwether/kernels/tensor_stats.h"

#include <cmath>
#include <cstdint>

#include "backends.h"
#include "error.h"
#include "tensor_stats_parts.h"

namespace bellwether::kernels {
namespace {

constexpr int64_t kChunksMax = INT32_MAX;

Status CheckPart(const char* name, const TensorPart& part) {
  if (part.data == nullptr) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(part.dtype));
  return CheckPointer(name, part.data, SizeOf(part.dtype));
}

Status CheckTensor(const TensorOfStep& t) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("elements", t.elements, 0, kTensorElementsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPart("grad", t.grad));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPart("weight", t.weight));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPart("before", t.before));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPart("moment", t.moment));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPart("second", t.second));
  if (t.steps_at != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("steps_at", t.steps_at, alignof(float)));
  }
  if (!(t.beta2 >= 0 && t.beta2 < 1)) {
    return Fail(Status::kInvalidArgument, "beta2 is %g, but must be 0 or more and less than 1", t.beta2);
  }
  if (!(t.eps >= 0 && std::isfinite(t.eps))) {
    return Fail(Status::kInvalidArgument, "eps is %g, but must be finite and 0 or more", t.eps);
  }
  const bool counts = t.grad.data != nullptr && t.second.data != nullptr && t.steps_at == nullptr;
  if (!std::isfinite(t.steps) || t.steps < 0 || (counts && t.steps == 0)) {
    return Fail(Status::kInvalidArgument, "steps is %g, but must be finite and more than 0", t.steps);
  }
  return Status::kOk;
}

Status CheckSizes(const TensorStatsParams& p, int64_t* chunks) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("count", p.count, 0, kTensorsMax));
  *chunks = 0;
  if (p.count == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("tensors", p.tensors, alignof(TensorOfStep)));
  for (int64_t i = 0; i < p.count; ++i) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("elements", p.tensors[i].elements, 0, kTensorElementsMax));
    *chunks += ChunksOf(p.tensors[i].elements);
  }
  if (*chunks > kChunksMax) {
    return Fail(Status::kInvalidArgument, "the tensors have more than %lld elements together",
                static_cast<long long>(kChunksMax * kTensorChunk));
  }
  return Status::kOk;
}

}  // namespace

size_t TensorStatsWorkspaceBytes(const TensorStatsParams& params) {
  int64_t chunks = 0;
  if (CheckSizes(params, &chunks) != Status::kOk) return 0;
  return static_cast<size_t>(chunks) * kTensorStatCount * sizeof(double);
}

Status TensorStats(const TensorStatsParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  int64_t chunks = 0;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSizes(p, &chunks));
  if (p.count == 0) return Status::kOk;
  for (int64_t i = 0; i < p.count; ++i) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor(p.tensors[i]));
  if (p.scale != nullptr) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("scale", p.scale, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(double)));
  if (device.backend == Backend::kCpu) return cpu::TensorStats(p, device.threads);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("workspace", p.workspace, alignof(double)));
  return cuda::TensorStats(p, device.stream);
}

}  // namespace bellwether::kernels
