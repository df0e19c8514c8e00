// attention_bwd_copies.cuh: the tiles that the backward copies to shared memory.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_COPIES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_COPIES_CUH_

#include "cuda/attention_bias.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm80/attention_bwd_layout.cuh"
#include "cuda/sm80/attention_params.h"
#include "cuda/sm80/shared_tile.cuh"

namespace bellwether::kernels::cuda::sm80 {

// K or V of this CTA, `channels` of each.
template <class S>
__device__ __forceinline__ void CopyKeys(uint32_t to, const typename S::Tile& t, const void* from,
                                         const Strides& stride, int channels) {
  const typename S::Seq& seq = t.sequence;
  TileCopier<S::kHeadDim, S::kCols, S::kThreads>::template Copy<S::kMasked>(
      to, TokensOf(from, stride, seq.index, t.kv_head, seq.k_start), stride.token, channels, t.key, KeyEnd(seq),
      KeyBegin(seq));
}

template <class S>
__device__ __forceinline__ void CopyQueries(const BwdParams& p, const BwdShared<S>& sm, const Sequence& seq,
                                            const BwdStep& step) {
  const int thread = ThreadIndexAgain(), row = step.tile * S::kRows;
  TileCopier<S::kHeadDim, S::kRows, S::kThreads>::Copy(sm.q,
                                                       TokensOf(p.q, p.q_stride, seq.index, step.head, seq.q_start),
                                                       p.q_stride.token, p.seq.head_dim, row, seq.q_len);
  constexpr int kVectors = S::kRowBytes / 16;
  if (thread < 3 * kVectors) {
    const int array = thread / kVectors, at = thread % kVectors * 4;
    const float* const from = array == 0 ? p.lse_log2 : array == 1 ? p.delta : p.inverse;
    CopyAsync(sm.lse + array * S::kRowBytes + at * 4, from + RowBase(p, seq, step.head) + row + at,
              S::kRounded || array < 2);
  }
}

template <class S>
__device__ __forceinline__ void CopyGradients(const BwdParams& p, const BwdShared<S>& sm, const Sequence& seq,
                                              const BwdStep& step) {
  TileCopier<S::kHeadDim, S::kRows, S::kThreads>::Copy(
      sm.d_o, TokensOf(p.d_o, p.d_o_stride, seq.index, step.head, seq.q_start), p.d_o_stride.token, p.seq.v_dim,
      step.tile * S::kRows, seq.q_len);
}

// What a mask has of a step's queries and this CTA's keys.
template <class S>
__device__ __forceinline__ void PrefetchMask(const BwdParams& p, const typename S::Tile& t, const BwdStep& step) {
  if constexpr (S::kMasked) {
    if (p.mask.tensor.data == nullptr) return;
    const int thread = ThreadIndexAgain();
    PrefetchBias(p.mask, MaskRowAt(p.mask.tensor, t.sequence.index, step.head, 0), t.sequence,
                 step.tile * S::kRows + thread % S::kRows, t.key, S::kCols, thread / S::kRows);
  }
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_COPIES_CUH_
