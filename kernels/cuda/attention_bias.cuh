// attention_bias.cuh: adds a mask's tensor to scores, in accumulators, from where it lies.
//
// What a thread reads, eight rows of four pairs of keys a warp, comes from L1 for all but
// the first of the keys of a sector.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BIAS_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BIAS_CUH_

#include <cstring>
#include <type_traits>

#include "cuda/attention_params.h"
#include "cuda/probe_mask.cuh"
#include "cuda/sequences.cuh"

namespace bellwether::kernels::cuda {

// Values of a mask of one type.
template <class Element>
struct MaskValue {
  static constexpr bool kBool = std::is_same_v<Element, uint8_t>;
  using Pair =
      std::conditional_t<sizeof(Element) == 1, uint16_t, std::conditional_t<sizeof(Element) == 2, uint32_t, uint64_t>>;

  // -inf hides; a bool shows with 0.
  static __device__ __forceinline__ float Of(Element value) {
    if constexpr (kBool) {
      return value != 0 ? 0.f : -INFINITY;
    } else if constexpr (std::is_same_v<Element, float>) {
      return value <= kHiddenFrom ? -INFINITY : value;
    } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      const float wide = __bfloat162float(value);
      return wide <= kHiddenFromBf16 ? -INFINITY : wide;
    } else {
      const float wide = __half2float(value);
      return wide <= kHiddenFrom ? -INFINITY : wide;
    }
  }
  // A hidden score is -inf, whatever it was.
  static __device__ __forceinline__ void AddTo(float& s, float bias, float inverse_scale) {
    s = bias == -INFINITY ? -INFINITY : kBool ? s : fmaf(bias, inverse_scale, s);
  }
};

// Calls f with a pointer of the mask's type, which is null.
template <class F>
__device__ __forceinline__ void WithMaskType(MaskDType dtype, const F& f) {
  if (dtype == MaskDType::kBool) {
    f(static_cast<const uint8_t*>(nullptr));
  } else if (dtype == MaskDType::kBFloat16) {
    f(static_cast<const __nv_bfloat16*>(nullptr));
  } else if (dtype == MaskDType::kFloat16) {
    f(static_cast<const __half*>(nullptr));
  } else {
    f(static_cast<const float*>(nullptr));
  }
}

// Of scores with queries as rows.  `at` is the mask's element of the sequence, head and key 0
// of row 0; `row` and `key` are this thread's first.  kPairs: at once where p.paired, for more registers.
template <bool kPairs, int kCount>
__device__ __forceinline__ void AddBias(float (&s)[kCount], const MaskParams& p, int64_t at, const Sequence& seq,
                                        int row, int key) {
  const ProbeMask& mask = p.tensor;
  const int left = seq.k_len - key;
  at += key * mask.key_stride;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t of_row = at + min(row + 8 * r, seq.q_len - 1) * mask.row_stride;
    if (kPairs && p.paired) {
      WithMaskType(mask.dtype, [&](auto* none) {
        using Element = std::remove_const_t<std::remove_pointer_t<decltype(none)>>;
        using Value = MaskValue<Element>;
        using Pair = typename Value::Pair;
        const Pair* const from = reinterpret_cast<const Pair*>(static_cast<const Element*>(mask.data) + of_row);
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4) {
          const int column = i / 4 * 8;
          const Pair pair = column < left ? __ldg(from + column / 2) : Pair{0};
          Element values[2];
          memcpy(values, &pair, sizeof(pair));
          Value::AddTo(s[i], Value::Of(values[0]), p.inverse_scale);
          Value::AddTo(s[i + 1], Value::Of(values[1]), p.inverse_scale);
        }
      });
    } else {
      int64_t of_key = of_row;
#pragma unroll
      for (int i = 2 * r; i < kCount; i += 4) {
        const int column = i / 4 * 8;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float bias = column + j < left ? BiasAt(mask, of_key + j * mask.key_stride) : 0.f;
          MaskValue<float>::AddTo(s[i + j], bias, p.inverse_scale);
        }
        of_key += 8 * mask.key_stride;
      }
    }
  }
}

// Asks for cache line `line` of what row `row` has of the keys from `key` on, if it has `keys` of them.
__device__ __forceinline__ void PrefetchBias(const MaskParams& p, int64_t at, const Sequence& seq, int row, int key,
                                             int keys, int line = 0) {
  constexpr int kLineBytes = 128;
  const ProbeMask& mask = p.tensor;
  const int size = mask.dtype == MaskDType::kBool ? 1 : mask.dtype == MaskDType::kFloat32 ? 4 : 2;
  const int skipped = line * kLineBytes / size;
  if (!p.paired || row >= seq.q_len || skipped >= keys || key + skipped >= seq.k_len) return;
  const auto* const from = static_cast<const char*>(mask.data) + (at + row * mask.row_stride + key + skipped) * size;
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}

// How many keys a row sees.  All four lanes of its quad call it and get the same.
__device__ __forceinline__ int CountKeys(const SequenceParams& p, const ProbeMask& mask, const MaskedSequence& seq,
                                         int head, int row, int lane) {
  const int first = FirstKey(p, seq, row), last = LastKey(p, seq, row);
  if (mask.data == nullptr) return last - first + 1;
  const int64_t at = MaskRowAt(mask, seq.index, head, min(row, seq.q_len - 1));
  int count = 0;
#pragma unroll 1
  for (int key = first + lane % 4; key <= last; key += 4) {
    count += BiasAt(mask, at + key * mask.key_stride) != -INFINITY;
  }
  count += __shfl_xor_sync(0xffffffffu, count, 1);
  return count + __shfl_xor_sync(0xffffffffu, count, 2);
}

// AddBias() of S^T, keys as rows.
template <int kCount>
__device__ __forceinline__ void AddBiasTransposed(float (&s)[kCount], const MaskParams& p, int64_t at,
                                                  const Sequence& seq, int key, int row) {
  const ProbeMask& mask = p.tensor;
  const int left = seq.q_len - row;
  at += row * mask.row_stride;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (key + 8 * r >= seq.k_len) continue;
    const int64_t of_key = at + (key + 8 * r) * mask.key_stride;
    WithMaskType(mask.dtype, [&](auto* none) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(none)>>;
      using Value = MaskValue<Element>;
      const Element* from = static_cast<const Element*>(mask.data) + of_key;
#pragma unroll
      for (int i = 2 * r; i < kCount; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (i / 4 * 8 + j < left)
            Value::AddTo(s[i + j], Value::Of(__ldg(from + j * mask.row_stride)), p.inverse_scale);
        }
        from += 8 * mask.row_stride;
      }
    });
  }
}

// What AddBiasTransposed() added to element i, in log2 units, for ApplyCapDerivative().
struct TransposedBias {
  static constexpr bool kNone = false;

  __device__ __forceinline__ TransposedBias(const MaskParams& p, int64_t at, const Sequence& seq, int key, int row)
      : mask(p.tensor),
        at(at + row * p.tensor.row_stride + key * p.tensor.key_stride),
        rows(seq.q_len - row),
        keys(seq.k_len - key) {}

  // Of a hidden key any value will do: its P is 0.
  __device__ __forceinline__ float operator()(int i) const {
    const int row = i / 4 * 8 + i % 2, key = i / 2 % 2 * 8;
    if (mask.data == nullptr || mask.dtype == MaskDType::kBool || row >= rows || key >= keys) return 0.f;
    const float bias = BiasAt(mask, at + row * mask.row_stride + key * mask.key_stride);
    return bias == -INFINITY ? 0.f : bias * kLog2E;
  }

  const ProbeMask& mask;
  int64_t at;
  int rows, keys;
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BIAS_CUH_
