#include "error.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>

namespace bellwether::kernels {
namespace {

// A plain array: nothing to construct, nothing to free when a thread ends.
thread_local char last_error[320] = "";

}  // namespace

const char* LastErrorMessage() { return last_error; }

Status Fail(Status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

Status CheckRange(const char* field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return Status::kOk;
  return Fail(Status::kInvalidArgument, "%s is %" PRId64 ", but must be %" PRId64 "..%" PRId64, field, value, min, max);
}

Status CheckHeadDim(const char* field, int64_t value) {
  if (value > kHeadDimMax) {
    return Fail(Status::kUnsupported, "%s is %" PRId64 ", but only 1..%" PRId64 " is supported", field, value,
                kHeadDimMax);
  }
  return CheckRange(field, value, 1, kHeadDimMax);
}

Status CheckPointer(const char* field, const void* data, int64_t alignment) {
  if (data == nullptr) {
    return Fail(Status::kInvalidArgument, "%s is NULL, but must point to data", field);
  }
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) != 0) {
    return Fail(Status::kInvalidArgument, "%s is %p, but must be a multiple of the element's %" PRId64 " bytes", field,
                data, alignment);
  }
  return Status::kOk;
}

Status CheckMaskTensor(const ProbeMask& mask) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(
      CheckRange("mask_dtype", static_cast<int>(mask.dtype), 0, static_cast<int>(MaskDType::kBool)));
  const int64_t size = mask.dtype == MaskDType::kBool ? 1 : mask.dtype == MaskDType::kFloat32 ? 4 : 2;
  return CheckPointer("mask", mask.data, size);
}

Status CheckCuSeqlens(const char* field, const int32_t* cu_seqlens, int64_t sequences, int64_t total) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer(field, cu_seqlens, alignof(int32_t)));
  int64_t before = 0;
  for (int64_t s = 0; s <= sequences; ++s) {
    const int64_t min = s == sequences ? total : before;
    const int64_t max = s == 0 ? 0 : total;
    if (cu_seqlens[s] < min || cu_seqlens[s] > max) {
      return Fail(Status::kInvalidArgument, "%s[%" PRId64 "] is %" PRId32 ", but must be %" PRId64 "..%" PRId64, field,
                  s, cu_seqlens[s], min, max);
    }
    before = cu_seqlens[s];
  }
  return Status::kOk;
}

Status CheckDType(DType dtype) { return CheckRange("dtype", static_cast<int>(dtype), 0, 2); }

Status CheckDevice(const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("backend", static_cast<int>(device.backend), 0, 1));
  return CheckRange("threads", device.threads, 0, kThreadsMax);
}

}  // namespace bellwether::kernels
