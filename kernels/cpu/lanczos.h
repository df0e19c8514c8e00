// lanczos.h: the top eigenpair of a small positive semidefinite matrix.

#ifndef BELLWETHER_KERNELS_CPU_LANCZOS_H_
#define BELLWETHER_KERNELS_CPU_LANCZOS_H_

#include <cstdint>

#include "bellwether/kernels/spectral.h"

namespace bellwether::kernels::cpu {

inline constexpr int64_t kLanczosBasisMax = kLanczosSteps * kLanczosRoundsMax;

// Doubles of scratch that TopEigenpair needs.
constexpr int64_t LanczosScratch(int64_t n) {
  return (kLanczosBasisMax + 1) * n + kLanczosBasisMax * (kLanczosBasisMax + 4) + n;
}

struct Eigenpair {
  double value;     // Rayleigh quotient of the vector
  double residual;  // |A v - value v|
};

// a: [n] rows, `stride` apart, finite, not all zero.  vector [n]: in, a hint of
// any length (0 = none); out, the unit Ritz vector.
Eigenpair TopEigenpair(int64_t n, const double* a, int64_t stride, double* vector, double* scratch);

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_LANCZOS_H_
