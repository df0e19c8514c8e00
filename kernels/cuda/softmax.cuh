// softmax.cuh: the tiled softmax of the stabilized attention, for accumulators
// in the m16n8 / m64nN fragment layout.
//
// Each thread holds two rows of a score tile: s[4 j + 0, 1] belong to row 0 and
// s[4 j + 2, 3] to row 1; the four lanes of a quad hold a row together.  Scores
// are used in log2 units, x = s * scale_log2, masked entries are -inf.  State of
// a row, fp32: the true maximum M, the anchor a used in exponents, l = sum P and
// (hp) lt = sum of P rounded as the PV product reads it:
//
//   t = max x;  M = max(M, t);  an = hp ? ceil(M) : M;  r = 2^(a - an)
//   l = l r + sum 2^(x - an);   lt = lt r + sum round(2^(x - an));   a = an
//   end: O = acc / (hp ? lt : l);   L = (M + ((a - M) + log2 l)) ln 2
//
// After every tile acc = sum of round(P) V in units of 2^-a, so O and L do not
// depend on the anchors in exact arithmetic.  x - a is one fused multiply-add:
// x is not rounded, and the rounding of a cancels in O and in L.  l and lt are
// partial sums of this thread until FinishRow().

#ifndef BELLWETHER_KERNELS_CUDA_SOFTMAX_CUH_
#define BELLWETHER_KERNELS_CUDA_SOFTMAX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace bellwether::kernels::cuda {

// kFa divides by l and anchors at the maximum.  kHp divides by lt, and the caller
// stores O's rounding residual; it anchors at integers: round(P) does not depend
// on the tile order, and accumulators are rescaled only when the maximum passes
// one, by a power of two.
enum class SoftmaxMode { kFa, kHp };

template <SoftmaxMode kMode>
inline constexpr bool kDividesByRounded = kMode == SoftmaxMode::kHp;

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds to nearest even; `low` goes to the lower half.
template <class T>
__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <class T>
__device__ __forceinline__ float2 UnpackPair(uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    __half2 pair;
    memcpy(&pair, &packed, sizeof(pair));
    return __half22float2(pair);
  }
}

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What a finished row needs: O = acc * inverse, and the log-sum-exp.
struct FinishedRow {
  float inverse;  // 0 for a fully masked row
  float lse;      // natural log; -inf for a fully masked row
};

// kSumRounded: lt is summed here; otherwise the caller has it (a column of ones
// beside V) or does not need it.
template <class T, SoftmaxMode kMode, bool kSumRounded>
struct SoftmaxRows {
  float max[2] = {-INFINITY, -INFINITY};
  float anchor[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
  float rounded_sum[2] = {0, 0};

  // Turns a tile of scores into probabilities and returns in `rescale` what the
  // accumulators of earlier tiles must be multiplied with (<= 1).  The pairs are
  // ready for Probabilities().  kMasked: a row may have no finite score yet.
  template <bool kMasked, int kCount>
  __device__ __forceinline__ void Tile(float (&s)[kCount], float scale_log2, float (&rescale)[2]) {
    float tile_max[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      tile_max[0] = fmaxf(tile_max[0], fmaxf(s[i], s[i + 1]));
      tile_max[1] = fmaxf(tile_max[1], fmaxf(s[i + 2], s[i + 3]));
    }
    float used[2];  // The anchor, or 0 where nothing is allowed yet.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = fmaxf(max[r], QuadMax(tile_max[r]) * scale_log2);
      const float next = kMode == SoftmaxMode::kHp ? ceilf(max[r]) : max[r];
      used[r] = kMasked && next == -INFINITY ? 0.f : next;
      rescale[r] = Exp2(anchor[r] - used[r]);
      anchor[r] = next;
      sum[r] *= rescale[r];
      if constexpr (kSumRounded) rounded_sum[r] *= rescale[r];
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int r = i / 2 % 2;
      s[i] = Exp2(fmaf(s[i], scale_log2, -used[r]));
      s[i + 1] = Exp2(fmaf(s[i + 1], scale_log2, -used[r]));
      sum[r] += s[i];
      sum[r] += s[i + 1];
      if constexpr (kSumRounded) {
        const float2 rounded = UnpackPair<T>(PackPair<T>(s[i], s[i + 1]));
        rounded_sum[r] += rounded.x;
        rounded_sum[r] += rounded.y;
      }
    }
  }

  // The packed probabilities of a tile, in the layout of the next product's A.
  template <int kCount>
  static __device__ __forceinline__ void Probabilities(const float (&s)[kCount],
                                                       uint32_t (&p)[kCount / 2]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      p[i] = PackPair<T>(s[2 * i], s[2 * i + 1]);
    }
  }

  // All four lanes of the quad call it and get the same.  `lt` is read only if
  // the mode divides by it and it was not summed here.
  __device__ __forceinline__ FinishedRow Finish(int r, float lt) const {
    const float l = QuadSum(sum[r]);
    const float divisor = kSumRounded ? QuadSum(rounded_sum[r]) : kDividesByRounded<kMode> ? lt : l;
    if (l == 0.f) return {0.f, -INFINITY};
    constexpr float kLn2 = 0.693147180559945309f;
    return {1.f / divisor, (max[r] + ((anchor[r] - max[r]) + log2f(l))) * kLn2};
  }
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_SOFTMAX_CUH_
