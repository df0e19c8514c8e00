// The inner loops for processors with AVX2 and FMA; see simd.h.

#include "cpu/simd.h"

namespace bellwether::kernels::cpu::avx2 {

inline constexpr int kVectorBytes = 32;
inline constexpr int kTileRows = 4;  // 8 sums and 2 loads of 16 registers
#include "cpu/simd_kernels.inc"

}  // namespace bellwether::kernels::cpu::avx2
