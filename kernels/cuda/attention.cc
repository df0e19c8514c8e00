// The CUDA column of attention: refuses what is not built, then dispatches to the
// path that serves the GPU.

#include "bellwether/kernels/attention.h"

#include <initializer_list>

#include "backends.h"
#include "cuda/attention_convert.h"
#include "cuda/attention_path.h"
#include "cuda/attention_workspace.h"
#include "cuda/sm80/attention.h"
#include "cuda/sm90/attention.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int64_t kVectorElements = 8;  // 16 bytes, the copy engine's unit

Status CheckAligned(const char* field, const Tensor4& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % (2 * kVectorElements) != 0) {
    return Fail(Status::kUnsupported, "%s is not aligned to 16 bytes", field);
  }
  for (const int64_t stride : {t.batch_stride, t.head_stride, t.token_stride}) {
    if (stride < 0 || stride % kVectorElements != 0) {
      return Fail(Status::kUnsupported, "%s has stride %lld, but only multiples of 8 are built", field,
                  static_cast<long long>(stride));
    }
  }
  return Status::kOk;
}

Status CheckBuilt(const AttentionForwardParams& p) {
  if (p.mode == AttentionMode::kSr && p.stats != nullptr) {
    return Fail(Status::kUnsupported, "stats are given, but mode 4 (sr) is built without");
  }
  if (p.dtype == DType::kFloat32) {
    return Fail(Status::kUnsupported, "dtype is float32, but only bf16 and fp16 are built");
  }
  if (p.head_dim % kVectorElements != 0 || ValueDim(p) % kVectorElements != 0) {
    return Fail(Status::kUnsupported, "head_dim is %lld and v_dim %lld, but only multiples of 8 are built",
                static_cast<long long>(p.head_dim), static_cast<long long>(ValueDim(p)));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("q", p.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("k", p.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("v", p.v));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("o", p.o));
  return p.o_lo.data == nullptr ? Status::kOk : CheckAligned("o_lo", p.o_lo);
}

bool ServesSm90(const AttentionForwardParams& p, bool center, const AttentionGpu& gpu) {
  const bool bounded = p.key_bounds == nullptr || (WidestDim(p) <= 128 && !center);
  return gpu.path == AttentionPath::kSm90 && p.mask.data == nullptr && p.sinks == nullptr && bounded;
}

Status CheckWorkspace(const void* workspace, size_t bytes, size_t needed, int64_t alignment) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("workspace", workspace, alignment));
  return CheckRange("workspace_bytes", static_cast<int64_t>(bytes), static_cast<int64_t>(needed), INT64_MAX);
}

}  // namespace

size_t AttentionForwardWorkspaceBytes(const AttentionForwardParams&) { return sizeof(int32_t); }

size_t AttentionBackwardWorkspaceBytes(const AttentionForwardParams& p) { return BackwardWorkspaceBytes(p); }

Status AttentionForward(const AttentionForwardParams& p, void* stream) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckBuilt(p));
  if (p.batch == 0 || p.q_len == 0) return Status::kOk;
  if (p.workspace != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(
        CheckWorkspace(p.workspace, p.workspace_bytes, cuda::AttentionForwardWorkspaceBytes(p), 4));
  }
  AttentionGpu gpu = {};
  BELLWETHER_KERNELS_RETURN_IF_ERROR(ChooseAttentionPath(WidestDim(p), &gpu));
  return ServesSm90(p, false, gpu) ? sm90::AttentionForward(p, gpu.multiprocessors, stream)
                                   : sm80::AttentionForward(p, gpu.shared_bytes_sm, stream);
}

Status AttentionBackward(const AttentionBackwardParams& p, void* stream) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckBuilt(p.forward));
  if (p.forward.batch == 0 || p.forward.q_len == 0) {
    return Fail(Status::kUnsupported, "batch or q_len is 0: clear dk and dv instead");
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("d_o", p.d_o));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("dq", p.dq));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("dk", p.dk));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAligned("dv", p.dv));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(
      CheckWorkspace(p.workspace, p.workspace_bytes, BackwardWorkspaceBytes(p.forward), 16));
  AttentionGpu gpu = {};
  BELLWETHER_KERNELS_RETURN_IF_ERROR(ChooseAttentionPath(WidestDim(p.forward), &gpu));
  return ServesSm90(p.forward, p.center, gpu) ? sm90::AttentionBackward(p, stream)
                                              : sm80::AttentionBackward(p, gpu.shared_bytes_max, stream);
}

}  // namespace bellwether::kernels::cuda
