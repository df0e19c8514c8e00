#include "bellwether/kernels/attention_laws.h"

#include <limits>

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

// The call as Probe() checks it, but for where the probe writes.
Status CheckGraded(const GradedAttention& of) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(
      CheckRange("arithmetic", static_cast<int>(of.arithmetic), 0, static_cast<int>(LawArithmetic::kAccumulated)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckProbeCall(of.call));
  if (of.call.d_o.data == nullptr && of.call.batch != 0 && of.call.q_len != 0 && of.call.k_len != 0) {
    return Fail(Status::kInvalidArgument, "v, o and d_o are NULL, but must be given");
  }
  if (of.call.drift_only) return Fail(Status::kInvalidArgument, "drift_only is 1, but must be 0");
  if (of.call.batch == 0 || of.call.q_len == 0 || of.call.k_len == 0) return Status::kOk;
  const int64_t size = SizeOf(of.call.dtype);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("d_q", of.d_q.data, size));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("d_k", of.d_k.data, size));
  return CheckPointer("d_v", of.d_v.data, size);
}

Status CheckOutputs(const ProbeParams& call, const LawOutputs& to) {
  constexpr int64_t kStrideMax = std::numeric_limits<int64_t>::max() / 64;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("stat_stride", to.stat_stride, call.heads, kStrideMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("out", to.out, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_stat_stride", to.kv_stat_stride, call.kv_heads, kStrideMax));
  return CheckPointer("kv_out", to.kv_out, alignof(float));
}

template <typename Params, typename Cpu, typename Cuda>
Status Dispatch(const Params& params, const Device& device, const Cpu& on_cpu, const Cuda& on_cuda) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckGraded(params.of));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOutputs(params.of.call, params.to));
  Params now = params;
  // Scores and sums in float32 are as good as exact beside the products' TF32.
  if (now.of.call.dtype == DType::kFloat32) now.of.arithmetic = LawArithmetic::kFused;
  if (device.backend == Backend::kCuda) return on_cuda(now, device.stream);
  const uint64_t* const gate = params.of.call.gate;
  if (gate != nullptr && gate[kGateOpen] == 0) return Status::kOk;
  if (gate != nullptr) now.of.call.seed += gate[kGateSeed];
  return on_cpu(now, device.threads);
}

}  // namespace

Status AttentionLaws(const AttentionLawsParams& params, const Device& device) {
  return Dispatch(params, device, cpu::AttentionLaws, cuda::AttentionLaws);
}

Status AttentionShadow(const AttentionShadowParams& params, const Device& device) {
  const ProbeParams& call = params.of.call;
  const bool some = call.rows_per_head != 0 && call.rows_per_head < call.q_len;
  if (params.keys_per_head != 0 && call.mask.data != nullptr && call.mask.by_sample && some) {
    return Fail(Status::kUnsupported, "keys_per_head is %u, but must be 0 with mask_by_sample", params.keys_per_head);
  }
  if (params.factors != nullptr || params.kv_factors != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("factors", params.factors, alignof(float)));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("kv_factors", params.kv_factors, alignof(float)));
  }
  return Dispatch(params, device, cpu::AttentionShadow, cuda::AttentionShadow);
}

}  // namespace bellwether::kernels
