// attention_bwd_keys.cuh: S, P, dP and dS of a step of the backward, and what they add
// to dK and dV.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_KEYS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_KEYS_CUH_

#include "cuda/attention_bias.cuh"
#include "cuda/attention_bwd_errors.cuh"
#include "cuda/attention_bwd_scores.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm80/attention_bwd_layout.cuh"
#include "cuda/sm80/attention_params.h"
#include "cuda/sm80/products.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm80 {

// Writes a tile of dS^T, 16 keys and kCount * 2 queries, as [key][query].  `at` is
// this lane's place in the first chunk of its first key.
template <class S, int kCount>
__device__ __forceinline__ void StoreTransposed(const uint32_t (&ds)[kCount], uint32_t at, int chunk) {
  using Layout = TileLayout<S::kRows>;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int in_group = (chunk + i / 2) % Layout::kGroup;
    const uint32_t to = (at ^ (in_group * 16)) + (chunk + i / 2 - in_group) * 16;
    StoreShared(to, ds[i]);
    StoreShared(to + 8 * Layout::kPitch, ds[i + 1]);
  }
}

// D += A B of kChunk queries from `row` on, A from registers.
template <class S>
__device__ __forceinline__ void AddStep(float (&d)[S::kTiles][S::kOwned / 2],
                                        const uint32_t (&a)[S::kTiles][S::kChunk / 4], const RowsReader<S::kHeadDim>& b,
                                        int row) {
#pragma unroll
  for (int step = 0; step < S::kChunk / 16; ++step) {
    uint32_t left[S::kTiles][4];
    StepOf(a, step, left);
    OuterStep<typename S::T, S::kOwned>(d, left, b, row + 16 * step);
  }
}

// The same of all queries of the step, and of this warp's channels; A, [key][query],
// from shared memory, as the warps that share these keys have written it.
template <class S>
__device__ __forceinline__ void AddShared(float (&d)[S::kTiles][S::kOwned / 2], uint32_t a_tile, uint32_t b_tile) {
  const int thread = ThreadIndexAgain(), lane = thread % 32, warp = thread / 32;
  const RowsReader<S::kRows> a(a_tile + warp / S::kShare * (16 * S::kTiles * S::kRows * 2), lane);
  const RowsReader<S::kHeadDim> b(b_tile, lane);
#pragma unroll
  for (int step = 0; step < S::kRows / 16; ++step) {
    uint32_t left[S::kTiles][4];
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) a.template Load<false>(left[m], 16 * m, 2 * step);
    OuterStep<typename S::T, S::kOwned>(d, left, b, 16 * step, warp % S::kShare * (S::kOwned / 8));
  }
}

// Until the warps with the same keys are here.
template <class S>
__device__ __forceinline__ void SyncSharers() {
  const int group = ThreadIndexAgain() / (32 * S::kShare);
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * S::kShare) : "memory");
}

// Adds kChunk queries of a step, from `row` of its tile on, to dK and dV, and leaves
// dS^T in shared memory.  kCounted: these rows count for the statistics.
template <class S, bool kCounted>
__device__ __forceinline__ void AddKeysOf(const BwdParams& p, const BwdShared<S>& sm, const BwdStep& step, int row,
                                          int split, float (&dk)[S::kTiles][S::kOwned / 2],
                                          float (&dv)[S::kTiles][S::kOwned / 2]) {
  using T = typename S::T;
  constexpr int kScores = S::kChunk / 2, kElements = S::kHeadDim;
  using Rows = RowsReader<kElements>;
  using Columns = ColumnsReader<kElements>;
  const int thread = ThreadIndexAgain(), lane = thread % 32;
  const int key = thread / 32 / S::kShare * (16 * S::kTiles);  // this warp's first, in its tile
  const int own = key + lane / 4;
  const uint32_t own_at = TileLayout<S::kRows>::Offset(own, 0) + lane % 4 * 4;
  float s[S::kTiles][kScores], dp[S::kTiles][kScores];
  InnerProduct<T, kElements>(s, Rows(sm.k + key * kElements * 2, lane), Columns(sm.q, lane), row);
  const uint32_t of_query = (row + lane % 4 * 2) * 4;
  const uint32_t lse = sm.lse + of_query, delta = sm.delta + of_query, inverse = sm.inverse + of_query;
  const int tile_row = step.tile * S::kRows;
  const typename S::Tile t = sm.tile.Load();
  const bool masked = NeedsMask<true>(p.seq, t.sequence, t.key + key, 16 * S::kTiles, tile_row + row, S::kChunk);
  uint32_t a[S::kTiles][S::kChunk / 4];
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    if (p.score.cap_scale != 0.f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[m][i] = Tanh(s[m][i] * p.score.cap_scale);
    }
    if constexpr (S::kMasked) {
      if (p.mask.tensor.data != nullptr) {
        AddBiasTransposed(s[m], p.mask, MaskRowAt(p.mask.tensor, t.sequence.index, step.head, 0), t.sequence,
                          t.key + key + 16 * m + lane / 4, tile_row + row + lane % 4 * 2);
      }
    }
    if (masked) {
      MaskTransposed<true>(s[m], p.seq, t.sequence, t.key + key + 16 * m + lane / 4, tile_row + row + lane % 4 * 2);
    }
    ToProbabilities<T, S::kRounded>(s[m], s[m], p.score.scale_log2, lse, inverse);
#pragma unroll
    for (int i = 0; i < S::kChunk / 4; ++i) a[m][i] = PackPair<T>(s[m][2 * i], s[m][2 * i + 1]);
    if constexpr (S::kShare > 1)
      StoreTransposed<S>(a[m], sm.p + own_at + 16 * m * TileLayout<S::kRows>::kPitch, row / 8);
  }
  if constexpr (S::kShare == 1) {
    AddStep<S>(dv, a, Rows(sm.d_o + split * S::kOutputs * 2, lane), row);
  }
  InnerProduct<T, kElements, S::kUnroll>(dp, Rows(sm.v + key * kElements * 2, lane), Columns(sm.d_o, lane), row);
  if constexpr (kCounted) {
    if (split == 0) {
      AddErrors<4, kScores>(p.errors + RowBase(p, t.sequence, step.head) + tile_row + row, delta, lane,
                            [&](int i, float d) {
                              float sum = 0.f;
#pragma unroll
                              for (int m = 0; m < S::kTiles; ++m) sum += s[m][i] * (dp[m][i] - d);
                              return sum;
                            });
    }
  }
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    if (p.score.cap_scale != 0.f) {
      const auto apply = [&](const auto& bias) {
        ApplyCapDerivative<S::kRounded>(dp[m], s[m], p.score.scale_log2, lse, delta, inverse, bias);
      };
      if constexpr (S::kMasked) {
        apply(TransposedBias(p.mask, MaskRowAt(p.mask.tensor, t.sequence.index, step.head, 0), t.sequence,
                             t.key + key + 16 * m + lane / 4, tile_row + row + lane % 4 * 2));
      } else {
        apply(NoBias{});
      }
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 d = LoadShared2(delta + i * 8);
      a[m][i / 2] = PackPair<T>(s[m][i] * (dp[m][i] - d.x), s[m][i + 1] * (dp[m][i + 1] - d.y));
      a[m][i / 2 + 1] = PackPair<T>(s[m][i + 2] * (dp[m][i + 2] - d.x), s[m][i + 3] * (dp[m][i + 3] - d.y));
    }
    StoreTransposed<S>(a[m], sm.ds + own_at + 16 * m * TileLayout<S::kRows>::kPitch, row / 8);
  }
  if constexpr (S::kShare == 1) {
    AddStep<S>(dk, a, Rows(sm.q + split * S::kOutputs * 2, ThreadIndexAgain() % 32), row);
  } else {
    SyncSharers<S>();
    AddShared<S>(dv, sm.p, sm.d_o);
    AddShared<S>(dk, sm.ds, sm.q);
  }
}

template <class S>
__device__ __forceinline__ void AddKeys(const BwdParams& p, const BwdShared<S>& sm, const BwdStep& step, int row,
                                        int split, float (&dk)[S::kTiles][S::kOwned / 2],
                                        float (&dv)[S::kTiles][S::kOwned / 2]) {
  if constexpr (S::kRowSums) {
    if (p.stats.Count(sm.tile.Load().sequence.index, step.tile * S::kRows)) {
      return AddKeysOf<S, true>(p, sm, step, row, split, dk, dv);
    }
  }
  AddKeysOf<S, false>(p, sm, step, row, split, dk, dv);
}

// Rounds `sums` times `factor` to a tensor of keys with `channels` channels.
template <class S>
__device__ __forceinline__ void StoreKeys(const typename S::Tile& t, const float (&sums)[S::kTiles][S::kOwned / 2],
                                          float factor, void* base, const Strides& stride, int channels, int split) {
  const int thread = ThreadIndexAgain(), lane = thread % 32;
  const Sequence& seq = t.sequence;
  const int channel = split * S::kOutputs + thread / 32 % S::kShare * S::kOwned;
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    const int key = t.key + (thread / 32 / S::kShare * S::kTiles + m) * 16 + lane / 4;
    const auto place = [&](int at) -> uint16_t* {
      if (at >= seq.k_len) return nullptr;
      return static_cast<uint16_t*>(base) + seq.index * stride.batch + t.kv_head * stride.head +
             (seq.k_start + at) * stride.token + channel;
    };
    constexpr int kStored = kStoredColumns<S::kOwned>;
    uint32_t words[kStored / 4] = {};
#pragma unroll
    for (int i = 0; i < S::kOwned / 4; ++i) {
      words[i] = PackPair<typename S::T>(sums[m][2 * i] * factor, sums[m][2 * i + 1] * factor);
    }
    StoreRows<kStored>(words, place(key), place(key + 8), min(channels - channel, S::kOwned), lane);
  }
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_KEYS_CUH_
