// attention_fwd_produce.cuh: the producer of the Hopper forward: one lane that takes
// tiles and has their Q, K and V copied.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PRODUCE_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PRODUCE_CUH_

#include <type_traits>

#include "cuda/sm90/attention_fwd_layout.cuh"

namespace bellwether::kernels::cuda::sm90 {

// The boxes [kFirst, kFirst + kCount) of a tile, `stride` bytes apart.  L2
// keeps keys, which other tiles read, too; queries are read by this tile alone.
template <class S, int kFirst, int kCount>
__device__ __forceinline__ void LoadBoxes(uint32_t dst, int stride, const CUtensorMap* map, uint32_t bar,
                                          const TileOrigin& at, int token, uint64_t policy = kEvictLast) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    TmaLoad5(dst + i * stride, map, bar, (kFirst + i) * 64, at.x + token, at.y, at.z, at.head, policy);
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
    typename S::Tile t;
    t.row = kNoTile;
    if (tile < p.tiles && !LocateTile<S>(p, tile, &t)) {
      tile = next;
      continue;
    }
    BarrierWait(sm.q_empty, q_parity ^ 1);
    StoreTile(sm.tiles + q_parity * sizeof(typename S::Tile), t);
    q_parity ^= 1;
    if (t.row == kNoTile) {
      BarrierArrive(sm.q_full);
      return;
    }
    const Sequence& seq = t.sequence;
    const TileOrigin q = OriginOf(p.seq, seq.index, seq.q_start, seq.q_len, t.head);
    const TileOrigin kv = OriginOf(p.seq, seq.index, seq.k_start, seq.k_len, t.head / p.seq.group);
    BarrierArriveExpect(sm.q_full, S::kQBytes);
    LoadBoxes<S, 0, S::kBoxes>(sm.q, S::kRows * 128, &maps.q, sm.q_full, q, t.row, kEvictFirst);
    const auto await = [&](uint32_t full, uint32_t empty, const RingPosition<S::kStages>& at) {
      BarrierWait(empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(full + 8 * at.stage, S::kKvBytes);
      return full + 8 * at.stage;
    };
    const auto load_k = [&](int n) {
      const uint32_t bar = await(sm.k_full, sm.k_empty, k_at);
      LoadBoxes<S, 0, S::kBoxes>(sm.k + k_at.stage * S::kKStride, S::kKvBoxBytes, &maps.k, bar, kv, n * S::kCols);
      k_at.Advance();
    };
    const auto load_v = [&](int n) {
      const uint32_t bar = await(sm.v_full, sm.v_empty, v_at);
      const auto load = [&](auto first) {
        constexpr int kFirst = decltype(first)::value, kCount = S::kBoxes / S::kValueParts;
        constexpr int kPlace[] = {S::VPlace(0, kFirst), S::VPlace(1, kFirst)};
        constexpr int kStride[] = {S::VBoxStride(0, kFirst), S::VBoxStride(1, kFirst)};
        LoadBoxes<S, kFirst, kCount>(
            sm.k + kPlace[0] * S::kKvBoxBytes + v_at.stage * ((kPlace[1] - kPlace[0]) * S::kKvBoxBytes),
            (v_at.stage == 0 ? kStride[0] : kStride[1]) * S::kKvBoxBytes, &maps.v, bar, kv, n * S::kCols);
      };
      load(std::integral_constant<int, 0>{});
      if constexpr (S::kValueParts == 2) load(std::integral_constant<int, 2>{});
      v_at.Advance();
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
