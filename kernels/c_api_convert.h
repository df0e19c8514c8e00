// c_api_convert.h: what the C interface's entry points share: the size check
// and the fields' types.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_C_API_CONVERT_H_
#define BELLWETHER_KERNELS_C_API_CONVERT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bellwether/kernels/c_api.h"
#include "bellwether/kernels/device.h"
#include "error.h"

namespace bellwether::kernels::c_api {

// The bytes of the oldest header's struct: those of 1.1, or of its first, where it has grown since.  What has
// grown in attention_c_api.h stands in attention_c_api.cc.
template <typename Params>
inline constexpr size_t kSizeMin = sizeof(Params);
template <>
inline constexpr size_t kSizeMin<bw_probe_params> = offsetof(bw_probe_params, top_left);
template <>
inline constexpr size_t kSizeMin<bw_spectral_params> = offsetof(bw_spectral_params, next);
template <>
inline constexpr size_t kSizeMin<bw_center_keys_params> = offsetof(bw_center_keys_params, visible);
template <>
inline constexpr size_t kSizeMin<bw_attention_shadow_params> = offsetof(bw_attention_shadow_params, factors);

// A struct from a newer header may be longer; what we do not know must be 0.
template <typename Params>
Status CheckSize(const Params* params) {
  if (params == nullptr) {
    return Fail(Status::kInvalidArgument, "params is NULL, but must point to a struct");
  }
  if (params->struct_size < kSizeMin<Params>) {
    return Fail(Status::kInvalidArgument, "struct_size is %u, but must be at least %zu", params->struct_size,
                kSizeMin<Params>);
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(params);
  for (size_t i = sizeof(Params); i < params->struct_size; ++i) {
    if (bytes[i] == 0) continue;
    return Fail(Status::kUnsupported, "struct_size is %u, but fields beyond %zu must be 0: this library is older",
                params->struct_size, sizeof(Params));
  }
  return Status::kOk;
}

// Out of range keeps its value as far as an int goes, for the error sentence.
template <typename Enum>
Enum ToEnum(uint32_t value) {
  return static_cast<Enum>(value <= INT32_MAX ? static_cast<int>(value) : INT32_MAX);
}

inline Device ToDevice(uint32_t backend, void* stream, uint32_t threads) {
  return {ToEnum<Backend>(backend), stream, threads};
}

inline Tensor4 ToTensor(const bw_tensor4& t) { return {t.data, t.batch_stride, t.head_stride, t.token_stride}; }

// A copy of what CheckSize() passes; what an older header's struct lacks is 0.
template <typename Params>
Params Whole(const Params& params) {
  Params whole = {};
  std::memcpy(&whole, &params, std::min<size_t>(params.struct_size, sizeof(Params)));
  return whole;
}

template <typename Params>
bw_kernel_status Call(const Params* params, Status (*run)(const Params&)) {
  const Status status = CheckSize(params);
  return static_cast<bw_kernel_status>(status == Status::kOk ? run(Whole(*params)) : status);
}

}  // namespace bellwether::kernels::c_api

#endif  // BELLWETHER_KERNELS_C_API_CONVERT_H_
