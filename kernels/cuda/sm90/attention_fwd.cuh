// Stabilized attention, forward, Hopper; see bellwether/kernels/attention.h and
// cuda/softmax.cuh for what it computes.
//
// Work      persistent: one CTA per multiprocessor takes tiles of kRows query
//           rows, longest first, from a counter (or round robin without one).
//           Warpgroup 0 is the producer, one lane of it issues bulk tensor
//           copies; each of the kWarpgroups others owns 64 rows.  A consumer
//           issues S = Q K^T of the next tile together with O += P V of this
//           one and computes the next softmax under them.  The warpgroups take
//           turns at the tensor cores (named barriers), so that one's softmax
//           runs under the other's products.
// Memory    Q, O once; K, V once per tile of query rows, mostly from L2: tiles
//           are ordered in sections of heads whose K and V fit it together.  O goes
//           out through shared memory, under the next tile's products.
// Numerics  S, O, l, lt in fp32; P rounded to the input type; O rounded once.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "bellwether/kernels/status.h"
#include "cuda/attention_fwd_outputs.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_fwd_boxes.cuh"
#include "cuda/sm90/attention_fwd_layout.cuh"
#include "cuda/sm90/attention_fwd_produce.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"
#include "cuda/standing_rows.cuh"

namespace bellwether::kernels::cuda::sm90 {

template <class S>
__device__ __forceinline__ void IssueScores(float (&s)[S::kCols / 2], uint64_t q, uint64_t k) {
  // Else all 16 addresses of Q stay in registers from tile to tile.
  if constexpr (S::kHeadDim > 128) asm volatile("" : "+l"(q));
#pragma unroll
  for (int i = 0; i < S::kScoreChannels / 16; ++i) {
    Wgmma<typename S::T, S::kCols, false, false>::Ss(s, q + (i / 4) * (S::kRows * 8) + (i % 4) * 2,
                                                     k + (i / 4) * (S::kCols * 8) + (i % 4) * 2, i > 0);
  }
}

// From the last keys to the first, like the tiles: the tensor cores cut off what
// is small beside the sum so far, and the first token often has most of the weight.
// v: of each kValueColumns columns.
template <class S>
__device__ __forceinline__ void IssueValues(float (&o)[S::kOutputs / 2], const uint32_t (&p)[S::kCols / 4],
                                            const uint64_t (&v)[S::kValueParts]) {
#pragma unroll
  for (int i = S::kCols / 16 - 1; i >= 0; --i) {
    const uint32_t a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
    constexpr int kFirst = S::kValueParts == 1 ? 0 : S::kValueColumns, kLast = S::kOutputs - kFirst;
    if constexpr (kFirst > 0) {
      auto& first = reinterpret_cast<float(&)[kFirst / 2]>(o[0]);
      Wgmma<typename S::T, kFirst, false, true>::Rs(first, a[0], a[1], a[2], a[3], v[0] + i * 128, 1);
    }
    auto& last = reinterpret_cast<float(&)[kLast / 2]>(o[kFirst / 2]);
    Wgmma<typename S::T, kLast, false, true>::Rs(last, a[0], a[1], a[2], a[3], v[S::kValueParts - 1] + i * 128, 1);
  }
}

// This thread's first row of the tile.
__device__ __forceinline__ int RowInTile() {
  const int thread = ThreadIndexAgain() - 128;
  return thread / 32 * 16 + thread % 32 / 4;
}

// Caps and masks; `key` is the tile's first.
template <class S, bool kMasked>
__device__ __forceinline__ void PrepareScores(float (&s)[S::kCols / 2], const FwdParams& p, const TileInShared<S>& tile,
                                              int key) {
  if constexpr (S::kGeneral) {
    if (p.score.cap_scale != 0.f) {
#pragma unroll
      for (int i = 0; i < S::kCols / 2; ++i) s[i] = Tanh(s[i] * p.score.cap_scale);
    }
  }
  if constexpr (kMasked) {
    const typename S::Seq seq = tile.sequence(p.seq);
    const int row = tile.row() + RowInTile(), column = key + ThreadIndexAgain() % 4 * 2;
    MaskAfter(s, LastKey(p.seq, seq, row) - column, LastKey(p.seq, seq, row + 8) - column);
    if (S::kGeneral && (p.seq.window > 0 || KeyBegin(seq) > 0)) {
      MaskBefore(s, FirstKey(p.seq, seq, row) - column, FirstKey(p.seq, seq, row + 8) - column);
    }
  }
}

// What a consumer thread keeps from tile to tile.
template <class S>
struct Consumer {
  int warpgroup, lane;
  uint64_t q_tile, k_tiles, v_tiles;
  RingPosition<S::kStages> k_at = {}, v_at = {};

  __device__ Consumer(const FwdShared<S>& sm, int of)
      : warpgroup(of),
        lane(threadIdx.x % 32),
        q_tile(TileDescriptor(sm.q + of * 64 * 128, 0, 1024)),
        k_tiles(TileDescriptor(sm.k, 0, 1024)),
        v_tiles(TileDescriptor(sm.k + S::VPlace(0, 0) * S::kKvBoxBytes, S::VBoxStride(0, 0) * S::kKvBoxBytes, 1024)) {}

  __device__ __forceinline__ uint64_t k_tile() const { return k_tiles + k_at.stage * (S::kKStride / 16); }
  // Stages and parts differ in addresses and in distances of boxes.
  __device__ __forceinline__ void IssueValues(float (&o)[S::kOutputs / 2], const uint32_t (&p)[S::kCols / 4]) const {
    uint64_t v[S::kValueParts];
#pragma unroll
    for (int i = 0; i < S::kValueParts; ++i) {
      v[i] = v_tiles + (S::VPart(0, i) - S::VPart(0, 0)) + v_at.stage * (S::VPart(1, i) - S::VPart(0, i));
    }
    sm90::IssueValues<S>(o, p, v);
  }

  // Clears V of padding among the keys of tile n, which come next, whatever it holds: P of it is 0,
  // but 0 times NaN is not.  All warpgroups write the same.
  __device__ __forceinline__ void ClearPadding(const FwdShared<S>& sm, const typename S::Seq& seq, int n) const {
    const int begin = seq.key_begin - n * S::kCols, end = min(seq.key_end - n * S::kCols, S::kCols);
    if (begin <= 0 && end == min(seq.k_len - n * S::kCols, S::kCols)) return;
    BarrierWait(sm.v_full + 8 * v_at.stage, v_at.parity);
    const int thread = ThreadIndexAgain() % 128;
    for (int at = thread / 8; at < S::kCols; at += 16) {
      if (at >= begin && at < end) continue;
#pragma unroll
      for (int box = 0; box < S::kBoxes; ++box) {
        const int place = v_at.stage == 0 ? S::VPlace(0, box) : S::VPlace(1, box);
        StoreShared4(sm.k + place * S::kKvBoxBytes + at * 128 + thread % 8 * 16, 0u);
      }
    }
    ProxyFence();
    NamedSync(1 + S::kWarpgroups + warpgroup, 128);
  }

  // Of a stage that only wgmma reads; q_empty also covers the tile's number, which
  // every thread reads, and every thread arrives there.
  __device__ __forceinline__ void Release(uint32_t bar) const {
    if (lane == 0) BarrierArrive(bar);
  }
  // Turn i of the tensor cores belongs to warpgroup i; barrier 0 is the CTA's.
  __device__ __forceinline__ void TakeTurn() const { NamedSync(1 + warpgroup, 256); }
  __device__ __forceinline__ void PassTurn() const { NamedArrive(1 + (warpgroup + 1) % S::kWarpgroups, 256); }
};

// Of a tile none of whose rows this warpgroup has: it takes its turns and lets go.
template <class S>
__device__ __forceinline__ void SkipTile(const FwdShared<S>& sm, const TileInShared<S>& tile, Consumer<S>& c) {
  const int begin = tile.begin(), end = tile.end();
  BarrierArrive(sm.q_empty);
#pragma unroll 1
  for (int n = end - 1; n >= begin; --n) {
    BarrierWait(sm.k_full + 8 * c.k_at.stage, c.k_at.parity);
    c.Release(sm.k_empty + 8 * c.k_at.stage);
    c.k_at.Advance();
    if (n < end - 1) {
      c.TakeTurn();
      c.PassTurn();
    }
    BarrierWait(sm.v_full + 8 * c.v_at.stage, c.v_at.parity);
    c.Release(sm.v_empty + 8 * c.v_at.stage);
    c.v_at.Advance();
  }
}

// The largest of this thread's scores of each row, at most of all so far; kept where M
// is wanted.
template <class S, class Rows>
__device__ __forceinline__ void LargestOf(Rows& rows, const float (&s)[S::kCols / 2], float (&largest)[2]) {
  rows.Largest(s, largest);
  if constexpr (S::kCount) {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.max[r] = largest[r] = fmaxf(rows.max[r], largest[r]);
  }
}

// kCounted: the rows of this tile count for the statistics.
template <class S, bool kCounted>
__device__ __forceinline__ void ConsumeTile(const FwdParams& p, const FwdMaps& maps, const FwdShared<S>& sm,
                                            const TileInShared<S>& tile, Consumer<S>& c) {
  using T = typename S::T;
  // What is counted leaves too few registers for P beside S.
  constexpr bool kAwaitValues = kCounted;
  const int begin = tile.begin(), end = tile.end();
  constexpr bool kStanding = S::kStanding && !kCounted;
  std::conditional_t<kStanding, StandingRows<T, false>,
                     SoftmaxRows<T, S::kMode, kDividesByRounded<S::kMode> && !S::kOnes, kCounted>>
      rows;
  float o[S::kOutputs / 2];
#pragma unroll
  for (int i = 0; i < S::kOutputs / 2; ++i) o[i] = 0.f;

  typename S::Seq seq;
  int row, head;
  FinishedRow done[2];
  const auto write_sums = [&] {
    seq = tile.sequence(p.seq);
    row = tile.row();
    head = tile.head();
    if constexpr (kStanding && S::kCount) {
#pragma unroll
      for (int r = 0; r < 2; ++r) rows.max[r] = QuadMax(rows.max[r]);
    }
    WriteFwdSums(p, rows, row + RowInTile(), head, seq, ThreadIndexAgain() % 32, done);
  };
  if (begin == end) {
    BarrierArrive(sm.q_empty);
    write_sums();
  } else {
    uint32_t probs[S::kCols / 4];
    int n = end - 1;
    {  // The first tile: nothing to overlap with.
      float s[S::kCols / 2];
      BarrierWait(sm.k_full + 8 * c.k_at.stage, c.k_at.parity);
      WgmmaFence();
      IssueScores<S>(s, c.q_tile, c.k_tile());
      WgmmaCommit();
      WgmmaWait<0>();
      PinRegisters(s);
      c.Release(sm.k_empty + 8 * c.k_at.stage);
      if (n == begin) BarrierArrive(sm.q_empty);
      c.k_at.Advance();
      if (n >= tile.right() || (S::kGeneral && n < tile.left())) {
        PrepareScores<S, true>(s, p, tile, n * S::kCols);
      } else {
        PrepareScores<S, false>(s, p, tile, n * S::kCols);
      }
      float rescale[2];
      if constexpr (kStanding) {
        float largest[2];
        LargestOf<S>(rows, s, largest);
        rows.Move(largest, p.score.scale_log2, rescale);
        rows.Exponentials(s, p.score.scale_log2, p.seq.head_dim >> 16);
      } else {
        rows.template Tile<true>(s, p.score, p.paper, p.seq.head_dim >> 16, rescale);
        if (kCounted && n == 0) rows.KeepFirstKey(s);
      }
      rows.Probabilities(s, probs);
    }
    if constexpr (S::kBounded) c.ClearPadding(sm, tile.sequence(p.seq), end - 1);
    const auto step = [&](auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
      float s[S::kCols / 2];
      BarrierWait(sm.k_full + 8 * c.k_at.stage, c.k_at.parity);
      c.TakeTurn();
      PinRegisters(o);
      PinRegisters(probs);
      WgmmaFence();
      IssueScores<S>(s, c.q_tile, c.k_tile());
      WgmmaCommit();
      BarrierWait(sm.v_full + 8 * c.v_at.stage, c.v_at.parity);
      WgmmaFence();
      c.IssueValues(o, probs);
      WgmmaCommit();
      c.PassTurn();
      WgmmaWait<kAwaitValues ? 0 : 1>();
      PinRegisters(s);
      c.Release(sm.k_empty + 8 * c.k_at.stage);
      if (n == begin) BarrierArrive(sm.q_empty);
      c.k_at.Advance();
      const auto values_done = [&] {
        WgmmaWait<0>();
        PinRegisters(o);
        PinRegisters(probs);
        c.Release(sm.v_empty + 8 * c.v_at.stage);
        c.v_at.Advance();
      };
      if constexpr (kAwaitValues) values_done();
      PrepareScores<S, kMasked>(s, p, tile, n * S::kCols);
      float rescale[2];
      [[maybe_unused]] bool moved = false;
      if constexpr (kStanding) {
        float largest[2];
        LargestOf<S>(rows, s, largest);
        moved = __any_sync(0xffffffffu, rows.Exceeds(largest, p.score.scale_log2));
        float paired[2];
        rows.PairAnchors(paired, p.seq.head_dim >> 16);  // Here it is done when the vote is.
        if (moved) {
          rows.Move(largest, p.score.scale_log2, rescale);
          rows.PairAnchors(paired, p.seq.head_dim >> 16);
        }
        rows.Exponentials(s, p.score.scale_log2, paired);
      } else {
        rows.template Tile<kMasked>(s, p.score, p.paper, p.seq.head_dim >> 16, rescale);
        if (kCounted && n == 0) rows.KeepFirstKey(s);
      }
      if constexpr (!kAwaitValues) values_done();
      PinRegisters(s);  // Packed again: packing into `probs` above would wait for PV.
      rows.Probabilities(s, probs);
      // Rare with anchors at integers.
      if (__builtin_expect(kStanding ? moved : __any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f),
                           !kDividesByRounded<S::kMode>)) {
#pragma unroll
        for (int i = 0; i < S::kOutputs / 2; ++i) o[i] *= rescale[i / 2 % 2];
      }
    };
    // Masked on the right, open, masked on the left: two passes, so that each
    // kind of step is compiled once.
    const int open_begin = S::kGeneral ? tile.left() : begin;
    int masked_begin = max(tile.right(), begin);
    --n;
#pragma unroll 1
    while (true) {
      for (; n >= masked_begin; --n) step(std::true_type{});
      if (n < begin) break;
      for (; n >= open_begin; --n) step(std::false_type{});
      if (!S::kGeneral) break;
      masked_begin = begin;
    }
    if constexpr (S::kBounded) {
      if (begin < end - 1) c.ClearPadding(sm, tile.sequence(p.seq), begin);
    }
    BarrierWait(sm.v_full + 8 * c.v_at.stage, c.v_at.parity);
    PinRegisters(o);
    PinRegisters(probs);
    WgmmaFence();
    c.IssueValues(o, probs);
    WgmmaCommit();
    write_sums();  // Else it is all latency: the rows' sums are exchanged, their logarithms wait for each other.
    WgmmaWait<0>();
    PinRegisters(o);
    c.Release(sm.v_empty + 8 * c.v_at.stage);
    c.v_at.Advance();
  }
  const int warp = ThreadIndexAgain() / 32 - 4;
  const StoreByBoxes<S> store = {maps, sm.out + warp * S::kWarpOutBytes,
                                 OriginOf(p.seq, seq.index, seq.q_start, seq.q_len, head), row + warp * kFwdOutputRows,
                                 p.o_lo != nullptr};
  WriteFwdOutputs<S, kCounted>(p, rows, done, o, row + RowInTile(), head, seq, ThreadIndexAgain() % 32, store);
}

template <class S>
__device__ __forceinline__ void Consume(const FwdParams& p, const FwdMaps& maps, const FwdShared<S>& sm,
                                        int warpgroup) {
  static_assert(kStatsBlockRows % S::kRows == 0);
  Consumer<S> consumer(sm, warpgroup);
  if (warpgroup == S::kWarpgroups - 1) consumer.PassTurn();
  uint32_t q_parity = 0;
  while (true) {
    BarrierWait(sm.q_full, q_parity);
    const TileInShared<S> tile = {sm.tiles + q_parity * static_cast<int>(sizeof(typename S::Tile))};
    q_parity ^= 1;
    if (tile.row() == kNoTile) break;
    if (S::kWarpgroups == 3 && tile.row() + 64 * warpgroup >= p.seq.q_len) {
      SkipTile(sm, tile, consumer);
    } else if (S::kCount && p.stats.Count(tile.sequence(p.seq).index, tile.row())) {
      if constexpr (S::kCount) ConsumeTile<S, true>(p, maps, sm, tile, consumer);
    } else {
      ConsumeTile<S, false>(p, maps, sm, tile, consumer);
    }
  }
  if (consumer.lane == 0) BulkWaitRead();  // Shared memory ends with the CTA.
}

// Grid: one CTA per multiprocessor, at most p.tiles.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    AttentionFwdKernel(const __grid_constant__ FwdParams p, const __grid_constant__ FwdMaps maps) {
  extern __shared__ char raw[];
  const FwdShared<S> sm(raw);
  if (threadIdx.x == 0) {
    BarrierInit(sm.q_full, 1);
    BarrierInit(sm.q_empty, 128 * S::kWarpgroups);
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(sm.k_full + 8 * i, 1);
      BarrierInit(sm.v_full + 8 * i, 1);
      BarrierInit(sm.k_empty + 8 * i, 4 * S::kWarpgroups);
      BarrierInit(sm.v_empty + 8 * i, 4 * S::kWarpgroups);
    }
    BarrierInitFence();
  }
  if constexpr (S::kOnes) StoreOnes<S>(sm.k + S::kOnesPlace * S::kKvBoxBytes);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    RegistersShrink<S::kProducerRegisters>();
    if (threadIdx.x == 0) {
      TmaPrefetchMap(&maps.q);
      TmaPrefetchMap(&maps.k);
      TmaPrefetchMap(&maps.v);
      TmaPrefetchMap(&maps.o);
      Produce<S>(p, maps, sm);
    }
  } else {
    RegistersGrow<S::kConsumerRegisters>();
    Consume<S>(p, maps, sm, warpgroup - 1);
  }
}

template <class S>
Status LaunchAttentionFwd(const FwdParams& p, const FwdMaps& maps, int multiprocessors, cudaStream_t stream) {
  const auto kernel = AttentionFwdKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  const int grid = p.tiles < multiprocessors ? p.tiles : multiprocessors;
  kernel<<<grid, S::kThreads, S::kSharedBytes, stream>>>(p, maps);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_
