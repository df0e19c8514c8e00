// Stabilized attention, forward, Hopper; see bellwether/kernels/attention.h and
// cuda/softmax.cuh for what it computes.
//
// Work      persistent: one CTA per multiprocessor takes tiles of kRows query
//           rows, longest first, from a counter (or round robin without one).
//           Warpgroup 0 is the producer, one lane of it issues bulk tensor
//           copies; each of the kWarpgroups others owns 64 rows.  A consumer
//           issues S = Q K^T of the next tile together with O += P V of this
//           one and computes the next softmax under them; the warpgroups take
//           turns at the tensor cores (named barriers), so that one's softmax
//           runs under the other's products.
// Memory    Q, O once; K, V once per tile of query rows, mostly from L2: tiles
//           are ordered in sections of heads whose K and V fit it together.
// Numerics  S, O, l, lt in fp32; P rounded to the input type; O rounded once.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "bellwether/kernels/status.h"
#include "cuda/attention_fwd_outputs.cuh"
#include "cuda/attention_fwd_tiles.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_fwd_params.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// kCols keys a tile, kStages tiles of K and of V in flight.  kOnes: V has eight
// more columns of ones behind it, so that the PV product sums the rounded P: 6 to
// 12 % more of that product instead of two and a half instructions an element.
// kGeneral: packed sequences, windows, caps and random rounding work, at the price
// of registers.  kCount: rows can be counted for the statistics: in tiles that count
// by a loop of their own, so that the others cost what they do without.
template <class T_, int kHeadDim_, int kWarpgroups_, SoftmaxMode kMode_, bool kGeneral_, bool kCount_>
struct FwdShape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kWarpgroups = kWarpgroups_, kCols = 128, kStages = 2;
  static constexpr SoftmaxMode kMode = kMode_;
  static constexpr bool kGeneral = kGeneral_, kCount = kCount_;
  // kSr sums in registers: with both, ptxas serialises the products (C7511).
  static constexpr bool kOnes = kMode == SoftmaxMode::kHp;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kBoxes = (kHeadDim + 63) / 64;  // 128-byte columns of a tile
  static constexpr int kQBytes = kRows * kBoxes * 128;
  static constexpr int kKvBytes = kCols * kBoxes * 128;
  static constexpr int kOnesBytes = kOnes ? kCols * 128 : 0;
  static constexpr int kVBytes = kKvBytes + kOnesBytes;  // a stage of V
  static constexpr int kOutputs = kHeadDim + (kOnes ? 8 : 0);
  static constexpr int kSharedBytes = kQBytes + kStages * (kKvBytes + kVBytes) + 1024 + 256;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static_assert(kHeadDim % 16 == 0 && kCols % 16 == 0 && kKvBytes % 1024 == 0);
  // The column of ones lies behind V's last box, so V must fill it.
  static_assert(!kOnes || kHeadDim % 64 == 0);
  static_assert(kSharedBytes <= 227 * 1024);
};

// Shared memory of a CTA as addresses; barriers behind the tiles.
template <class S>
struct FwdShared {
  uint32_t q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
  // FwdTile of this tile and of the next, by q_full's parity: written before it,
  // read while the tile lasts.
  uint32_t tiles;

  __device__ explicit FwdShared(char* raw) {
    const uint32_t base = (SharedAddress(raw) + 1023u) & ~1023u;
    q = base;
    k = q + S::kQBytes;
    v = k + S::kStages * S::kKvBytes;
    q_full = v + S::kStages * S::kVBytes;
    q_empty = q_full + 8;
    k_full = q_empty + 8;
    k_empty = k_full + 8 * S::kStages;
    v_full = k_empty + 8 * S::kStages;
    v_empty = v_full + 8 * S::kStages;
    tiles = v_empty + 8 * S::kStages;
  }
};
static_assert(2 * sizeof(FwdTile) <= 128);

__device__ __forceinline__ void StoreTile(uint32_t to, const FwdTile& t) {
  static_assert(sizeof(FwdTile) % sizeof(int) == 0);
  const int* const words = reinterpret_cast<const int*>(&t);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(FwdTile) / sizeof(int)); ++i) {
    StoreShared(to + i * sizeof(int), words[i]);
  }
}

// Read again where needed, so that nothing of it stays in registers.
template <class S>
struct TileInShared {
  uint32_t address;

  __device__ __forceinline__ int row() const { return Load(offsetof(FwdTile, row)); }
  __device__ __forceinline__ int head() const { return Load(offsetof(FwdTile, head)); }
  __device__ __forceinline__ int begin() const { return Load(offsetof(FwdTile, begin)); }
  __device__ __forceinline__ int left() const { return Load(offsetof(FwdTile, left)); }
  __device__ __forceinline__ int right() const { return Load(offsetof(FwdTile, right)); }
  __device__ __forceinline__ int end() const { return Load(offsetof(FwdTile, end)); }
  // Without k_start, which only the producer needs.
  __device__ __forceinline__ Sequence sequence(const SequenceParams& p) const {
    const int index = Load(offsetof(FwdTile, sequence.index));
    if constexpr (!S::kGeneral) return BatchSequence(p, index);
    return {index, Load(offsetof(FwdTile, sequence.q_start)), Load(offsetof(FwdTile, sequence.q_len)), 0,
            Load(offsetof(FwdTile, sequence.k_len))};
  }

 private:
  __device__ __forceinline__ int Load(int offset) const { return LoadShared(address + offset); }
};

// ---- producer

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
    const auto load = [&](uint32_t base, int stride, const CUtensorMap* map, uint32_t full, uint32_t empty,
                          RingPosition<S::kStages>& at, int n) {
      BarrierWait(empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(full + 8 * at.stage, S::kKvBytes);
      LoadTile<S::kBoxes>(base + at.stage * stride, map, full + 8 * at.stage, S::kCols, kv, n * S::kCols);
      at.Advance();
    };
    if (t.end > t.begin) load(sm.k, S::kKvBytes, &maps.k, sm.k_full, sm.k_empty, k_at, t.end - 1);
    for (int n = t.end - 1; n >= t.begin; --n) {
      if (n > t.begin) load(sm.k, S::kKvBytes, &maps.k, sm.k_full, sm.k_empty, k_at, n - 1);
      load(sm.v, S::kVBytes, &maps.v, sm.v_full, sm.v_empty, v_at, n);
    }
    tile = next;
  }
}

// ---- consumers

template <class S>
__device__ __forceinline__ void IssueScores(float (&s)[S::kCols / 2], uint64_t q, uint64_t k) {
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 16; ++i) {
    Wgmma<typename S::T, S::kCols, false, false>::Ss(s, q + (i / 4) * (S::kRows * 8) + (i % 4) * 2,
                                                     k + (i / 4) * (S::kCols * 8) + (i % 4) * 2, i > 0);
  }
}

// From the last keys to the first, like the tiles: the tensor cores cut off what
// is small beside the sum so far, and the first token often has most of the weight.
template <class S>
__device__ __forceinline__ void IssueValues(float (&o)[S::kOutputs / 2], const uint32_t (&p)[S::kCols / 4],
                                            uint64_t v) {
#pragma unroll
  for (int i = S::kCols / 16 - 1; i >= 0; --i) {
    Wgmma<typename S::T, S::kOutputs, false, true>::Rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                                                       v + i * 128, 1);
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
    const Sequence seq = tile.sequence(p.seq);
    const int row = tile.row() + RowInTile(), column = key + ThreadIndexAgain() % 4 * 2;
    MaskAfter(s, LastKey(p.seq, seq, row) - column, LastKey(p.seq, seq, row + 8) - column);
    if (S::kGeneral && p.seq.window > 0) {
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
        v_tiles(TileDescriptor(sm.v, S::kCols * 128, 1024)) {}

  // Of a stage that only wgmma reads; q_empty also covers the tile's number, which
  // every thread reads, and every thread arrives there.
  __device__ __forceinline__ void Release(uint32_t bar) const {
    if (lane == 0) BarrierArrive(bar);
  }
  // Turn i of the tensor cores belongs to warpgroup i; barrier 0 is the CTA's.
  __device__ __forceinline__ void TakeTurn() const { NamedSync(1 + warpgroup, 256); }
  __device__ __forceinline__ void PassTurn() const { NamedArrive(1 + (warpgroup + 1) % S::kWarpgroups, 256); }
};

// kCounted: the rows of this tile count for the statistics.
template <class S, bool kCounted>
__device__ __forceinline__ void ConsumeTile(const FwdParams& p, const FwdShared<S>& sm, const TileInShared<S>& tile,
                                            Consumer<S>& c) {
  using T = typename S::T;
  // What is counted leaves too few registers for P beside S.
  constexpr bool kAwaitValues = kCounted;
  const int begin = tile.begin(), end = tile.end();
  SoftmaxRows<T, S::kMode, kDividesByRounded<S::kMode> && !S::kOnes, kCounted> rows;
  float o[S::kOutputs / 2];
#pragma unroll
  for (int i = 0; i < S::kOutputs / 2; ++i) o[i] = 0.f;

  if (begin == end) {
    BarrierArrive(sm.q_empty);
  } else {
    uint32_t probs[S::kCols / 4];
    int n = end - 1;
    {  // The first tile: nothing to overlap with.
      float s[S::kCols / 2];
      BarrierWait(sm.k_full + 8 * c.k_at.stage, c.k_at.parity);
      WgmmaFence();
      IssueScores<S>(s, c.q_tile, c.k_tiles + c.k_at.stage * (S::kKvBytes / 16));
      WgmmaCommit();
      WgmmaWait<0>();
      PinRegisters(s);
      c.Release(sm.k_empty + 8 * c.k_at.stage);
      if (n == begin) BarrierArrive(sm.q_empty);
      c.k_at.Advance();
      PrepareScores<S, true>(s, p, tile, n * S::kCols);
      float rescale[2];
      rows.template Tile<true>(s, p.score, p.paper, p.seq.head_dim >> 16, rescale);
      if (kCounted && n == 0) rows.KeepFirstKey(s);
      rows.Probabilities(s, probs);
    }
    const auto step = [&](auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
      float s[S::kCols / 2];
      BarrierWait(sm.k_full + 8 * c.k_at.stage, c.k_at.parity);
      c.TakeTurn();
      PinRegisters(o);
      PinRegisters(probs);
      WgmmaFence();
      IssueScores<S>(s, c.q_tile, c.k_tiles + c.k_at.stage * (S::kKvBytes / 16));
      WgmmaCommit();
      BarrierWait(sm.v_full + 8 * c.v_at.stage, c.v_at.parity);
      WgmmaFence();
      IssueValues<S>(o, probs, c.v_tiles + c.v_at.stage * (S::kVBytes / 16));
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
      rows.template Tile<kMasked>(s, p.score, p.paper, p.seq.head_dim >> 16, rescale);
      if (kCounted && n == 0) rows.KeepFirstKey(s);
      if constexpr (!kAwaitValues) values_done();
      PinRegisters(s);  // Packed again: packing into `probs` above would wait for PV.
      rows.Probabilities(s, probs);
      // Rare with anchors at integers.
      if (__builtin_expect(__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f),
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
    BarrierWait(sm.v_full + 8 * c.v_at.stage, c.v_at.parity);
    PinRegisters(o);
    PinRegisters(probs);
    WgmmaFence();
    IssueValues<S>(o, probs, c.v_tiles + c.v_at.stage * (S::kVBytes / 16));
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(o);
    c.Release(sm.v_empty + 8 * c.v_at.stage);
    c.v_at.Advance();
  }
  WriteFwdOutputs<S, kCounted>(p, rows, o, tile.row() + RowInTile(), tile.head(), tile.sequence(p.seq),
                               ThreadIndexAgain() % 32);
}

template <class S>
__device__ __forceinline__ void Consume(const FwdParams& p, const FwdShared<S>& sm, int warpgroup) {
  static_assert(kStatsBlockRows % S::kRows == 0);
  Consumer<S> consumer(sm, warpgroup);
  if (warpgroup == S::kWarpgroups - 1) consumer.PassTurn();
  uint32_t q_parity = 0;
  while (true) {
    BarrierWait(sm.q_full, q_parity);
    const TileInShared<S> tile = {sm.tiles + q_parity * static_cast<int>(sizeof(FwdTile))};
    q_parity ^= 1;
    if (tile.row() == kNoTile) return;
    if (S::kCount && p.stats.Count(tile.sequence(p.seq).index, tile.row())) {
      if constexpr (S::kCount) ConsumeTile<S, true>(p, sm, tile, consumer);
    } else {
      ConsumeTile<S, false>(p, sm, tile, consumer);
    }
  }
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
  if constexpr (S::kOnes) {
    const uint32_t ones = PackPair<typename S::T>(1.f, 1.f);
    for (int i = threadIdx.x * 16; i < S::kStages * S::kOnesBytes; i += S::kThreads * 16) {
      const int stage = i / S::kOnesBytes;
      StoreShared4(sm.v + stage * S::kVBytes + S::kKvBytes + i % S::kOnesBytes, ones);
    }
    ProxyFence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    RegistersShrink<S::kProducerRegisters>();
    if (threadIdx.x == 0) {
      TmaPrefetchMap(&maps.q);
      TmaPrefetchMap(&maps.k);
      TmaPrefetchMap(&maps.v);
      Produce<S>(p, maps, sm);
    }
  } else {
    RegistersGrow<S::kConsumerRegisters>();
    Consume<S>(p, sm, warpgroup - 1);
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
