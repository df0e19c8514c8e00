#include "cpu/simd.h"

namespace bellwether::kernels::cpu {

namespace baseline {
extern const SimdKernels kKernels;
}

int UsableSimdKernels(const SimdKernels* sets[kSimdSetsMax]) {
  sets[0] = &baseline::kKernels;
  return 1;
}

const SimdKernels& SelectSimdKernels() { return baseline::kKernels; }

}  // namespace bellwether::kernels::cpu
