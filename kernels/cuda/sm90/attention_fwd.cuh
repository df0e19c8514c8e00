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
// Limits    head_dim 64 or 128; token strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/sm90/attention_fwd_params.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// kCols keys a tile, kStages tiles of K and of V in flight.  kOnes: V has eight
// more columns of ones behind it, so that the PV product sums the rounded P: 6 to
// 12 % more of that product instead of two and a half instructions an element.
template <class T_, int kHeadDim_, int kWarpgroups_, int kCols_, int kStages_, SoftmaxMode kMode_,
          bool kOnes_ = kDividesByRounded<kMode_>>
struct FwdShape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kWarpgroups = kWarpgroups_, kCols = kCols_,
                       kStages = kStages_;
  static constexpr SoftmaxMode kMode = kMode_;
  static constexpr bool kOnes = kOnes_;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kHalves = kHeadDim / 64;  // 128-byte columns of a tile
  static constexpr int kQBytes = kRows * kHeadDim * 2;
  static constexpr int kKvBytes = kCols * kHeadDim * 2;
  static constexpr int kOnesBytes = kOnes ? kCols * 128 : 0;
  static constexpr int kVBytes = kKvBytes + kOnesBytes;  // a stage of V
  static constexpr int kOutputs = kHeadDim + (kOnes ? 8 : 0);
  static constexpr int kSharedBytes = kQBytes + kStages * (kKvBytes + kVBytes) + 1024 + 256;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static_assert(kHeadDim % 64 == 0 && kCols % 16 == 0 && kKvBytes % 1024 == 0);
  static_assert(kSharedBytes <= 227 * 1024);
};

// Shared memory of a CTA as addresses; barriers behind the tiles.
template <class S>
struct FwdShared {
  uint32_t q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
  volatile int* tile;  // written before q_full, read after it

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
    tile = reinterpret_cast<volatile int*>(raw + (v_empty + 8 * S::kStages - SharedAddress(raw)));
  }
};

// One tile's place in the problem, and the key tiles it needs: [0, open) need no
// mask, [open, end) do.
struct FwdTile {
  int row, head, batch, open, end;
};

template <class S>
__device__ __forceinline__ FwdTile LocateTile(const FwdParams& p, int tile) {
  const int section_tiles = p.section * p.row_tiles;
  const int section = tile / section_tiles;
  const int first = section * p.section;
  const int in_section = tile - section * section_tiles;
  const int pairs = min(p.section, p.batch * p.heads - first);
  const int rank = in_section / pairs;
  const int pair = first + in_section - rank * pairs;
  FwdTile t;
  t.row = (p.causal ? p.row_tiles - 1 - rank : rank) * S::kRows;
  t.batch = pair / p.heads;
  t.head = pair - t.batch * p.heads;
  int keys = p.k_len;       // some row of the tile may see
  int open_keys = p.k_len;  // every row of the tile may see
  if (p.causal) {
    const int shift = p.k_len - p.q_len;
    keys = min(keys, max(0, min(t.row + S::kRows, p.q_len) + shift));
    open_keys = min(open_keys, max(0, t.row + 1 + shift));
  }
  t.end = (keys + S::kCols - 1) / S::kCols;
  t.open = open_keys / S::kCols;
  return t;
}

// ---- producer

template <class S>
__device__ __forceinline__ void Produce(const FwdParams& p, const FwdMaps& maps,
                                        const FwdShared<S>& sm) {
  RingPosition<S::kStages> k_at, v_at;
  uint32_t q_parity = 0;
  int tile = blockIdx.x;
  while (true) {
    const bool done = tile >= p.tiles;
    // Asked for now, needed after this tile's loads: the latency is hidden.
    int next = tile + static_cast<int>(gridDim.x);
    if (p.counter != nullptr && !done) next = gridDim.x + atomicAdd(p.counter, 1);
    BarrierWait(sm.q_empty, q_parity ^ 1);
    q_parity ^= 1;
    *sm.tile = done ? -1 : tile;
    if (done) {
      BarrierArrive(sm.q_full);
      return;
    }
    const FwdTile t = LocateTile<S>(p, tile);
    const int kv_head = t.head / p.group;
    BarrierArriveExpect(sm.q_full, S::kQBytes);
    LoadTile<S::kHalves>(sm.q, &maps.q, sm.q_full, S::kRows, t.row, t.head, t.batch);
    const auto load = [&](uint32_t base, int stride, const CUtensorMap* map, uint32_t full,
                          uint32_t empty, RingPosition<S::kStages>& at, int n) {
      BarrierWait(empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(full + 8 * at.stage, S::kKvBytes);
      LoadTile<S::kHalves>(base + at.stage * stride, map, full + 8 * at.stage, S::kCols, n * S::kCols,
                  kv_head, t.batch);
      at.Advance();
    };
    if (t.end > 0) load(sm.k, S::kKvBytes, &maps.k, sm.k_full, sm.k_empty, k_at, t.end - 1);
    for (int n = t.end - 1; n >= 0; --n) {
      if (n > 0) load(sm.k, S::kKvBytes, &maps.k, sm.k_full, sm.k_empty, k_at, n - 1);
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
                                                     k + (i / 4) * (S::kCols * 8) + (i % 4) * 2,
                                                     i > 0);
  }
}

template <class S>
__device__ __forceinline__ void IssueValues(float (&o)[S::kOutputs / 2],
                                            const uint32_t (&p)[S::kCols / 4], uint64_t v) {
#pragma unroll
  for (int i = 0; i < S::kCols / 16; ++i) {
    Wgmma<typename S::T, S::kOutputs, false, true>::Rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2],
                                                       p[4 * i + 3], v + i * 128, 1);
  }
}

// Sets scores of keys beyond each row's last allowed key to -inf; `last` counts
// from this thread's first column.
template <int kCount>
__device__ __forceinline__ void MaskScores(float (&s)[kCount], int last0, int last1) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = i / 4 * 8 + i % 2;
    if (column > (i % 4 < 2 ? last0 : last1)) s[i] = -INFINITY;
  }
}

template <class S>
__device__ __forceinline__ void Consume(const FwdParams& p, const FwdShared<S>& sm, int warpgroup) {
  using T = typename S::T;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int row_in_tile = warpgroup * 64 + thread / 32 * 16 + lane / 4;
  const int first_column = lane % 4 * 2;
  const uint64_t q_tile = TileDescriptor(sm.q + warpgroup * 64 * 128, 0, 1024);
  const uint64_t k_tiles = TileDescriptor(sm.k, 0, 1024);
  const uint64_t v_tiles = TileDescriptor(sm.v, S::kCols * 128, 1024);
  // Of a stage that only wgmma reads; q_empty also covers the tile's number, which
  // every thread reads, and every thread arrives there.
  const auto release = [&](uint32_t bar) {
    if (lane == 0) BarrierArrive(bar);
  };
  // Turn i of the tensor cores belongs to warpgroup i; barrier 0 is the CTA's.
  const auto take_turn = [&] { NamedSync(1 + warpgroup, 256); };
  const auto pass_turn = [&] { NamedArrive(1 + (warpgroup + 1) % S::kWarpgroups, 256); };
  if (warpgroup == S::kWarpgroups - 1) pass_turn();

  RingPosition<S::kStages> k_at, v_at;
  uint32_t q_parity = 0;
  while (true) {
    BarrierWait(sm.q_full, q_parity);
    q_parity ^= 1;
    const int tile = *sm.tile;
    if (tile < 0) return;
    const FwdTile t = LocateTile<S>(p, tile);
    const int row = t.row + row_in_tile;

    SoftmaxRows<T, S::kMode, kDividesByRounded<S::kMode> && !S::kOnes> rows;
    float o[S::kOutputs / 2];
#pragma unroll
    for (int i = 0; i < S::kOutputs / 2; ++i) o[i] = 0.f;

    if (t.end == 0) {
      BarrierArrive(sm.q_empty);
    } else {
      const auto mask = [&](float(&s)[S::kCols / 2], int n) {
        int last0 = p.k_len - 1, last1 = last0;
        if (p.causal) {
          last0 = min(last0, row + p.k_len - p.q_len);
          last1 = min(last1, row + 8 + p.k_len - p.q_len);
        }
        const int first = n * S::kCols + first_column;
        MaskScores(s, last0 - first, last1 - first);
      };
      uint32_t probs[S::kCols / 4];
      int n = t.end - 1;
      {  // The first tile: nothing to overlap with.
        float s[S::kCols / 2];
        BarrierWait(sm.k_full + 8 * k_at.stage, k_at.parity);
        WgmmaFence();
        IssueScores<S>(s, q_tile, k_tiles + k_at.stage * (S::kKvBytes / 16));
        WgmmaCommit();
        WgmmaWait<0>();
        PinRegisters(s);
        release(sm.k_empty + 8 * k_at.stage);
        if (n == 0) BarrierArrive(sm.q_empty);
        k_at.Advance();
        mask(s, n);
        float rescale[2];
        rows.template Tile<true>(s, p.scale_log2, rescale);
        rows.Probabilities(s, probs);
      }
      const auto step = [&](auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        float s[S::kCols / 2];
        BarrierWait(sm.k_full + 8 * k_at.stage, k_at.parity);
        take_turn();
        PinRegisters(o);
        PinRegisters(probs);
        WgmmaFence();
        IssueScores<S>(s, q_tile, k_tiles + k_at.stage * (S::kKvBytes / 16));
        WgmmaCommit();
        BarrierWait(sm.v_full + 8 * v_at.stage, v_at.parity);
        WgmmaFence();
        IssueValues<S>(o, probs, v_tiles + v_at.stage * (S::kVBytes / 16));
        WgmmaCommit();
        pass_turn();
        WgmmaWait<1>();
        PinRegisters(s);
        release(sm.k_empty + 8 * k_at.stage);
        if (n == 0) BarrierArrive(sm.q_empty);
        k_at.Advance();
        if constexpr (kMasked) mask(s, n);
        float rescale[2];
        rows.template Tile<kMasked>(s, p.scale_log2, rescale);
        WgmmaWait<0>();
        PinRegisters(o);
        PinRegisters(probs);
        release(sm.v_empty + 8 * v_at.stage);
        v_at.Advance();
        PinRegisters(s);  // Packed again: packing into `probs` above would wait for PV.
        rows.Probabilities(s, probs);
        if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
          for (int i = 0; i < S::kOutputs / 2; ++i) o[i] *= rescale[i / 2 % 2];
        }
      };
      for (--n; n >= t.open; --n) step(std::true_type{});
      for (; n >= 0; --n) step(std::false_type{});
      BarrierWait(sm.v_full + 8 * v_at.stage, v_at.parity);
      PinRegisters(o);
      PinRegisters(probs);
      WgmmaFence();
      IssueValues<S>(o, probs, v_tiles + v_at.stage * (S::kVBytes / 16));
      WgmmaCommit();
      WgmmaWait<0>();
      PinRegisters(o);
      release(sm.v_empty + 8 * v_at.stage);
      v_at.Advance();
    }

    // Epilogue.
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const FinishedRow done = rows.Finish(r, S::kOnes ? o[S::kOutputs / 2 - 4 + 2 * r] : 0.f);
      inverse[r] = done.inverse;
      if (lane % 4 == 0 && row + 8 * r < p.q_len) {
        p.lse[t.batch * p.lse_batch_stride + t.head * p.lse_head_stride + row + 8 * r] = done.lse;
      }
    }
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 2; ++i) o[i] *= inverse[i / 2 % 2];
    const auto place = [&](void* base, const FwdStrides& stride, int at) -> uint16_t* {
      if (at >= p.q_len) return nullptr;
      return static_cast<uint16_t*>(base) + t.batch * stride.batch + t.head * stride.head +
             at * stride.token;
    };
    uint32_t words[S::kHeadDim / 4];
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 4; ++i) words[i] = PackPair<T>(o[2 * i], o[2 * i + 1]);
    StoreRows<S::kHeadDim>(words, place(p.o, p.o_stride, row), place(p.o, p.o_stride, row + 8), lane);
    if constexpr (kDividesByRounded<S::kMode>) {
      if (p.o_lo != nullptr) {
#pragma unroll
        for (int i = 0; i < S::kHeadDim / 4; ++i) {
          const float2 rounded = UnpackPair<T>(words[i]);
          words[i] = PackPair<__nv_bfloat16>(o[2 * i] - rounded.x, o[2 * i + 1] - rounded.y);
        }
        StoreRows<S::kHeadDim>(words, place(p.o_lo, p.o_lo_stride, row),
                     place(p.o_lo, p.o_lo_stride, row + 8), lane);
      }
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
Status LaunchAttentionFwd(const FwdParams& p, const FwdMaps& maps, int multiprocessors,
                          cudaStream_t stream) {
  const auto kernel = AttentionFwdKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) !=
      cudaSuccess) {
    return Status::kDeviceError;
  }
  const int grid = p.tiles < multiprocessors ? p.tiles : multiprocessors;
  kernel<<<grid, S::kThreads, S::kSharedBytes, stream>>>(p, maps);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_CUH_
