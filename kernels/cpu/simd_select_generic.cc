#include "cpu/simd.h"

namespace bellwether::kernels::cpu {

namespace baseline {
extern const SimdKernels kKernels;
}

const SimdKernels& SelectSimdKernels() { return baseline::kKernels; }

}  // namespace bellwether::kernels::cpu
