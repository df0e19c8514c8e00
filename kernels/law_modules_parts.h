// law_modules_parts.h: what the CPU and the GPU share of law_modules.h.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_LAW_MODULES_PARTS_H_
#define BELLWETHER_KERNELS_LAW_MODULES_PARTS_H_

#include <cstdint>

#include "bellwether/kernels/law_modules.h"

#ifdef __CUDACC__
#define BELLWETHER_LAW_SHARED __host__ __device__ __forceinline__
#else
#define BELLWETHER_LAW_SHARED inline
#endif

namespace bellwether::kernels {

// Logits that are further below the largest one count as this far: their exponential is 1.6e-38,
// still a normal float.
inline constexpr float kFarBelow = -87.0f;

// Of the least one, from 0: numbers that are closer have few values, and lose alike.
inline constexpr int kFewDistances = 16;

// Sums over a row of a norm; ulp2 as in law_modules.h.
struct NormRow {
  double squares = 0;   // c^2
  double sizes = 0;     // |c|
  double c_d_x = 0;     // c dx
  double w_d_y = 0;     // w dy
  double d_x = 0;       // dx
  double d_x_ulp2 = 0;  // ulp2(dx)
  double lost = 0;      // lost(dx)
  double c_lost = 0;    // |c| lost(dx)
  double variance = 0;  // c^2 ulp2(dx)
  double inside = 0;    // dy^2 ulp2(y) + w^2 ulp2(dy)
  double gained = 0;    // (g dy)^2
};

// Fills out[kLawNormRowCount], out[i * stride] each.  root, norm: square roots by the caller's math.
template <typename Root>
BELLWETHER_LAW_SHARED void StoreNormRow(const LawNormsParams& p, const NormRow& row, double mean, Root root,
                                        int64_t stride, double* out) {
  const auto n = static_cast<double>(p.n);
  const double square = row.squares / n + p.eps, r = root(square);
  const double off = (mean < 0 ? -mean : mean) / r;
  const double within = p.inside * (1 + 2 * off), small = p.eps / square;
  const double size = root(row.gained) / r;  // What dx is made of: sums of this size cancel in it.
  // dx is the gradient less its mean and its part along x, by r, each product flushed.
  const double flushed = kLawFlushed * (1 + 2 / r), along = kLawFlushed / square;
  out[kLawNormScaleDifference * stride] = row.c_d_x - row.w_d_y * small;
  out[kLawNormScaleVariance * stride] = (row.variance + small * small * row.inside) / 12;
  out[kLawNormScaleAlike * stride] =
      within * root(row.squares) * size + flushed * row.sizes + along * row.squares + row.c_lost;
  out[kLawNormMeanDifference * stride] = p.centred ? row.d_x : 0;
  out[kLawNormMeanVariance * stride] = p.centred ? row.d_x_ulp2 / 12 : 0;
  out[kLawNormMeanAlike * stride] =
      p.centred ? within * root(n) * size + flushed * n + along * row.sizes + row.lost : 0;
  out[kLawNormOff * stride] = off;
}

// A mix of 64 bits, one to one.
BELLWETHER_LAW_SHARED uint64_t MixedKey(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Of a group's columns, by their bits: exact in 16 bits.  Not 0 where one of them is not 0.
BELLWETHER_LAW_SHARED uint64_t KeyOf(const uint32_t* bits, bool in_16_bits) {
  static_assert(kEqualColumns == 4);
  if (in_16_bits) {
    return uint64_t{bits[0]} | uint64_t{bits[1]} << 16 | uint64_t{bits[2]} << 32 | uint64_t{bits[3]} << 48;
  }
  const uint64_t first = uint64_t{bits[0]} | uint64_t{bits[1]} << 32;
  const uint64_t second = uint64_t{bits[2]} | uint64_t{bits[3]} << 32;
  const uint64_t key = MixedKey(MixedKey(first + 0x9E3779B97F4A7C15u) ^ second);
  return key == 0 ? 1 : key;
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_LAW_MODULES_PARTS_H_
