#include "bellwether/kernels/spectral.h"

#include "backends.h"
#include "error.h"

namespace bellwether::kernels {
namespace {

Status CheckMatrix(int64_t rows, int64_t columns) {
  if (rows > kSpectralRowsMax) {
    return Fail(Status::kUnsupported, "rows is %lld, but only 1..%lld is supported", static_cast<long long>(rows),
                static_cast<long long>(kSpectralRowsMax));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("rows", rows, 1, kSpectralRowsMax));
  return CheckRange("columns", columns, 1, kSpectralColumnsMax);
}

Status CheckOptional(const char* field, const float* data) {
  return data == nullptr ? Status::kOk : CheckPointer(field, data, alignof(float));
}

Status CheckSpectral(const SpectralParams& p) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDType(p.dtype));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("heads", p.heads, 0, kHeadsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMatrix(p.rows, p.columns));
  if (p.heads == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("weight", p.weight, SizeOf(p.dtype)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("sigma", p.sigma, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOptional("residual", p.residual));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOptional("stable_rank", p.stable_rank));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOptional("direction", p.direction));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOptional("overlap", p.overlap));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckOptional("gram", p.gram));
  if (p.overlap != nullptr && p.direction == nullptr) {
    return Fail(Status::kInvalidArgument,
                "direction is NULL, but must be given with overlap: it holds the vector before");
  }
  return Status::kOk;
}

}  // namespace

Status SpectralNorms(const SpectralParams* each, int64_t count, const Device& device) {
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("weights", count, 0, kSpectralWeightsMax));
  for (int64_t i = 0; i < count; ++i) BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckSpectral(each[i]));
  if (device.backend == Backend::kCuda) return cuda::SpectralNorms(each, count, device.stream);
  for (int64_t i = 0; i < count; ++i) {
    if (each[i].heads > 0) BELLWETHER_KERNELS_RETURN_IF_ERROR(cpu::SpectralNorms(each[i], device.threads));
  }
  return Status::kOk;
}

Status IncrementRank(const IncrementRankParams& params, const Device& device) {
  const IncrementRankParams& p = params;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckDevice(device));
  if (device.backend != Backend::kCpu) {
    return Fail(Status::kUnavailable, "backend is 1 (CUDA), but increment rank runs on 0 (CPU)");
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("heads", p.heads, 0, kHeadsMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckMatrix(p.rows, p.columns));
  if (p.heads == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckRange("kv_heads", p.kv_heads, 1, p.heads));
  if (p.heads % p.kv_heads != 0) {
    return Fail(Status::kInvalidArgument, "heads is %lld, but must be a multiple of kv_heads %lld",
                static_cast<long long>(p.heads), static_cast<long long>(p.kv_heads));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("wq", p.wq, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("wq_before", p.wq_before, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("wk", p.wk, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("wk_before", p.wk_before, alignof(float)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckPointer("effective_rank", p.effective_rank, alignof(float)));
  return cpu::IncrementRank(p, device.threads);
}

}  // namespace bellwether::kernels
