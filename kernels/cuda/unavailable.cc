// Stands in for the CUDA column of backends.h when it is not built.

#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

Status Unavailable() {
  return Fail(Status::kUnavailable, "backend is 1 (CUDA), but this build has only 0 (CPU)");
}

}  // namespace

bool IsAvailable() { return false; }
Status Probe(const ProbeParams&, void*) { return Unavailable(); }
Status KeyLeak(const KeyLeakParams&, void*) { return Unavailable(); }
Status CenterKeys(const CenterKeysParams&, void*) { return Unavailable(); }
Status SpectralNorms(const SpectralParams&, void*) { return Unavailable(); }

}  // namespace bellwether::kernels::cuda
