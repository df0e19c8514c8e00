// error.h: the one sentence behind a failing status.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_ERROR_H_
#define BELLWETHER_KERNELS_ERROR_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/probe.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

// Remembers the sentence for LastErrorMessage() of this thread; returns status.
[[nodiscard]] Status Fail(Status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// "<field> is <value>, but must be <min>..<max>" unless it lies there.
[[nodiscard]] Status CheckRange(const char* field, int64_t value, int64_t min, int64_t max);

// 1..kHeadDimMax; larger is legal but unsupported.
[[nodiscard]] Status CheckHeadDim(const char* field, int64_t value);

[[nodiscard]] Status CheckPointer(const char* field, const void* data, int64_t alignment);
[[nodiscard]] Status CheckDevice(const Device& device);
[[nodiscard]] Status CheckDType(DType dtype);

// Of a mask that is given.
[[nodiscard]] Status CheckMaskTensor(const ProbeMask& mask);

// All of a call but for where the probe writes.  In probe.cc.
[[nodiscard]] Status CheckProbeCall(const ProbeParams& call);

// Starts at 0, never decreases, ends at total; [sequences + 1] in host memory.
[[nodiscard]] Status CheckCuSeqlens(const char* field, const int32_t* cu_seqlens, int64_t sequences, int64_t total);

inline int64_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Returns from the caller with the first status that is not kOk.
#define BELLWETHER_KERNELS_RETURN_IF_ERROR(expression)                               \
  do {                                                                               \
    if (const Status status_ = (expression); status_ != Status::kOk) return status_; \
  } while (false)

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_ERROR_H_
