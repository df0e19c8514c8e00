// attention_bwd_pair_produce.cuh: what the loading thread of each CTA of the pair does.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_PRODUCE_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_PRODUCE_CUH_

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/attention_bwd_pair_layout.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/query_steps.cuh"
#include "cuda/sm90/tiles.cuh"

namespace bellwether::kernels::cuda::sm90 {

// K and V once, then Q, dO and what belongs to their rows step by step.  Of Q and dO each
// CTA loads half of the boxes, for both.
template <class S>
__device__ __forceinline__ void BwdPairProduce(const AttentionBwdParams& p, const BwdMaps& maps,
                                               const BwdPairShared<S>& sm, const BwdTile* tile) {
  constexpr uint16_t kBoth = 3;
  constexpr int kHalf = S::kBoxes / 2;
  const int rank = static_cast<int>(ClusterRank());
  {
    const BwdTile t = *tile;
    if (t.steps == 0) return;  // Nothing would wait for K and V.
    const Sequence& seq = t.sequence;
    const TileOrigin kv = OriginOf(p.seq, seq.index, seq.k_start, seq.k_len, t.kv_head);
    const int mine = t.key + rank * S::kKeys, theirs = t.key + (rank ^ 1) * S::kKeys;
    BarrierArriveExpect(sm.kv_full, 2 * S::kKvBytes + S::kTheirsBytes);
    LoadTile<S::kBoxes>(sm.k, &maps.k, sm.kv_full, S::kKeys, kv, mine);
    LoadTile<S::kBoxes>(sm.v, &maps.v, sm.kv_full, S::kKeys, kv, mine);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      TmaLoad5(sm.theirs + i * S::kKeys * 128, &maps.k, sm.kv_full, (rank * kHalf + i) * 64, kv.x + theirs, kv.y, kv.z,
               kv.head);
    }
  }
  const auto load_half = [&](uint32_t dst, const CUtensorMap* map, uint32_t full, const TileOrigin& at, int row) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int box = rank * kHalf + i;
      TmaLoad5Multicast(dst + box * S::kRows * 128, map, full, kBoth, box * 64, at.x + row, at.y, at.z, at.head);
    }
  };
  // Little is kept across the loop, and it is not unrolled: 24 registers are few.
  QueryStep query = FirstQueryStep(p, *tile);
#pragma unroll 1
  for (int step = 0; step < tile->steps; ++step, Advance(p, *tile, &query)) {
    const Sequence seq = tile->sequence;
    const TileOrigin q = OriginOf(p.seq, seq.index, seq.q_start, seq.q_len, tile->kv_head * p.seq.group + query.member);
    const int64_t row_base = RowBase(p, seq, q.head);
    const int row = query.tile * S::kRows;
    const uint32_t stage = step % S::kStages, parity = step / S::kStages & 1;
    const uint32_t q_full = sm.q_full + 8 * stage;
    const auto load_row = [&](uint32_t dst, const float* src, uint32_t full) {
      BulkLoad(dst, src + row_base + row, full, S::kRowBytes);
    };
    // Each signals the other that it has room, and expects all before either
    // half is on its way.
    BarrierWait(sm.q_empty + 8 * stage, parity ^ 1);
    BarrierArriveExpect(q_full, S::kQBytes + (S::kRounded ? 2 : 1) * S::kRowBytes);
    BarrierArriveThere(AddressOfRank(sm.q_ready + 8 * stage, rank ^ 1));
    load_row(sm.lse + stage * S::kRowBytes, p.lse_log2, q_full);
    if constexpr (S::kRounded) load_row(sm.inverse + stage * S::kRowBytes, p.inverse, q_full);
    BarrierWait(sm.q_ready + 8 * stage, parity);
    load_half(sm.q + stage * S::kQBytes, &maps.q, q_full, q, row);

    BarrierWait(sm.d_o_empty, (step & 1) ^ 1);
    BarrierArriveExpect(sm.d_o_full, S::kQBytes + S::kRowBytes);
    BarrierArriveThere(AddressOfRank(sm.d_o_ready, rank ^ 1));
    load_row(sm.delta, p.delta, sm.d_o_full);
    BarrierWait(sm.d_o_ready, step & 1);
    load_half(sm.d_o, &maps.d_o, sm.d_o_full, q, row);
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_PRODUCE_CUH_
