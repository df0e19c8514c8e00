// element.h: float32, bfloat16 and float16 elements as numbers, and back.

#ifndef BELLWETHER_KERNELS_CPU_ELEMENT_H_
#define BELLWETHER_KERNELS_CPU_ELEMENT_H_

#include <bit>
#include <cmath>
#include <cstdint>

#include "bellwether/kernels/device.h"

namespace bellwether::kernels::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline float ToFloat(float x) { return x; }

inline float ToFloat(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

// Moves the exponent by multiplication, which also makes subnormals right.
inline float ToFloat(Float16 x) {
  const uint32_t magnitude = uint32_t{x.bits} & 0x7fff;
  const uint32_t sign = (uint32_t{x.bits} & 0x8000) << 16;
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000u : 0u;  // Infinity or NaN.
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | sign);
}

// Nearest even.  NaN stays NaN.
inline BFloat16 ToBFloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline Float16 ToFloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (magnitude < 0x1p-14f) {  // Subnormal: the sum's last place is 2^-24.
    const float shifted = magnitude + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t m = std::bit_cast<uint32_t>(magnitude) - (112u << 23);
  return {static_cast<uint16_t>(sign | ((m + 0xfff + ((m >> 13) & 1)) >> 13))};
}

inline void Assign(float& out, double x) { out = static_cast<float>(x); }

// Rounds once: through a float that is rounded to odd, so that the second
// rounding cannot see a tie that the first one made.
inline float RoundToOdd(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || !std::isfinite(nearest)) return nearest;
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (bits & 1) return nearest;
  const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  return std::bit_cast<float>(away ? bits - 1 : bits + 1);
}

inline void Assign(BFloat16& out, double x) { out = ToBFloat16(RoundToOdd(x)); }
inline void Assign(Float16& out, double x) { out = ToFloat16(RoundToOdd(x)); }

// Calls f with a null pointer of the element's type.
template <typename Function>
auto WithElement(DType dtype, Function&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(static_cast<const BFloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<const Float16*>(nullptr));
    case DType::kFloat32:
      break;
  }
  return f(static_cast<const float*>(nullptr));
}

// The first element of row (batch, head, token).
template <typename Element>
const Element* RowOf(const Tensor4& t, int64_t batch, int64_t head, int64_t token) {
  return static_cast<const Element*>(t.data) + batch * t.batch_stride + head * t.head_stride + token * t.token_stride;
}

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_ELEMENT_H_
