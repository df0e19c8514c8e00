// The C interface of attention.h: checks the struct's size, copies fields.

#include "bellwether/kernels/attention_c_api.h"

#include <cstddef>
#include <cstdint>

#include "bellwether/kernels/attention.h"
#include "error.h"

namespace {

namespace bk = bellwether::kernels;
using bk::Status;

static_assert(static_cast<int>(BW_ATTENTION_HP) == static_cast<int>(bk::AttentionMode::kHp));
static_assert(static_cast<int>(BW_ATTENTION_HPM) == static_cast<int>(bk::AttentionMode::kHpm));

// Out of range keeps its value as far as an int goes, for the error sentence.
int ToInt(uint32_t value) { return value <= INT32_MAX ? static_cast<int>(value) : INT32_MAX; }

bk::Tensor4 ToTensor(const bw_tensor4& t) {
  return {t.data, t.batch_stride, t.head_stride, t.token_stride};
}

bk::AttentionForwardParams ToCpp(const bw_attention_forward_params& c) {
  bk::AttentionForwardParams p;
  p.dtype = static_cast<bk::DType>(ToInt(c.dtype));
  p.mode = static_cast<bk::AttentionMode>(ToInt(c.mode));
  p.batch = c.batch;
  p.heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.q_len = c.q_len;
  p.k_len = c.k_len;
  p.head_dim = c.head_dim;
  p.q = ToTensor(c.q);
  p.k = ToTensor(c.k);
  p.v = ToTensor(c.v);
  p.o = ToTensor(c.o);
  p.o_lo = ToTensor(c.o_lo);
  p.lse = c.lse;
  p.lse_batch_stride = c.lse_batch_stride;
  p.lse_head_stride = c.lse_head_stride;
  p.scale = c.scale;
  p.softcap = c.softcap;
  p.window = c.window;
  p.causal = c.causal != 0;
  p.workspace = c.workspace;
  p.workspace_bytes = c.workspace_bytes;
  return p;
}

// A struct from a newer header may be longer; what we do not know must be 0.
template <typename Params>
Status CheckSize(const Params* params) {
  if (params == nullptr) {
    return bk::Fail(Status::kInvalidArgument, "params is NULL, but must point to a struct");
  }
  if (params->struct_size < sizeof(Params)) {
    return bk::Fail(Status::kInvalidArgument, "struct_size is %u, but must be at least %zu",
                    params->struct_size, sizeof(Params));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(params);
  for (size_t i = sizeof(Params); i < params->struct_size; ++i) {
    if (bytes[i] != 0) {
      return bk::Fail(Status::kUnsupported, "fields beyond %zu must be 0: this library is older",
                      sizeof(Params));
    }
  }
  return Status::kOk;
}

Status CheckForward(const bw_attention_forward_params* c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("causal", c->causal, 0, 1));
  for (const uint8_t reserved : c->reserved) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", reserved, 0, 0));
  }
  return Status::kOk;
}

bk::Device ToDevice(const bw_attention_forward_params& c) {
  return {static_cast<bk::Backend>(ToInt(c.backend)), c.stream};
}

Status Forward(const bw_attention_forward_params* c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSize(c));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckForward(c));
  return bk::AttentionForward(ToCpp(*c), ToDevice(*c));
}

Status Backward(const bw_attention_backward_params* c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSize(c));
  // Embedded, so its size is part of this struct's layout.
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("forward.struct_size", c->forward.struct_size,
                                                    sizeof(c->forward), sizeof(c->forward)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", c->reserved, 0, 0));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckForward(&c->forward));
  bk::AttentionBackwardParams p;
  p.forward = ToCpp(c->forward);
  p.d_o = ToTensor(c->d_o);
  p.dq = ToTensor(c->dq);
  p.dk = ToTensor(c->dk);
  p.dv = ToTensor(c->dv);
  p.workspace = c->workspace;
  p.workspace_bytes = c->workspace_bytes;
  return bk::AttentionBackward(p, ToDevice(c->forward));
}

}  // namespace

extern "C" {

uint64_t bw_attention_forward_workspace(const bw_attention_forward_params* params) {
  if (CheckSize(params) != Status::kOk) return 0;
  return bk::AttentionForwardWorkspaceBytes(ToCpp(*params));
}

bw_kernel_status bw_attention_forward(const bw_attention_forward_params* params) {
  return static_cast<bw_kernel_status>(Forward(params));
}

uint64_t bw_attention_backward_workspace(const bw_attention_forward_params* params) {
  if (CheckSize(params) != Status::kOk) return 0;
  return bk::AttentionBackwardWorkspaceBytes(ToCpp(*params));
}

bw_kernel_status bw_attention_backward(const bw_attention_backward_params* params) {
  return static_cast<bw_kernel_status>(Backward(params));
}

}  // extern "C"
