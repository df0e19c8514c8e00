// softmax.cuh: the tiled softmax of the stabilized attention, for accumulators
// in the m16n8 / m64nN fragment layout.
//
// Each thread holds two rows of a score tile: s[4 j + 0, 1] belong to row 0 and
// s[4 j + 2, 3] to row 1; the four lanes of a quad hold a row together.  Scores
// are used in log2 units, x = s * scale_log2, masked entries are -inf.  State of
// a row, fp32: the true maximum M, the anchor a used in exponents, l = sum P and
// (hp) lt = sum of P rounded as the PV product reads it:
//
//   t = max x;  M = max(M, t);  an = fa ? M : hp ? ceil(M) : max(a, M + shift)
//   r = 2^(a - an);  l = l r + sum 2^(x - an);  lt = lt r + sum round(2^(x - an));  a = an
//   end: O = acc / (hp ? lt : l);   L = (M + ((a - M) + log2 l)) ln 2
//   shift = more than one x >= M - eps ? clamp(M > 0 ? (beta - 1) M : -M, min, max) : 0
//
// After every tile acc = sum of round(P) V in units of 2^-a, so O and L do not
// depend on the anchors in exact arithmetic (standing_rows.cuh: hp's need not be
// the ceiling of M).  x - a is one fused multiply-add:
// x is not rounded, and the rounding of a cancels in O and in L.  l and lt are
// partial sums of this thread until Finish().

#ifndef BELLWETHER_KERNELS_CUDA_SOFTMAX_CUH_
#define BELLWETHER_KERNELS_CUDA_SOFTMAX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/attention_params.h"
#include "cuda/top_two.cuh"

namespace bellwether::kernels::cuda {

// kFa divides by l and anchors at the maximum.  kHp divides by lt; it anchors at
// integers: round(P) does not depend on the tile order, and accumulators are
// rescaled only when the maximum passes one, or several (standing_rows.cuh), by a
// power of two.  With either the caller may store O's rounding residual.  kSr is
// kHp without the residual: the caller rounds O at random.  kPaper is Algorithm 3
// of arXiv:2510.04212: it divides by l and anchors above the maximum where that is
// repeated.
enum class SoftmaxMode { kFa, kHp, kSr, kPaper };

template <SoftmaxMode kMode>
inline constexpr bool kDividesByRounded = kMode == SoftmaxMode::kHp || kMode == SoftmaxMode::kSr;

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Within 2^-22 absolute, unlike tanh.approx (2^-11 relative, which a cap of 50
// turns into 0.02 of a logit).
__device__ __forceinline__ float Tanh(float x) {
  constexpr float k2Log2E = 2.88539008177792681f;
  return 1.f - __fdividef(2.f, Exp2(x * k2Log2E) + 1.f);
}

// Makes one 64-bit value of two floats and takes it apart again, which changes how
// ptxas allocates them.  Each FFMA of a tile subtracts one of the two anchors.  If
// both lie in registers of like parity, ptxas marks few of these operands for
// reuse; otherwise nearly all, and the forward is 2 to 9 % faster, as the tensor
// cores read registers too.  `zero` is 0, but ptxas must not know.
__device__ __forceinline__ void PairRegisters(float& low, float& high, uint32_t zero) {
  uint64_t pair = (uint64_t{__float_as_uint(high)} << 32) | uint64_t{__float_as_uint(low)};
  asm("mad.wide.u32 %0, %1, %1, %0;" : "+l"(pair) : "r"(zero));
  low = __uint_as_float(static_cast<uint32_t>(pair));
  high = __uint_as_float(static_cast<uint32_t>(pair >> 32));
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

// The packed probabilities of a tile, in the layout of the next product's A.
template <class T, int kScores>
__device__ __forceinline__ void PackPairs(const float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    p[i] = PackPair<T>(s[2 * i], s[2 * i + 1]);
  }
}

// Rounds up with the probability of the fraction: the mean error is 0 (fp16:
// unless the result is subnormal).  `random` is uniform over 32 bits.
template <class T>
__device__ __forceinline__ uint32_t PackPairAtRandom(float low, float high, uint32_t random) {
  constexpr uint32_t kDropped = std::is_same_v<T, __nv_bfloat16> ? 0xffffu : 0x1fffu;
  const auto round = [](float x, uint32_t bits) {
    uint32_t word;  // As __float_as_uint, but that makes ptxas spill where a thread has 128 of them.
    asm("mov.b32 %0, %1;" : "=r"(word) : "f"(x));
    // A NaN is all ones here: the sum would be -0.
    return x == x ? __uint_as_float((word + (bits & kDropped)) & ~kDropped) : x;
  };
  return PackPair<T>(round(low, random), round(high, random >> 16));
}

// A bijection of 32 bits with little correlation between neighbours (lowbias32,
// C. Wellons).
__device__ __forceinline__ uint32_t MixBits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The largest of this thread's scores of each of its rows: of kChunks chunks of them,
// which are independent, and of these.
template <int kChunks, int kScores>
__device__ __forceinline__ void MaxOfChunks(const float (&s)[kScores], float (&chunk_max)[kChunks][2]) {
#pragma unroll
  for (int i = 0; i < kScores; i += 4) {
    constexpr int kChunk = kScores / kChunks;
    float(&c)[2] = chunk_max[i / kChunk];
    c[0] = i % kChunk == 0 ? fmaxf(s[i], s[i + 1]) : fmaxf(c[0], fmaxf(s[i], s[i + 1]));
    c[1] = i % kChunk == 0 ? fmaxf(s[i + 2], s[i + 3]) : fmaxf(c[1], fmaxf(s[i + 2], s[i + 3]));
  }
}
template <int kChunks>
__device__ __forceinline__ float LaneMax(const float (&chunk_max)[kChunks][2], int r) {
  float largest = chunk_max[0][r];
#pragma unroll
  for (int i = 1; i < kChunks; ++i) largest = fmaxf(largest, chunk_max[i][r]);
  return largest;
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What a finished row needs: O = acc * inverse, and the log-sum-exp.
struct FinishedRow {
  float inverse;  // 0 for a fully masked row
  float max;      // M, log2 units
  float lse;      // natural log; -inf for a fully masked row
  float sum;      // l, in units of 2^anchor
  float divisor;  // l or lt; 1 for a fully masked row

  __device__ __forceinline__ void Divide(float by) {
    if (sum == 0.f) return;
    inverse = 1.f / by;
    divisor = by;
  }
};

// Of the maximum m and the anchor in log2 units and l; before Divide().
__device__ __forceinline__ FinishedRow FinishRow(float m, float anchor, float l) {
  if (l == 0.f) return {0.f, m, -INFINITY, 0.f, 1.f};
  constexpr float kLn2 = 0.693147180559945309f;
  return {1.f, m, (m + ((anchor - m) + log2f(l))) * kLn2, l, 1.f};
}

// kSumRounded: lt is summed here; otherwise the caller has it (a column of ones
// beside V) or does not need it.  kCounted: the rows count for the statistics.
// kTop: the two largest scores are kept, and the maximum comes from them.  kSink: rows may
// begin with a sink, which M leaves out.
template <class T, SoftmaxMode kMode, bool kSumRounded, bool kCounted, bool kSink = false>
struct SoftmaxRows {
  static constexpr bool kTop = kCounted || kMode == SoftmaxMode::kPaper;
  float max[2] = {-INFINITY, -INFINITY};  // M; not if kTop
  float anchor[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
  float rounded_sum[2] = {0, 0};
  TopTwo top[2];  // of this thread's scores, in units of s; if kTop
  // If kCounted.  sum 2^(x - a) (x - a): the entropy is log2 l - weighted / l bits.  And
  // P of key 0, of the lanes that have it, in units of 2^anchor.
  float weighted[2] = {0, 0}, first_key[2] = {0, 0};

  // As StandingRows has it.
  __device__ __forceinline__ float BeginWithSink(float sink, bool first) {
    static_assert(kSink && !kSumRounded);
    const float at = kDividesByRounded<kMode> ? ceilf(sink) : sink, weight = Exp2(sink - at);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      anchor[r] = at;
      sum[r] = first ? weight : 0.f;
      if constexpr (kCounted) weighted[r] = first ? weight * (sink - at) : 0.f;
    }
    return weight;
  }

  // Turns a tile of scores into probabilities and returns in `rescale` what the
  // accumulators of earlier tiles must be multiplied with (<= 1).  The pairs are
  // ready for Probabilities().  kMasked: a row may have no finite score yet.  zero:
  // PairRegisters().
  template <bool kMasked, int kScores>
  __device__ __forceinline__ void Tile(float (&s)[kScores], const ScoreParams& score, const PaperShift& paper,
                                       uint32_t zero, float (&rescale)[2]) {
    const float scale_log2 = score.scale_log2;
    constexpr int kChunks = kTop ? 1 : kScores / 16;  // independent ones, where registers suffice
    float chunk_max[kChunks][2], tile_max[2], m[2];
    MaxOfChunks(s, chunk_max);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile_max[r] = LaneMax(chunk_max, r);
      if constexpr (!kTop) m[r] = max[r] = fmaxf(max[r], QuadMax(tile_max[r]) * scale_log2);
    }
    if constexpr (kTop) {
      float least[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float largest = QuadMax(fmaxf(top[r].first, tile_max[r]));
        m[r] = largest * scale_log2;
        least[r] = LeastNear(largest, score.tie_window);
      }
      AddIfNear(s, tile_max, least, top);
    }
    float used[2];  // The anchor, or 0 where nothing is allowed yet.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = NextAnchor(r, m[r], scale_log2, paper);
      used[r] = kMasked && next == -INFINITY ? 0.f : next;
      rescale[r] = Exp2(anchor[r] - used[r]);
      if constexpr (kCounted) {
        weighted[r] = rescale[r] > 0.f ? rescale[r] * fmaf(sum[r], anchor[r] - used[r], weighted[r]) : 0.f;
      }
      anchor[r] = next;
      sum[r] *= rescale[r];
      if constexpr (kSumRounded) rounded_sum[r] *= rescale[r];
    }
    PairRegisters(used[0], used[1], zero);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      const float x = fmaf(s[i], scale_log2, -used[r]), y = fmaf(s[i + 1], scale_log2, -used[r]);
      s[i] = Exp2(x);
      s[i + 1] = Exp2(y);
      sum[r] += s[i];
      sum[r] += s[i + 1];
      if constexpr (kCounted) {  // 2^-200 is 0 here, and 0 times -inf were not.
        weighted[r] = fmaf(s[i], kMasked ? fmaxf(x, -200.f) : x, weighted[r]);
        weighted[r] = fmaf(s[i + 1], kMasked ? fmaxf(y, -200.f) : y, weighted[r]);
      }
      if constexpr (kSumRounded) {
        const float2 rounded = UnpackPair<T>(PackPair<T>(s[i], s[i + 1]));
        rounded_sum[r] += rounded.x;
        rounded_sum[r] += rounded.y;
      }
    }
  }

  // The packed probabilities of a tile, in the layout of the next product's A.
  template <int kScores>
  static __device__ __forceinline__ void Probabilities(const float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
    PackPairs<T>(s, p);
  }

  // After the tile of key 0, which comes last.
  template <int kScores>
  __device__ __forceinline__ void KeepFirstKey(const float (&p)[kScores]) {
    first_key[0] = p[0];
    first_key[1] = p[2];
  }

  // All four lanes of the quad call it and get the same.  Where the mode divides by lt
  // and it was not summed here, the caller divides.
  __device__ __forceinline__ FinishedRow Finish(int r, float scale_log2) const {
    const float largest = kTop ? QuadMax(top[r].first) * scale_log2 : max[r];
    FinishedRow done = FinishRow(kSink ? anchor[r] : largest, anchor[r], QuadSum(sum[r]));
    if constexpr (kSink) done.max = largest;
    if constexpr (kSumRounded) {
      done.Divide(QuadSum(rounded_sum[r]));
    } else if constexpr (!kDividesByRounded<kMode>) {
      done.Divide(done.sum);
    }
    return done;
  }

 private:
  __device__ __forceinline__ float NextAnchor(int r, float m, float scale_log2, const PaperShift& paper) {
    if constexpr (kMode == SoftmaxMode::kFa) return kSink ? fmaxf(anchor[r], m) : m;
    if constexpr (kDividesByRounded<kMode>) return kSink ? fmaxf(anchor[r], ceilf(m)) : ceilf(m);
    if constexpr (kMode == SoftmaxMode::kPaper) {
      const bool repeated = top[r].OfQuad().second * scale_log2 >= m - paper.eps;
      const float wanted = m > 0.f ? (paper.beta - 1.f) * m : -m;
      const float shift = repeated && m > -INFINITY ? fminf(fmaxf(wanted, paper.min), paper.max) : 0.f;
      return fmaxf(anchor[r], m + shift);
    }
  }
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_SOFTMAX_CUH_
