// Stands in for cuda/center_keys.cu in a build without CUDA.

#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cuda {

bool IsAvailable() { return false; }

Status CenterKeys(const CenterKeysParams&, void*) {
  return Fail(Status::kUnavailable, "backend is 1 (CUDA), but this build has only 0 (CPU)");
}

}  // namespace bellwether::kernels::cuda
