// The inner loops for processors with AVX-512 F, DQ and VL; see simd.h.

#include "cpu/simd.h"

namespace bellwether::kernels::cpu::avx512 {

inline constexpr int kVectorBytes = 64;
inline constexpr int kTileRows = 8;  // 8 sums hide the latency of one multiply-add
#include "cpu/simd_kernels.inc"

}  // namespace bellwether::kernels::cpu::avx512
