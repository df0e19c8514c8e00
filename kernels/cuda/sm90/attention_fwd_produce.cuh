// attention_fwd_produce.cuh: the producer of the Hopper forward: one lane that takes
// tiles and has their Q, K and V copied.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PRODUCE_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PRODUCE_CUH_

#include "cuda/sm90/attention_fwd_layout.cuh"

namespace bellwether::kernels::cuda::sm90 {

// A tile of keys, its boxes `stride` bytes apart.
template <class S>
__device__ __forceinline__ void LoadKeys(uint32_t dst, int stride, const CUtensorMap* map, uint32_t bar,
                                         const TileOrigin& at, int token) {
#pragma unroll
  for (int i = 0; i < S::kBoxes; ++i) {
    TmaLoad5(dst + i * stride, map, bar, i * 64, at.x + token, at.y, at.z, at.head);
  }
}

template <class S>
__device__ __forceinline__ void Produce(const FwdParams& p, const FwdMaps& maps, const FwdShared<S>& sm) {
  RingPosition<S::kStages> k_at, v_at;
  uint32_t q_parity = 0;
  int tile = blockIdx.x;
  while (true) {
    // Asked for now, needed after this tile's loads: the latency is hidden.
    int next = tile + static_cast<int>(gridDim.x);
    if (p.counter != nullptr && tile < p.tiles) next = gridDim.x + atomicAdd(p.counter, 1);
    FwdTile t;
    t.row = kNoTile;
    if (tile < p.tiles && !LocateTile<S>(p, tile, &t)) {
      tile = next;
      continue;
    }
    BarrierWait(sm.q_empty, q_parity ^ 1);
    StoreTile(sm.tiles + q_parity * sizeof(FwdTile), t);
    q_parity ^= 1;
    if (t.row == kNoTile) {
      BarrierArrive(sm.q_full);
      return;
    }
    const Sequence& seq = t.sequence;
    const TileOrigin q = OriginOf(p.seq, seq.index, seq.q_start, seq.q_len, t.head);
    const TileOrigin kv = OriginOf(p.seq, seq.index, seq.k_start, seq.k_len, t.head / p.seq.group);
    BarrierArriveExpect(sm.q_full, S::kQBytes);
    LoadTile<S::kBoxes>(sm.q, &maps.q, sm.q_full, S::kRows, q, t.row);
    const auto load = [&](uint32_t to, int box_stride, const CUtensorMap* map, uint32_t full, uint32_t empty,
                          RingPosition<S::kStages>& at, int n) {
      BarrierWait(empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(full + 8 * at.stage, S::kKvBytes);
      LoadKeys<S>(to, box_stride, map, full + 8 * at.stage, kv, n * S::kCols);
      at.Advance();
    };
    const auto load_k = [&](int n) {
      load(sm.k + k_at.stage * S::kKStride, S::kKvBoxBytes, &maps.k, sm.k_full, sm.k_empty, k_at, n);
    };
    const auto load_v = [&](int n) {
      load(sm.v + v_at.stage * (S::kV1 - S::kV0), v_at.stage == 0 ? S::kVBoxStride0 : S::kVBoxStride1, &maps.v,
           sm.v_full, sm.v_empty, v_at, n);
    };
    if (t.end > t.begin) load_k(t.end - 1);
    for (int n = t.end - 1; n >= t.begin; --n) {
      if (n > t.begin) load_k(n - 1);
      load_v(n);
    }
    tile = next;
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PRODUCE_CUH_
