// laws_rounding.cuh: the numbers that a type can hold: how far apart they are, and the rounding to
// the nearest.  float32 stands for TF32, to which operands of a matrix product may be rounded.

#ifndef BELLWETHER_KERNELS_CUDA_LAWS_ROUNDING_CUH_
#define BELLWETHER_KERNELS_CUDA_LAWS_ROUNDING_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "bellwether/kernels/attention_laws.h"

namespace bellwether::kernels::cuda {

// Bits of the significand, with the leading one.
template <class Element>
inline constexpr int kSignificand = std::is_same_v<Element, __nv_bfloat16> ? 8 : 11;

// Below it the distances stay the same.
template <class Element>
inline constexpr float kBaseMin = std::is_same_v<Element, __half> ? 0x1p-14f : 0x1p-126f;

// The power of two at or below |x|; neighbours are 2^(1 - kSignificand) of it apart.  Infinite
// if x is not finite.
template <class Element>
__device__ __forceinline__ float BaseOf(float x) {
  return fmaxf(__uint_as_float(__float_as_uint(x) & 0x7f800000u), kBaseMin<Element>);
}

// What rounding to the nearest adds has this variance, times the square of the base.
template <class Element>
inline constexpr double kVarianceOfBase = 1.0 / (12 * static_cast<double>(1 << (kSignificand<Element> - 1)) *
                                                 static_cast<double>(1 << (kSignificand<Element> - 1)));

// Of a number that fp32 has computed: 1 may have become a little less, and has twice the base of that.
template <class Element>
__device__ __forceinline__ float BaseNear(float x) {
  return BaseOf<Element>(fmaf(x, 0x1p-18f, x));
}

// To the nearest, even where two are as near.
template <class Element>
__device__ __forceinline__ float RoundTo(float x) {
  if constexpr (std::is_same_v<Element, float>) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return x;
    return __uint_as_float((bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu);
  } else {
    return static_cast<float>(static_cast<Element>(x));
  }
}

// Roundings inside of a kernel.
struct LawInsideOf {
  float factor, inverse;  // 0 to 1: where factor * dS is subnormal, it is what is rounded
  float score_roundings;  // of scores, behind the product
  float in_fp32;          // of scores, in fp32
};

// What rounding to the type adds to a number inside of a kernel; squares: of its base, or as much as
// leaves no more than the number itself.
struct LawAdded {
  float error, squares;
};

template <class Element>
__device__ __forceinline__ LawAdded AddedTo(float x, float base, float rounded) {
  constexpr auto kSelf = static_cast<float>(1 / kVarianceOfBase<Element>);
  return {rounded - x, fminf(base * base, kSelf * x * x)};
}
template <class Element>
__device__ __forceinline__ LawAdded AddedToP(float p) {
  return AddedTo<Element>(p, BaseNear<Element>(p), RoundTo<Element>(p));
}
template <class Element>
__device__ __forceinline__ LawAdded AddedToDs(float ds, const LawInsideOf& inside) {
  const float part = ds * inside.factor;
  if (fabsf(part) >= kBaseMin<Element>) return AddedTo<Element>(ds, BaseOf<Element>(ds), RoundTo<Element>(ds));
  return AddedTo<Element>(ds, kBaseMin<Element> * inside.inverse, RoundTo<Element>(part) * inside.inverse);
}

// What roundings of scores in fp32 give each P, as a variance over P^2; first: the row's largest.
__device__ __forceinline__ float OfScoresInFp32(const LawInsideOf& inside, float first) {
  const float ulp = BaseOf<float>(fabsf(first) + 1.f) * 0x1p-23f;
  const float variance = fminf(inside.in_fp32 * ulp * ulp / 12.f, static_cast<float>(kLawScoreVarianceMax));
  return expm1f(variance) * expf(variance);
}

// What all roundings of scores give each P, as squares of bases over P^2.
template <class Element>
__device__ __forceinline__ float SquaresOfScores(const LawInsideOf& inside, float first) {
  const float base = BaseOf<Element>(fabsf(first) + 1.f);
  const float in_type = inside.score_roundings > 0.f ? inside.score_roundings * base * base : 0.f;
  return in_type + OfScoresInFp32(inside, first) * static_cast<float>(1 / kVarianceOfBase<Element>);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAWS_ROUNDING_CUH_
