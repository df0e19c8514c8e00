#include "bellwether/kernels/key_leak.h"

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {

Status KeyLeak(const KeyLeakParams& params, const Device& device) {
  const KeyLeakParams& p = params;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("batch", p.batch, 0, kBatchMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_heads", p.kv_heads, 1, kHeadsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("k_len", p.k_len, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckHeadDim("head_dim", p.head_dim));
  if (p.batch != 0 && p.k_len != 0) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("d_k", p.d_k.data, SizeOf(p.dtype)));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("leak_sum", p.leak_sum, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("gradient_sum", p.gradient_sum, alignof(float)));
  if (p.gate != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("gate", p.gate, alignof(uint64_t)));
  }
  if (device.backend == Backend::kCuda) return cuda::KeyLeak(p, device.stream);
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return Status::kOk;
  return cpu::KeyLeak(p, device.threads);
}

}  // namespace bellwether::kernels
