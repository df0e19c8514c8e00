// The laws of attention where there are no kernels of them for CUDA.

#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

Status CpuOnly(const char* kernel) {
  return Fail(Status::kUnsupported, "backend is 1 (CUDA), but %s is built for 0 (CPU) only", kernel);
}

}  // namespace

Status AttentionLaws(const AttentionLawsParams&, void*) { return CpuOnly("attention_laws"); }
Status AttentionShadow(const AttentionShadowParams&, void*) { return CpuOnly("attention_shadow"); }

}  // namespace bellwether::kernels::cuda
