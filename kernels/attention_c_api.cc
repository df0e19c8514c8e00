// The C interface of attention.h: checks the struct's size, copies fields.

#include "bellwether/kernels/attention_c_api.h"

#include <cstddef>
#include <cstring>

#include "bellwether/kernels/attention.h"
#include "bellwether/kernels/probe.h"
#include "c_api_convert.h"

namespace bellwether::kernels::c_api {

template <>
inline constexpr size_t kSizeMin<bw_attention_forward_params> = offsetof(bw_attention_forward_params, v_dim);
// The embedded struct has grown, too.
template <>
inline constexpr size_t kSizeMin<bw_attention_backward_params> = offsetof(bw_attention_backward_params, d_sinks) -
                                                                 (sizeof(bw_attention_forward_params) -
                                                                  kSizeMin<bw_attention_forward_params>);

}  // namespace bellwether::kernels::c_api

namespace {

namespace bk = bellwether::kernels;
using bk::Status;
using bk::c_api::Call;
using bk::c_api::CheckSize;
using bk::c_api::kSizeMin;
using bk::c_api::ToEnum;
using bk::c_api::ToTensor;
using bk::c_api::Whole;

static_assert(static_cast<int>(BW_ATTENTION_HP) == static_cast<int>(bk::AttentionMode::kHp));
static_assert(static_cast<int>(BW_ATTENTION_LT) == static_cast<int>(bk::AttentionMode::kLt));

bk::AttentionForwardParams ToCpp(const bw_attention_forward_params& c) {
  bk::AttentionForwardParams p;
  p.dtype = ToEnum<bk::DType>(c.dtype);
  p.mode = ToEnum<bk::AttentionMode>(c.mode);
  p.batch = c.batch;
  p.heads = c.heads;
  p.kv_heads = c.kv_heads;
  p.q_len = c.q_len;
  p.k_len = c.k_len;
  p.head_dim = c.head_dim;
  p.v_dim = c.v_dim;
  p.q = ToTensor(c.q);
  p.k = ToTensor(c.k);
  p.v = ToTensor(c.v);
  p.cu_seqlens_q = c.cu_seqlens_q;
  p.cu_seqlens_k = c.cu_seqlens_k;
  p.sequences = c.sequences;
  p.key_bounds = c.key_bounds;
  p.mask = {.data = c.mask,
            .dtype = ToEnum<bk::MaskDType>(c.mask_dtype),
            .batch_stride = c.mask_batch_stride,
            .head_stride = c.mask_head_stride,
            .row_stride = c.mask_row_stride,
            .key_stride = c.mask_key_stride};
  p.sinks = c.sinks;
  p.scale = c.scale;
  p.causal = c.causal != 0;
  p.window = c.window;
  p.softcap = c.softcap;
  p.paper_eps = c.paper_eps;
  p.paper_beta = c.paper_beta;
  p.seed = c.seed;
  p.o = ToTensor(c.o);
  p.o_lo = ToTensor(c.o_lo);
  p.lse = c.lse;
  p.anchor = c.anchor;
  p.rounded_sum = c.rounded_sum;
  p.lse_batch_stride = c.lse_batch_stride;
  p.lse_head_stride = c.lse_head_stride;
  p.stats = c.stats;
  p.stat_stride = c.stat_stride;
  if (c.stats_every != 0) p.stats_every = c.stats_every;
  p.workspace = c.workspace;
  p.workspace_bytes = c.workspace_bytes;
  return p;
}

bk::Device ToDevice(const bw_attention_forward_params& c) {
  return bk::c_api::ToDevice(c.backend, c.stream, c.threads);
}

Status CheckForward(const bw_attention_forward_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("causal", c.causal, 0, 1));
  for (const uint8_t reserved : c.reserved) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", reserved, 0, 0));
  }
  return bk::CheckRange("reserved2", c.reserved2, 0, 0);
}

Status Forward(const bw_attention_forward_params& c) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckForward(c));
  return bk::AttentionForward(ToCpp(c), ToDevice(c));
}

// `forward` is embedded, so that its size decides where the rest lies.  Moves the rest to where
// today's header has it.
Status MoveBehindForward(bw_attention_backward_params* c) {
  constexpr size_t kShort = kSizeMin<bw_attention_forward_params>, kLong = sizeof(bw_attention_forward_params);
  constexpr size_t kRest =
      offsetof(bw_attention_backward_params, d_sinks) - offsetof(bw_attention_backward_params, d_o);
  if (c->forward.struct_size == kLong) {
    return bk::CheckRange("struct_size", c->struct_size, offsetof(bw_attention_backward_params, d_sinks), UINT32_MAX);
  }
  if (c->forward.struct_size != kShort) {
    return bk::Fail(Status::kInvalidArgument, "forward.struct_size is %u, but must be %zu, or %zu before 1.3",
                    c->forward.struct_size, kLong, kShort);
  }
  unsigned char* const forward = reinterpret_cast<unsigned char*>(&c->forward);
  std::memmove(forward + kLong, forward + kShort, kRest);
  std::memset(forward + kShort, 0, kLong - kShort);
  c->d_sinks = nullptr;
  return Status::kOk;
}

Status Backward(const bw_attention_backward_params& given) {
  bw_attention_backward_params c = given;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(MoveBehindForward(&c));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("center", c.center, 0, 1));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("deterministic", c.deterministic, 0, 1));
  for (const uint8_t reserved : c.reserved) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(bk::CheckRange("reserved", reserved, 0, 0));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckForward(c.forward));
  bk::AttentionBackwardParams p;
  p.forward = ToCpp(c.forward);
  p.d_o = ToTensor(c.d_o);
  p.dq = ToTensor(c.dq);
  p.dk = ToTensor(c.dk);
  p.dv = ToTensor(c.dv);
  p.d_sinks = c.d_sinks;
  p.center = c.center != 0;
  p.deterministic = c.deterministic != 0;
  p.workspace = c.workspace;
  p.workspace_bytes = c.workspace_bytes;
  return bk::AttentionBackward(p, ToDevice(c.forward));
}

}  // namespace

extern "C" {

uint64_t bw_attention_forward_workspace(const bw_attention_forward_params* params) {
  return CheckSize(params) == Status::kOk ? bk::AttentionForwardWorkspaceBytes(ToCpp(Whole(*params))) : 0;
}

bw_kernel_status bw_attention_forward(const bw_attention_forward_params* params) { return Call(params, Forward); }

uint64_t bw_attention_backward_workspace(const bw_attention_forward_params* params) {
  return CheckSize(params) == Status::kOk ? bk::AttentionBackwardWorkspaceBytes(ToCpp(Whole(*params))) : 0;
}

bw_kernel_status bw_attention_backward(const bw_attention_backward_params* params) { return Call(params, Backward); }

}  // extern "C"
