#include "bellwether/kernels/device.h"

#include "backends.h"

namespace bellwether::kernels {

bool IsAvailable(Backend backend) {
  if (backend == Backend::kCuda) return cuda::IsAvailable();
  return backend == Backend::kCpu;
}

}  // namespace bellwether::kernels
