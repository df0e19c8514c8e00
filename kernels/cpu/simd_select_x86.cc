#include "cpu/simd.h"

namespace bellwether::kernels::cpu {

namespace baseline {
extern const SimdKernels kKernels;
}
namespace avx2 {
extern const SimdKernels kKernels;
}
namespace avx512 {
extern const SimdKernels kKernels;
}

const SimdKernels& SelectSimdKernels() {
  static const SimdKernels& selected = [&]() -> const SimdKernels& {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
      return avx512::kKernels;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kKernels;
    return baseline::kKernels;
  }();
  return selected;
}

}  // namespace bellwether::kernels::cpu
