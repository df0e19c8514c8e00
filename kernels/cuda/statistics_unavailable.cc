// The statistics in a build without CUDA.

#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

Status CpuOnly(const char* kernel) {
  return Fail(Status::kUnavailable, "backend is 1 (CUDA), but %s is built for 0 (CPU) only", kernel);
}

}  // namespace

Status Probe(const ProbeParams&, void*) { return CpuOnly("the probe"); }
Status KeyLeak(const KeyLeakParams&, void*) { return CpuOnly("the key-gradient leak"); }
Status LawEqualRows(const LawEqualRowsParams&, void*) { return CpuOnly("the count of equal rows"); }
Status LawLogits(const LawLogitsParams&, void*) { return CpuOnly("what logits say"); }
Status LawNorms(const LawNormsParams&, void*) { return CpuOnly("the sums of a norm"); }
Status LawProducts(const LawProductsParams&, void*) { return CpuOnly("the products of the laws"); }
Status LawSums(const LawSumsParams&, void*) { return CpuOnly("the sums of the laws"); }
Status ModuleStats(const ModuleStatsParams&, void*) { return CpuOnly("the statistics of activations"); }
Status MomentLags(const MomentLagsParams&, void*) { return CpuOnly("the lags of second moments"); }
Status TensorStats(const TensorStatsParams&, void*) { return CpuOnly("the statistics of tensors"); }
Status SpectralNorms(const SpectralParams*, int64_t, void*) { return CpuOnly("the spectral norms"); }

}  // namespace bellwether::kernels::cuda
