// attention_bwd_copies.cuh: the tiles that the backward copies to shared memory.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_COPIES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_COPIES_CUH_

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm80/attention_bwd_layout.cuh"
#include "cuda/sm80/attention_params.h"
#include "cuda/sm80/shared_tile.cuh"

namespace bellwether::kernels::cuda::sm80 {

// K or V of this CTA.
template <class S>
__device__ __forceinline__ void CopyKeys(uint32_t to, const BwdParams& p, const BwdTile& t, const void* from,
                                         const Strides& stride) {
  const Sequence& seq = t.sequence;
  TileCopier<S::kHeadDim, S::kCols, S::kThreads>::Copy(to, TokensOf(from, stride, seq.index, t.kv_head, seq.k_start),
                                                       stride.token, p.seq.head_dim, t.key, seq.k_len);
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
      sm.d_o, TokensOf(p.d_o, p.d_o_stride, seq.index, step.head, seq.q_start), p.d_o_stride.token, p.seq.head_dim,
      step.tile * S::kRows, seq.q_len);
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_COPIES_CUH_
