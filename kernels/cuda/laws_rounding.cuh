// laws_rounding.cuh: the numbers that a type can hold: how far apart they are, and the rounding to
// the nearest.  float32 stands for TF32, to which operands of a matrix product may be rounded.

#ifndef BELLWETHER_KERNELS_CUDA_LAWS_ROUNDING_CUH_
#define BELLWETHER_KERNELS_CUDA_LAWS_ROUNDING_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

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

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAWS_ROUNDING_CUH_
