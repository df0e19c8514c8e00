// The inner loops for every processor; see simd.h.

#include "cpu/simd.h"

namespace bellwether::kernels::cpu::baseline {

inline constexpr int kVectorBytes = 16;
inline constexpr int kTileRows = 2;  // 8 sums and 4 loads of 16 registers
#include "cpu/simd_kernels.inc"

}  // namespace bellwether::kernels::cpu::baseline
