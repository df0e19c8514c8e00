// attention_bwd_produce.cuh: what the loading thread of a CTA of the backward does: K and V of
// its keys once, then Q, dO and what belongs to their rows step by step, in two rings.
//
// Shared says where they lie, as BwdShared does.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PRODUCE_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PRODUCE_CUH_

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"

namespace bellwether::kernels::cuda::sm90 {

template <class S, class Shared>
__device__ __forceinline__ void BwdProduce(const AttentionBwdParams& p, const BwdMaps& maps, const Shared& sm,
                                           const BwdTile& t) {
  const Sequence& seq = t.sequence;
  const TileOrigin kv = OriginOf(p.seq, seq.index, seq.k_start, seq.k_len, t.kv_head);
  BarrierArriveExpect(sm.kv_full, 2 * S::kKvBytes);
  LoadTile<S::kHalves>(sm.k, &maps.k, sm.kv_full, S::kCols, kv, t.key);
  LoadTile<S::kHalves>(sm.v, &maps.v, sm.kv_full, S::kCols, kv, t.key);
  RingPosition<S::kStages> at;
  // Little is kept across the loops, and they are not unrolled: 24 registers are few.
  TileOrigin q = OriginOf(p.seq, seq.index, seq.q_start, seq.q_len, t.kv_head * p.seq.group);
  int64_t row_base = RowBase(p, seq, q.head);
  const int end_head = q.head + p.seq.group;
#pragma unroll 1
  for (; q.head < end_head; ++q.head, row_base += p.rows_per_head) {
#pragma unroll 1
    for (int m = t.first_tile; m < t.end_tile; ++m) {
      const int row = m * S::kRows;
      const uint32_t q_full = sm.q_full + 8 * at.stage, d_o_full = sm.d_o_full + 8 * at.stage;
      const auto load_row = [&](uint32_t dst, const float* src, uint32_t full) {
        BulkLoad(dst + at.stage * S::kRowBytes, src + row_base + row, full, S::kRowBytes);
      };
      BarrierWait(sm.q_empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(q_full, S::kQBytes + (S::kRounded ? 2 : 1) * S::kRowBytes);
      LoadTile<S::kHalves>(sm.q + at.stage * S::kQBytes, &maps.q, q_full, S::kRows, q, row);
      load_row(sm.lse, p.lse_log2, q_full);
      if constexpr (S::kRounded) load_row(sm.inverse, p.inverse, q_full);
      BarrierWait(sm.d_o_empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(d_o_full, S::kQBytes + S::kRowBytes);
      LoadTile<S::kHalves>(sm.d_o + at.stage * S::kQBytes, &maps.d_o, d_o_full, S::kRows, q, row);
      load_row(sm.delta, p.delta, d_o_full);
      at.Advance();
    }
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PRODUCE_CUH_
