// attention_masks.cuh: sets the scores that masks forbid to -inf, in accumulators.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_MASKS_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_MASKS_CUH_

#include "cuda/sequences.cuh"

namespace bellwether::kernels::cuda {

// Sets scores of keys beyond each row's last allowed key to -inf; `last` counts
// from this thread's first column.
template <int kCount>
__device__ __forceinline__ void MaskAfter(float (&s)[kCount], int last0, int last1) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = i / 4 * 8 + i % 2;
    if (column > (i % 4 < 2 ? last0 : last1)) s[i] = -INFINITY;
  }
}

// The same of keys before each row's first.
template <int kCount>
__device__ __forceinline__ void MaskBefore(float (&s)[kCount], int first0, int first1) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = i / 4 * 8 + i % 2;
    if (column < (i % 4 < 2 ? first0 : first1)) s[i] = -INFINITY;
  }
}

// Of S^T, keys as rows.  Whether some of `keys` keys are forbidden to some of `rows`
// queries.  kWindow: there may be one.
template <bool kWindow, class Seq>
__device__ __forceinline__ bool NeedsMask(const SequenceParams& p, const Seq& seq, int key, int keys, int row,
                                          int rows) {
  const int shift = seq.k_len - seq.q_len;
  return (p.causal && key + keys - 1 > row + shift) || key + keys > KeyEnd(seq) || key < FirstKeyFrom(seq, key) ||
         (kWindow && p.window > 0 && key <= row + rows - 1 + shift - p.window);
}

// `key` is this thread's first, the other is 8 behind; `row` its first query.
template <bool kWindow, int kCount, class Seq>
__device__ __forceinline__ void MaskTransposed(float (&s)[kCount], const SequenceParams& p, const Seq& seq, int key,
                                               int row) {
  constexpr int kRows = 2 * kCount;
  const int shift = seq.k_len - seq.q_len;
  int from[2];  // first allowed query of each of the two keys, counted from `row`
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    from[r] = p.causal ? key + 8 * r - shift - row : -kRows;
    if (key + 8 * r >= KeyEnd(seq) || key + 8 * r < FirstKeyFrom(seq, key + 8 * r)) from[r] = kRows;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i / 4 * 8 + i % 2 < from[i / 2 % 2]) s[i] = -INFINITY;
  }
  if (kWindow && p.window > 0) {
    const int end = key - shift + p.window - row;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i / 4 * 8 + i % 2 >= end + i / 2 % 2 * 8) s[i] = -INFINITY;
    }
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_MASKS_CUH_
