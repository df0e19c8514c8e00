// Validates what attention.h promises and dispatches to a backend.

#include "bellwether/kernels/attention.h"

#include <cmath>
#include <initializer_list>

#include "cuda/sm90/attention.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

constexpr int64_t kVectorElements = 8;  // 16 bytes, the copy engine's unit

Status CheckTensor(const char* field, const Tensor4& t) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer(field, t.data, 2));
  if (reinterpret_cast<uintptr_t>(t.data) % (2 * kVectorElements) != 0) {
    return Fail(Status::kUnsupported, "%s is not aligned to 16 bytes", field);
  }
  for (const int64_t stride : {t.batch_stride, t.head_stride, t.token_stride}) {
    if (stride < 0 || stride % kVectorElements != 0) {
      return Fail(Status::kUnsupported, "%s has stride %lld, but only multiples of 8 are built",
                  field, static_cast<long long>(stride));
    }
  }
  return Status::kOk;
}

Status CheckSizes(const AttentionForwardParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("batch", p.batch, 0, kBatchMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("heads", p.heads, 1, kHeadsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_heads", p.kv_heads, 1, p.heads));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("q_len", p.q_len, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("k_len", p.k_len, 1, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckHeadDim("head_dim", p.head_dim));
  if (p.heads % p.kv_heads != 0) {
    return Fail(Status::kInvalidArgument, "kv_heads is %lld, but must divide heads = %lld",
                static_cast<long long>(p.kv_heads), static_cast<long long>(p.heads));
  }
  return Status::kOk;
}

Status CheckMode(const AttentionForwardParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("mode", static_cast<int>(p.mode), 0, 2));
  if (!std::isfinite(p.scale) || p.scale <= 0) {
    return Fail(Status::kInvalidArgument, "scale is %g, but must be finite and > 0", p.scale);
  }
  if (p.mode == AttentionMode::kFa && p.o_lo.data != nullptr) {
    return Fail(Status::kInvalidArgument, "o_lo is given, but mode fa has no residual");
  }
  if (p.mode == AttentionMode::kHpm) {
    return Fail(Status::kUnsupported, "mode is 2 (hpm), but only 0 (fa) and 1 (hp) are built");
  }
  if (p.dtype == DType::kFloat32) {
    return Fail(Status::kUnsupported, "dtype is float32, but only bf16 and fp16 are built");
  }
  if (p.window != 0 || p.softcap != 0) {
    return Fail(Status::kUnsupported, "window is %d and softcap %g, but only 0 is built", p.window,
                p.softcap);
  }
  return Status::kOk;
}

Status CheckCall(const AttentionForwardParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSizes(p));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMode(p));
  if (device.backend != Backend::kCuda) {
    return Fail(Status::kUnsupported, "backend is 0 (CPU), but attention is built for 1 (CUDA)");
  }
  if (p.batch == 0 || p.q_len == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("q", p.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("k", p.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("v", p.v));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("o", p.o));
  if (p.o_lo.data != nullptr) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("o_lo", p.o_lo));
  return CheckPointer("lse", p.lse, 4);
}

Status CheckWorkspace(const void* workspace, size_t bytes, size_t needed, int64_t alignment) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("workspace", workspace, alignment));
  return CheckRange("workspace_bytes", static_cast<int64_t>(bytes), static_cast<int64_t>(needed),
                    INT64_MAX);
}

}  // namespace

size_t AttentionForwardWorkspaceBytes(const AttentionForwardParams&) { return sizeof(int32_t); }

size_t AttentionBackwardWorkspaceBytes(const AttentionForwardParams& p) {
  return cuda::sm90::BackwardWorkspaceBytes(p);
}

Status AttentionForward(const AttentionForwardParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckCall(p, device));
  if (p.batch == 0 || p.q_len == 0) return Status::kOk;
  if (p.workspace != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckWorkspace(p.workspace, p.workspace_bytes,
                                                      AttentionForwardWorkspaceBytes(p), 4));
  }
  return cuda::sm90::AttentionForward(p, device.stream);
}

Status AttentionBackward(const AttentionBackwardParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckCall(p.forward, device));
  if (p.forward.batch == 0 || p.forward.q_len == 0) {
    return Fail(Status::kUnsupported, "batch or q_len is 0: clear dk and dv instead");
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("d_o", p.d_o));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("dq", p.dq));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("dk", p.dk));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckTensor("dv", p.dv));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckWorkspace(
      p.workspace, p.workspace_bytes, AttentionBackwardWorkspaceBytes(p.forward), 16));
  return cuda::sm90::AttentionBackward(p, device.stream);
}

}  // namespace bellwether::kernels
