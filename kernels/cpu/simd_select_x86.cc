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

int UsableSimdKernels(const SimdKernels* sets[kSimdSetsMax]) {
  __builtin_cpu_init();
  int count = 0;
  sets[count++] = &baseline::kKernels;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return count;
  sets[count++] = &avx2::kKernels;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets[count++] = &avx512::kKernels;
  }
  return count;
}

const SimdKernels& SelectSimdKernels() {
  static const SimdKernels& selected = []() -> const SimdKernels& {
    const SimdKernels* sets[kSimdSetsMax];
    return *sets[UsableSimdKernels(sets) - 1];
  }();
  return selected;
}

}  // namespace bellwether::kernels::cpu
