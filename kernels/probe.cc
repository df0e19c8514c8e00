#include "bellwether/kernels/probe.h"

#include <cmath>
#include <limits>

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

Status CheckShape(const ProbeParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("batch", p.batch, 0, kBatchMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("heads", p.heads, 1, kHeadsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_heads", p.kv_heads, 1, p.heads));
  if (p.heads % p.kv_heads != 0) {
    return Fail(Status::kInvalidArgument, "heads is %lld, but must be a multiple of kv_heads %lld",
                static_cast<long long>(p.heads), static_cast<long long>(p.kv_heads));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("q_len", p.q_len, 0, kTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("k_len", p.k_len, 0, kTokensMax));
  return CheckHeadDim("head_dim", p.head_dim);
}

Status CheckScores(const ProbeParams& p) {
  if (!(std::isfinite(p.scale) && p.scale > 0)) {
    return Fail(Status::kInvalidArgument, "scale is %g, but must be finite and > 0", static_cast<double>(p.scale));
  }
  if (!(std::isfinite(p.softcap) && p.softcap >= 0)) {
    return Fail(Status::kInvalidArgument, "softcap is %g, but must be finite and >= 0 (0 = none)",
                static_cast<double>(p.softcap));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("window", p.window, 0, std::numeric_limits<int32_t>::max()));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(
      CheckRange("window_right", p.window_right, 0, std::numeric_limits<int32_t>::max()));
  return CheckRange("head_offset", p.head_offset, 0, std::numeric_limits<int32_t>::max());
}

Status CheckMask(const ProbeParams& p) {
  if (p.ranges.data != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("ranges", p.ranges.data, alignof(int32_t)));
  }
  if (p.mask.data != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMaskTensor(p.mask));
    if (p.mask.by_sample && p.gate != nullptr) {
      return Fail(Status::kInvalidArgument, "mask_by_sample is 1, but must be 0 with a gate, which changes the rows");
    }
  }
  if (p.visible.data == nullptr && (p.ranges.data != nullptr || p.mask.data != nullptr)) {
    return Fail(Status::kInvalidArgument, "visible is NULL, but must be given with ranges or a mask");
  }
  return p.sinks == nullptr ? Status::kOk : CheckPointer("sinks", p.sinks, alignof(float));
}

Status CheckOutputs(const ProbeParams& p) {
  constexpr int64_t kStrideMax = std::numeric_limits<int64_t>::max() / 64;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("stat_stride", p.stat_stride, p.heads, kStrideMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", p.out, alignof(float)));
  if (p.kv_out == nullptr) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_stat_stride", p.kv_stat_stride, p.kv_heads, kStrideMax));
  return CheckPointer("kv_out", p.kv_out, alignof(float));
}

Status CheckTensors(const ProbeParams& p) {
  if (p.gate != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("gate", p.gate, alignof(uint64_t)));
  }
  const int given = (p.v.data != nullptr) + (p.o.data != nullptr) + (p.d_o.data != nullptr);
  if (given != 0 && given != 3) {
    return Fail(Status::kInvalidArgument, "v is %s, o is %s, d_o is %s, but must be all three given or all NULL",
                p.v.data ? "given" : "NULL", p.o.data ? "given" : "NULL", p.d_o.data ? "given" : "NULL");
  }
  if (given == 3 && p.drift_only) {
    return Fail(Status::kInvalidArgument, "v, o and d_o are given, but must be NULL: drift_only is 1");
  }
  if (given == 3) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckHeadDim("v_dim", p.v_dim));
  if (p.batch == 0 || p.q_len == 0 || p.k_len == 0) return Status::kOk;  // Empty arrays.
  const int64_t size = SizeOf(p.dtype);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("q", p.q.data, size));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("k", p.k.data, size));
  if (given == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("v", p.v.data, size));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("o", p.o.data, size));
  return CheckPointer("d_o", p.d_o.data, size);
}

}  // namespace

Status CheckProbeCall(const ProbeParams& call) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckShape(call));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckScores(call));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMask(call));
  return CheckTensors(call);
}

Status Probe(const ProbeParams& params, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckProbeCall(params));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOutputs(params));
  if (device.backend == Backend::kCuda) return cuda::Probe(params, device.stream);
  if (params.gate == nullptr) return cpu::Probe(params, device.threads);
  if (params.gate[kGateOpen] == 0) return Status::kOk;
  ProbeParams open = params;
  open.seed += params.gate[kGateSeed];
  return cpu::Probe(open, device.threads);
}

}  // namespace bellwether::kernels
