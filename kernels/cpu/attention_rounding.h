// attention_rounding.h: where attention rounds to 16 bits.

#ifndef BELLWETHER_KERNELS_CPU_ATTENTION_ROUNDING_H_
#define BELLWETHER_KERNELS_CPU_ATTENTION_ROUNDING_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "bellwether/kernels/probe.h"
#include "cpu/element.h"

namespace bellwether::kernels::cpu {

// x as an Element holds it, to nearest even.
template <typename Element>
double Rounded(double x) {
  if constexpr (!std::is_same_v<Element, float>) {
    // Of a double's 52 fraction bits the element keeps the first; the common
    // case, where neither a subnormal nor an infinity comes out.
    constexpr bool kIsBFloat16 = std::is_same_v<Element, BFloat16>;
    constexpr int kDropped = 52 - (kIsBFloat16 ? 7 : 10);
    constexpr double kMin = kIsBFloat16 ? 0x1p-126 : 0x1p-14;
    constexpr double kMax = kIsBFloat16 ? 0x1p127 : 0x1p15;
    const double magnitude = std::fabs(x);
    if (magnitude >= kMin && magnitude < kMax) {
      const auto bits = std::bit_cast<uint64_t>(x);
      constexpr uint64_t kUlp = uint64_t{1} << kDropped;
      const uint64_t up = bits + (kUlp / 2 - 1) + (bits / kUlp % 2);
      return std::bit_cast<double>(up & ~(kUlp - 1));
    }
    if (x == 0) return x;
  }
  Element element;
  Assign(element, x);
  return static_cast<double>(ToFloat(element));
}

// 32 bits that depend on everything: the same element of the same call rounds
// the same way in every tiling.  CUDA has a cheaper hash of its own.
inline uint32_t RoundingBits(uint64_t seed, int64_t batch, int64_t head, int64_t row, int64_t channel) {
  uint64_t h = ProbeMix(seed ^ ProbeMix(static_cast<uint64_t>(batch)));
  h = ProbeMix(h ^ static_cast<uint64_t>(head));
  h = ProbeMix(h ^ static_cast<uint64_t>(row));
  return static_cast<uint32_t>(ProbeMix(h ^ static_cast<uint64_t>(channel)) >> 32);
}

inline void AssignStochastically(float& out, double x, uint32_t) { Assign(out, x); }

// Up with the probability of the fraction that truncation takes away.
inline void AssignStochastically(BFloat16& out, double x, uint32_t bits) {
  const float value = static_cast<float>(x);
  if (!std::isfinite(value)) return Assign(out, x);
  out = {static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + (bits >> 16)) >> 16)};
}

inline void AssignStochastically(Float16& out, double x, uint32_t bits) {
  if (!(std::fabs(x) < 65504)) return Assign(out, x);
  // The distance of two neighbours: 2^-24 below 2^-14, else 2^-10 of the binade.
  const double ulp = std::ldexp(1.0, std::max(std::ilogb(x == 0 ? 1.0 : x), -14) - 10);
  Assign(out, std::floor(x / ulp + static_cast<double>(bits) * 0x1p-32) * ulp);
}

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_ATTENTION_ROUNDING_H_
