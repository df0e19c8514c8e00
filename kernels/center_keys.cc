#include "bellwether/kernels/center_keys.h"

#include <cstdlib>

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

// An output whose rows overlap would be written twice.
Status CheckOutStride(const char* field, int64_t extent, int64_t stride, int64_t head_dim) {
  if (extent <= 1 || stride >= head_dim || stride <= -head_dim) return Status::kOk;
  return Fail(Status::kInvalidArgument, "%s is %lld, but must be at least head_dim %lld in magnitude, or rows overlap",
              field, static_cast<long long>(stride), static_cast<long long>(head_dim));
}

// All but the offsets themselves, which may lie on another device.
Status CheckPacked(const CenterKeysParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("batch (with cu_seqlens)", p.batch, 1, 1));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("sequences", p.sequences, 1, kTokensMax));
  return CheckPointer("cu_seqlens", p.cu_seqlens, alignof(int32_t));
}

}  // namespace

Status CenterKeys(const CenterKeysParams& params, const Device& device) {
  const CenterKeysParams& p = params;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("batch", p.batch, 0, kBatchMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_heads", p.kv_heads, 1, kHeadsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("k_len", p.k_len, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckHeadDim("head_dim", p.head_dim));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOutStride("out.batch_stride", p.batch, p.out_batch_stride, p.head_dim));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOutStride("out.head_stride", p.kv_heads, p.out_head_stride, p.head_dim));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOutStride("out.token_stride", p.k_len, p.out_token_stride, p.head_dim));
  if (p.batch != 0 && p.k_len != 0) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("k", p.k.data, SizeOf(p.dtype)));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, SizeOf(p.dtype)));
  }
  const bool packed = p.cu_seqlens != nullptr;
  if (packed) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPacked(p));
  if (device.backend == Backend::kCuda) return cuda::CenterKeys(p, device.stream);
  if (packed) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckCuSeqlens("cu_seqlens", p.cu_seqlens, p.sequences, p.k_len));
  }
  return cpu::CenterKeys(p, device.threads);
}

}  // namespace bellwether::kernels
