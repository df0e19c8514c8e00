// Validates what attention.h promises and dispatches to a backend.

#include "bellwether/kernels/attention.h"

#include <cmath>
#include <initializer_list>
#include <limits>

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

Status CheckSizes(const AttentionForwardParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("batch", p.batch, 0, kBatchMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("heads", p.heads, 1, kHeadsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_heads", p.kv_heads, 1, p.heads));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("q_len", p.q_len, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("k_len", p.k_len, 1, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckHeadDim("head_dim", p.head_dim));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckHeadDim("v_dim", ValueDim(p)));
  if (p.heads % p.kv_heads != 0) {
    return Fail(Status::kInvalidArgument, "kv_heads is %lld, but must divide heads = %lld",
                static_cast<long long>(p.kv_heads), static_cast<long long>(p.heads));
  }
  if ((p.cu_seqlens_q != nullptr) != (p.cu_seqlens_k != nullptr)) {
    return Fail(Status::kInvalidArgument, "cu_seqlens_%s is NULL, but the other is given",
                p.cu_seqlens_q == nullptr ? "q" : "k");
  }
  if (p.cu_seqlens_q == nullptr) return CheckRange("sequences", p.sequences, 0, 0);
  if (p.key_bounds != nullptr || p.mask.data != nullptr) {
    return Fail(Status::kInvalidArgument, "%s is given, but must be NULL with cu_seqlens",
                p.key_bounds != nullptr ? "key_bounds" : "mask");
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("batch with cu_seqlens", p.batch, 0, 1));
  return CheckRange("sequences", p.sequences, 1, kBatchMax);
}

Status CheckNumber(const char* field, double value, bool legal, const char* range) {
  if (legal && std::isfinite(value)) return Status::kOk;
  return Fail(Status::kInvalidArgument, "%s is %g, but must be finite and %s", field, value, range);
}

Status CheckScores(const AttentionForwardParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckNumber("scale", p.scale, p.scale > 0, "> 0"));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckNumber("softcap", p.softcap, p.softcap >= 0, ">= 0"));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("window", p.window, 0, std::numeric_limits<int32_t>::max()));
  if (p.mode != AttentionMode::kPaper) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckNumber("paper_eps", p.paper_eps, p.paper_eps >= 0, ">= 0"));
  return CheckNumber("paper_beta", p.paper_beta, p.paper_beta > 1, "> 1");
}

// Which of the optional outputs go with the mode.
Status CheckMode(const AttentionForwardParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("mode", static_cast<int>(p.mode), 0, 6));
  const bool residual =
      p.mode == AttentionMode::kHp || p.mode == AttentionMode::kHpm || p.mode == AttentionMode::kHpNolt;
  if (!residual && p.o_lo.data != nullptr) {
    return Fail(Status::kInvalidArgument, "o_lo is given, but mode %d has no residual: only 1, 2 and 5 have",
                static_cast<int>(p.mode));
  }
  const bool anchored = p.mode == AttentionMode::kHpm;
  for (const float* given : {p.anchor, p.rounded_sum}) {
    if ((given != nullptr) == anchored) continue;
    return Fail(Status::kInvalidArgument, "%s is %s, but mode %d needs %s",
                given == p.anchor ? "anchor" : "rounded_sum", given == nullptr ? "NULL" : "given",
                static_cast<int>(p.mode), anchored ? "it" : "NULL");
  }
  return Status::kOk;
}

Status CheckMask(const AttentionForwardParams& p) {
  if (p.key_bounds != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("key_bounds", p.key_bounds, alignof(int32_t)));
  }
  if (p.sinks != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("sinks", p.sinks, alignof(float)));
  }
  return p.mask.data == nullptr ? Status::kOk : CheckMaskTensor(p.mask);
}

Status CheckMemory(const AttentionForwardParams& p) {
  const int64_t size = SizeOf(p.dtype);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("q", p.q.data, size));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("k", p.k.data, size));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("v", p.v.data, size));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("o", p.o.data, size));
  if (p.o_lo.data != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("o_lo", p.o_lo.data, 2));
  }
  if (p.stats != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("stats", p.stats, alignof(float)));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(
        CheckRange("stat_stride", p.stat_stride, p.heads, std::numeric_limits<int64_t>::max() / 64));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("stats_every", p.stats_every, 1, 1024));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMask(p));
  return CheckPointer("lse", p.lse, alignof(float));
}

Status CheckCall(const AttentionForwardParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSizes(p));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMode(p));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckScores(p));
  return p.batch == 0 || p.q_len == 0 ? Status::kOk : CheckMemory(p);
}

}  // namespace

size_t AttentionForwardWorkspaceBytes(const AttentionForwardParams& p) {
  return cuda::AttentionForwardWorkspaceBytes(p);
}

size_t AttentionBackwardWorkspaceBytes(const AttentionForwardParams& p) {
  return cuda::AttentionBackwardWorkspaceBytes(p);
}

Status AttentionForward(const AttentionForwardParams& p, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckCall(p, device));
  if (device.backend == Backend::kCuda) return cuda::AttentionForward(p, device.stream);
  return cpu::AttentionForward(p, device.threads);
}

Status AttentionBackward(const AttentionBackwardParams& p, const Device& device) {
  const AttentionForwardParams& f = p.forward;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckCall(f, device));
  if (p.center && f.softcap != 0) {
    return Fail(Status::kInvalidArgument,
                "softcap is %g, but must be 0 with center: capped scores are not shift invariant",
                static_cast<double>(f.softcap));
  }
  if (p.center && f.sinks != nullptr) {
    return Fail(Status::kInvalidArgument,
                "sinks are given, but must be NULL with center: a sink does not move with the keys");
  }
  if (p.d_sinks != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("d_sinks", p.d_sinks, alignof(float)));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("sinks (with d_sinks)", f.sinks, alignof(float)));
  }
  const int64_t size = SizeOf(f.dtype);
  if (f.batch != 0) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("dk", p.dk.data, size));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("dv", p.dv.data, size));
  }
  if (f.batch != 0 && f.q_len != 0) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("d_o", p.d_o.data, size));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("dq", p.dq.data, size));
  }
  if (device.backend == Backend::kCuda) return cuda::AttentionBackward(p, device.stream);
  return cpu::AttentionBackward(p, device.threads);
}

}  // namespace bellwether::kernels
