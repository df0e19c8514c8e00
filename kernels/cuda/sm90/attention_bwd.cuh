// Stabilized attention, backward, Hopper; see bellwether/kernels/attention.h.
//
// Work      prepare: delta = rowsum(dO * (O + O_lo)), L in log2 units, dQ sums
//           cleared.  main: one CTA per tile of 128 keys, longest first, loops
//           over the tiles of kRows queries of every query head of its group, so
//           that dK and dV are whole sums in registers.  Warpgroup 0 loads, and adds
//           dQ, and sums the keys if they are to be centred.  Each of the other two owns 64 keys.  S^T = K Q^T,
//           dP^T = V dO^T, P^T = exp2(S^T - L), dS^T = P^T (dP^T - delta).  dV += P^T dO, dK += dS^T Q with P^T and
//           dS^T from registers.  dS^T goes to shared memory once for dQ = dS K, of which each warpgroup computes
//           half.  dQ goes through shared memory, too.  A thread of warpgroup 0, or two, has the copy engine add it
//           to global memory, which waits for nothing that the products wait for.  The order of the products:
//           BwdShape::kScoresAhead and kDeferred. Where tiles are too few for the GPU, several CTAs share the steps of
//           one, and the last adds their dK and dV (attention_bwd_shares.cuh). finish: dQ * scale to the output type.
// Memory    Q, dO once per tile of keys, from L2; dQ sums: 4 bytes an element
//           added per tile of keys.
// Numerics  S, dP, P, delta, dQ, dK, dV in fp32; P and dS rounded to the input
//           type as operands.  The order in which key tiles add to dQ is not
//           fixed, unless they take turns: attention_bwd_turns.cuh.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "bellwether/kernels/status.h"
#include "cuda/attention_bwd_errors.cuh"
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_bwd_scores.cuh"
#include "cuda/attention_bwd_shares.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_bwd_turns.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_ahead.cuh"
#include "cuda/sm90/attention_bwd_center.cuh"
#include "cuda/sm90/attention_bwd_deferred.cuh"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/attention_bwd_layout.cuh"
#include "cuda/sm90/attention_bwd_parts.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/query_steps.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm90 {

// By a warp, of which one thread loads.
template <class S>
__device__ __forceinline__ void BwdProduce(const AttentionBwdParams& p, const BwdMaps& maps, const BwdShared<S>& sm,
                                           const typename S::Tile* tile) {
  const bool loads = threadIdx.x % 32 == 0;
  {
    const typename S::Tile t = *tile;
    // Nothing would wait for K and V, and copies must not outlast the CTA.
    if (t.steps == 0 && !(S::kRowSums && p.center && t.share == 0)) return;
    if (loads) {
      const Sequence& seq = t.sequence;
      const TileOrigin kv = OriginOf(p.seq, seq.index, seq.k_start, seq.k_len, t.kv_head);
      BarrierArriveExpect(sm.kv_full, 2 * S::kKvBytes);
      LoadTile<S::kHalves>(sm.k, &maps.k, sm.kv_full, S::kCols, kv, t.key);
      LoadTile<S::kHalves>(sm.v, &maps.v, sm.kv_full, S::kCols, kv, t.key);
    }
    __syncwarp();
  }
  if constexpr (S::kPlain || S::kWorksAhead) AwaitPrepared<S>(p, tile);
  // Little is kept across the loop, and it is not unrolled: 24 registers are few.
  const Sequence seq = tile->sequence;
  TileOrigin q = OriginOf(p.seq, seq.index, seq.q_start, seq.q_len, 0);
  const int first_head = tile->kv_head * p.seq.group;
  const int64_t first_row = RowBase(p, seq, first_head);
  QueryStep step = FirstQueryStep(p, *tile);
#pragma unroll 1
  for (int i = 0; i < tile->steps; ++i, Advance(p, *tile, &step)) {
    const uint32_t stage = i % S::kStages;
    q.head = first_head + step.member;
    const int row = step.tile * S::kRows;
    const uint32_t q_full = sm.q_full + 8 * stage, d_o_full = sm.d_o_full + 8 * stage;
    const auto load_row = [&](uint32_t dst, const float* src, uint32_t full) {
      BulkLoad(dst + stage * S::kRowBytes, src + first_row + step.member * p.rows_per_head + row, full, S::kRowBytes);
    };
    if (i >= S::kStages) NamedSync(kQEmpty + stage, kBwdBarrierThreads);
    if (loads) {
      StoreShared(sm.steps + 8 * stage, step.tile);
      StoreShared(sm.steps + 8 * stage + 4, step.member);
      BarrierArriveExpect(q_full, S::kQBytes + (S::kRounded ? 2 : 1) * S::kRowBytes);
      LoadTile<S::kHalves>(sm.q + stage * S::kQBytes, &maps.q, q_full, S::kRows, q, row);
      load_row(sm.lse, p.lse_log2, q_full);
      if constexpr (S::kRounded) load_row(sm.inverse, p.inverse, q_full);
    }
    __syncwarp();
    if (i >= S::kStages) NamedSync(kDoEmpty + stage, kBwdBarrierThreads);
    if (loads) {
      BarrierArriveExpect(d_o_full, S::kQBytes + S::kRowBytes);
      LoadTile<S::kHalves>(sm.d_o + stage * S::kQBytes, &maps.d_o, d_o_full, S::kRows, q, row);
      load_row(sm.delta, p.delta, d_o_full);
    }
    __syncwarp();
  }
}

// Adds dQ of every step, and rowsum(dS), by the copy engine: one thread of a warp does.  Where
// tiles take turns, two warps do, each every other step from `first` on.  To wait for a turn, for
// the addition and for its fence takes longer than a step.  24 registers are few: see BwdProduce().
template <class S>
__device__ __forceinline__ void BwdReduce(const AttentionBwdParams& p, const BwdShared<S>& sm,
                                          const typename S::Tile* tile, int first) {
  constexpr int kTurn = 0;  // One adds the whole step.
  const bool turns = S::kGeneral && p.turns != nullptr, adds = threadIdx.x % 32 == 0;
  if constexpr (S::kPlain || S::kWorksAhead) AwaitPrepared<S>(p, tile);
  QueryStep at = FirstQueryStep(p, *tile);
  if (first > 0) Advance(p, *tile, &at);
#pragma unroll 1
  for (int step = first; step < tile->steps; step += turns ? 2 : 1) {
    const typename S::Tile t = *tile;
    const int head = t.kv_head * p.seq.group + at.member, m = at.tile;
    if (turns && adds) {
      AwaitTurnAlone<S>(p, t, m, head, kTurn);
      GlobalProxyFence();
    }
    __syncwarp();
    NamedSync(DqFull<S>(step), kBwdBarrierThreads);
    if (adds) {
      const int64_t row = RowBase(p, t.sequence, head) + m * S::kRows;
      BulkReduceAdd(p.dq_sum + row * S::kHeadDim, sm.dq, S::kDqBytes);
      if constexpr (S::kRowSums) BulkReduceAdd(p.ds_sum + row, sm.ds_sum, S::kSumBytes);
      BulkCommit();
      BulkWaitRead();
      BarrierArrive(sm.dq_empty);
      if (turns) {
        BulkWait();
        GlobalProxyFence();
        __threadfence();
        ReduceAddRelease(TurnOf<S>(p, t, m, head, kTurn), 1);
      }
    }
    __syncwarp();
    if (turns) Advance(p, t, &at);
    Advance(p, t, &at);
  }
  BulkWait();
  if constexpr (S::kWorksAhead) {
    if constexpr (S::kRowSums) NamedSync(kDkStored, kBwdBarrierThreads);
    SayAdded<S>(p, tile);
  }
}

// Clears K and V of padding, whatever it holds: dS of it is 0, but 0 times NaN is not.  By the 256
// threads of the consumers.
template <class S>
__device__ __forceinline__ void ClearPadding(const BwdShared<S>& sm, const typename S::Tile* tile) {
  const int begin = tile->sequence.key_begin - tile->key, end = min(tile->sequence.key_end - tile->key, S::kCols);
  if (begin <= 0 && end == min(tile->sequence.k_len - tile->key, S::kCols)) return;
  const int thread = ThreadIndexAgain() - 128;
  for (int row = thread / 8; row < S::kCols; row += 32) {
    if (row >= begin && row < end) continue;
#pragma unroll
    for (int box = 0; box < 2 * S::kHalves; ++box) {  // of K, and of V behind it
      StoreShared4(sm.k + box * (S::kCols * 128) + row * 128 + thread % 8 * 16, 0u);
    }
  }
  ProxyFence();
  NamedSync(kConsumers, 256);
}

// All steps of a tile that has some; K and V are there.  `tile` is t in shared memory, for what would otherwise stay in
// registers.
template <class S>
__device__ __forceinline__ void RunSteps(const AttentionBwdParams& p, const BwdShared<S>& sm, const typename S::Tile& t,
                                         const typename S::Tile* tile, const BwdOperands& from, int warpgroup,
                                         float (&dv)[S::kChannels / 2], float (&dk)[S::kChannels / 2]) {
  using T = typename S::T;
  constexpr int kScores = S::kRows / 2, kPairs = S::kRows / 4;
  const int first_column = threadIdx.x % 4 * 2, steps = t.steps;
  RingPosition<S::kStages> at;
  float s[kScores], dp[kScores], pr[kScores];
  uint32_t probs[kPairs];
  [[maybe_unused]] float2 deltas[kScores / 4];
  const auto issue_scores = [&] {
    BarrierWait(sm.q_full + 8 * at.stage, at.parity);
    WgmmaFence();
    IssueInner<S>(s, from.k_rows, from.q_tiles + at.stage * (S::kQBytes / 16));
    WgmmaCommit();
  };
  if constexpr (S::kScoresAhead) {
    issue_scores();
    WgmmaWait<0>();
    PinRegisters(s);
  }
  int step = 0;
  // counted: the rows of this step count for the statistics.
  const auto run_step = [&](auto is_last, auto counted) {
    constexpr bool kLast = decltype(is_last)::value;
    const uint32_t lse = sm.lse + at.stage * S::kRowBytes + first_column * 4;
    [[maybe_unused]] const uint32_t inverse = sm.inverse + at.stage * S::kRowBytes + first_column * 4;
    const uint32_t delta = sm.delta + at.stage * S::kRowBytes + first_column * 4;
    const uint64_t d_o_tile = from.d_o_tiles + at.stage * (S::kQBytes / 16);
    if constexpr (!S::kScoresAhead) issue_scores();
    BarrierWait(sm.d_o_full + 8 * at.stage, at.parity);
    WgmmaFence();
    IssueInner<S>(dp, from.v_rows, d_o_tile);
    WgmmaCommit();
    // dP runs under the exponentials of S.
    const int m = LoadShared(sm.steps + 8 * at.stage);
    if constexpr (!S::kScoresAhead) {
      WgmmaWait<1>();
      PinRegisters(s);
    }
    if constexpr (S::kGeneral) {
      if (p.score.cap_scale != 0.f) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = Tanh(s[i] * p.score.cap_scale);
      }
    }
    if (NeedsMask<S::kGeneral>(p.seq, t.sequence, t.key, S::kCols, m * S::kRows, S::kRows)) {
      const int thread = ThreadIndexAgain() - 128;
      MaskTransposed<S::kGeneral>(s, p.seq, t.sequence, t.key + thread / 32 * 16 + thread % 32 / 4,
                                  m * S::kRows + thread % 4 * 2);
    }
    ToProbabilities<T, S::kRounded>(s, pr, p.score.scale_log2, lse, inverse);
    if constexpr (S::kEarlyDeltas) {
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) deltas[i] = LoadShared2(delta + i * 32);
    }
    if constexpr (S::kScoresAhead) {
      WgmmaWait<0>();
    } else {
      // dV's operand needs all exponentials, which ptxas would move behind the wait for dP otherwise.
#pragma unroll
      for (int i = 0; i < kPairs; ++i) probs[i] = PackPair<T>(pr[2 * i], pr[2 * i + 1]);
      PinRegisters(probs);
      PinRegisters(dv);
      WgmmaFence();
      IssueOuter<S>(dv, probs, d_o_tile);
      WgmmaCommit();
      WgmmaWait<1>();
    }
    PinRegisters(dp);
    // Whether this stage is loaded again.
    const auto is_read_again = [&] { return !kLast && step + S::kStages < steps; };
    uint32_t ds[kPairs];
    if constexpr (decltype(counted)::value) {
      const typename S::Tile of = *tile;
      const int head = of.kv_head * p.seq.group + LoadShared(sm.steps + 8 * at.stage + 4);
      AddErrors<4, kScores>(p.errors + RowBase(p, of.sequence, head) + m * S::kRows, delta, ThreadIndexAgain() % 32,
                            [&](int i, float d) { return pr[i] * (dp[i] - d); });
    }
    if constexpr (S::kGeneral) {
      if (p.score.cap_scale != 0.f) {
        ApplyCapDerivative<S::kRounded>(dp, pr, p.score.scale_log2, lse, delta, inverse);
      }
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 d = S::kEarlyDeltas ? deltas[i / 4] : LoadShared2(delta + i * 8);
      if constexpr (S::kScoresAhead) {
        probs[i / 2] = PackPair<T>(pr[i], pr[i + 1]);
        probs[i / 2 + 1] = PackPair<T>(pr[i + 2], pr[i + 3]);
      }
      ds[i / 2] = PackPair<T>(pr[i] * (dp[i] - d.x), pr[i + 1] * (dp[i + 1] - d.y));
      ds[i / 2 + 1] = PackPair<T>(pr[i + 2] * (dp[i + 2] - d.x), pr[i + 3] * (dp[i + 3] - d.y));
    }
    // dS buffers alternate: one barrier a step suffices, because a warpgroup
    // that passed the last one had finished reading the other buffer before.
    const uint32_t ds_buffer = (step & 1) * S::kDsBytes;
    StoreScores<S>(sm.ds + ds_buffer + warpgroup * (S::kRows * 128), ds);
    NamedSync(kConsumers, 256);

    float dq[S::kQueries / 2];
    if constexpr (S::kScoresAhead) {
      PinRegisters(probs);
      PinRegisters(dv);
    }
    PinRegisters(ds);
    PinRegisters(dk);
    WgmmaFence();
    if constexpr (S::kScoresAhead) {
      IssueOuter<S>(dv, probs, d_o_tile);
      WgmmaCommit();
    }
    IssueQueries<S>(dq, from.ds_half + ds_buffer / 16, from.k_half);
    WgmmaCommit();
    WgmmaWait<1>();  // dV
    PinRegisters(dv);
    PinRegisters(probs);
    if (is_read_again()) NamedArrive(kDoEmpty + at.stage, kBwdBarrierThreads);
    const int q_empty = kQEmpty + at.stage;
    IssueOuter<S>(dk, ds, from.q_tiles + at.stage * (S::kQBytes / 16));
    WgmmaCommit();
    at.Advance();
    if constexpr (S::kScoresAhead && !kLast) {
      issue_scores();
      WgmmaWait<2>();  // dQ
    } else {
      WgmmaWait<1>();  // dQ
    }
    PinRegisters(dq);
    StoreQueries<S>(sm.dq, sm.ds_sum, sm.dq_empty, step & 1, dq);
    NamedArrive(DqFull<S>(step), kBwdBarrierThreads);
    WgmmaWait<0>();  // dK, and S of the next step if it is ahead
    PinRegisters(dk);
    if constexpr (S::kScoresAhead) {
      PinRegisters(s);
    } else {
      PinRegisters(ds);
    }
    if (is_read_again()) NamedArrive(q_empty, kBwdBarrierThreads);
  };
  // What counts has code of its own, so that the other steps cost what they do without.
  const auto run = [&](auto is_last) {
    if constexpr (S::kCount) {
      // The step's number is there once its queries are, which no product has awaited if S is not ahead.
      if constexpr (!S::kScoresAhead) BarrierWait(sm.q_full + 8 * at.stage, at.parity);
      const int m = LoadShared(sm.steps + 8 * at.stage);
      if (p.stats.Count(tile->sequence.index, m * S::kRows)) return run_step(is_last, std::true_type{});
    }
    run_step(is_last, std::false_type{});
  };
  if constexpr (S::kScoresAhead) {
    for (; step + 1 < steps; ++step) run(std::false_type{});
    run(std::true_type{});
  } else {
#pragma unroll 1
    for (; step < steps; ++step) run(std::false_type{});
  }
}

// `tile`: RunSteps().
template <class S>
__device__ __forceinline__ void BwdConsume(const AttentionBwdParams& p, const BwdShared<S>& sm,
                                           const typename S::Tile& t, const typename S::Tile* tile, int warpgroup) {
  using T = typename S::T;
  BwdOperands from;
  from.k_rows = TileDescriptor(sm.k + warpgroup * 64 * 128, 0, 1024);
  from.v_rows = TileDescriptor(sm.v + warpgroup * 64 * 128, 0, 1024);
  // dQ: at head_dim 128 a warpgroup owns 64 channels, at 64 it owns 64 queries.
  const uint32_t k_half_address = sm.k + (S::kHalves == 2 ? warpgroup * S::kCols * 128 : 0);
  from.k_half = TileDescriptor(k_half_address, sm.ones - k_half_address, 1024);
  from.ds_half = TileDescriptor(sm.ds + (S::kHalves == 1 ? warpgroup * 64 * 128 : 0), 0, 1024);
  from.q_tiles = TileDescriptor(sm.q, S::kRows * 128, 1024);
  from.d_o_tiles = TileDescriptor(sm.d_o, S::kRows * 128, 1024);

  float dk[S::kChannels / 2], dv[S::kChannels / 2];
#pragma unroll
  for (int i = 0; i < S::kChannels / 2; ++i) dk[i] = dv[i] = 0.f;

  if (t.steps > 0) {
    BarrierWait(sm.kv_full, 0);
    if constexpr (S::kGeneral) ClearPadding<S>(sm, tile);
    PinRegisters(dk);
    PinRegisters(dv);
    if constexpr (S::kDeferred) {
      RunDeferredSteps<S>(p, sm, tile, from, warpgroup, t.steps, dv, dk);
    } else {
      RunSteps<S>(p, sm, t, tile, from, warpgroup, dv, dk);
    }
    PinRegisters(dk);
  }

  const typename S::Tile done = *tile;
  const Sequence& seq = done.sequence;
  const int thread = ThreadIndexAgain() - 128, lane = thread % 32;
  if (p.shares > 1) {
    __shared__ int arrived;
    const auto sync = [] { NamedSync(kConsumers, 256); };
    if (!AddShares<S>(p, done, 0, thread, &arrived, sync, dv, dk)) return;
  }
  const int key = done.key + thread / 32 * 16 + lane / 4;
  const auto place = [&](void* base, const Strides& stride, int at) -> uint16_t* {
    if (at >= seq.k_len) return nullptr;
    return static_cast<uint16_t*>(base) + seq.index * stride.batch + done.kv_head * stride.head +
           (seq.k_start + at) * stride.token;
  };
  uint32_t words[S::kChannels / 4];
#pragma unroll
  for (int i = 0; i < S::kChannels / 4; ++i) words[i] = PackPair<T>(dv[2 * i], dv[2 * i + 1]);
  StoreRows<S::kChannels>(words, place(p.dv, p.dv_stride, key), place(p.dv, p.dv_stride, key + 8), p.seq.v_dim, lane);
#pragma unroll
  for (int i = 0; i < S::kChannels / 4; ++i) {
    words[i] = PackPair<T>(dk[2 * i] * p.scale, dk[2 * i + 1] * p.scale);
  }
  StoreRows<S::kChannels>(words, place(p.dk, p.dk_stride, key), place(p.dk, p.dk_stride, key + 8), p.seq.head_dim,
                          lane);
  if constexpr (S::kRowSums) {
    if (p.center) BwdSumGradients<S>(p, done, key, words);
    if constexpr (S::kWorksAhead) NamedArrive(kDkStored, kBwdBarrierThreads);
  }
}

// Grid: kv_heads * key_tiles * p.shares, or a part of them.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    AttentionBwdKernel(const __grid_constant__ AttentionBwdParams p, const __grid_constant__ BwdMaps maps) {
  extern __shared__ char raw[];
  const BwdShared<S> sm(raw);
  __shared__ typename S::Tile tile;
  typename S::Tile t;
  if (!LocateBwdTile<S>(p, p.first_tile + blockIdx.x, &t)) return;
  if (threadIdx.x == 0) {
    if (S::kCenters) LetNextLaunchStart();
    tile = t;
    BarrierInit(sm.kv_full, 1);
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(sm.q_full + 8 * i, 1);
      BarrierInit(sm.d_o_full + 8 * i, 1);
    }
    BarrierInit(sm.dq_empty, 1);
    if constexpr (S::kDeferred) BarrierInit(sm.skew, 128);
    if constexpr (S::kWorksAhead) {
      for (int i = 0; i < kAheadWarps; ++i) BarrierInit(sm.ahead_full + 8 * i, 1);
    }
    if constexpr (S::kCenters) {
      for (int i = 0; i < kCenterBarriers; ++i) BarrierInit(sm.center_full + 8 * i, 1);
    }
    BarrierInitFence();
  }
  if constexpr (S::kRowSums) StoreOnes<S>(sm.ones);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    RegistersShrink<24>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      BwdProduce<S>(p, maps, sm, &tile);
    } else if (warp == 1 || (S::kGeneral && p.turns != nullptr && warp == 3)) {
      BwdReduce<S>(p, sm, &tile, warp / 2);
    } else if (S::kWorksAhead && p.ahead > 0) {
      if constexpr (S::kWorksAhead) {
        __shared__ AheadPart parts[kAheadWarps];
        BwdWorkAhead<S>(p, maps, sm, &tile, parts + warp - 2, warp - 2);
      }
    } else if (S::kRowSums && warp == 2 && p.center && tile.share == 0) {
      BwdSumKeys<S>(p, sm.k, sm.kv_full, &tile);
    } else if (S::kCenters && warp == 3 && p.first_tile > 0) {
      if constexpr (S::kCenters) {
        __shared__ CenterPart part;
        BwdCenterPartBefore<S>(p, &maps.d_k, sm.center, sm.center_full, &tile, &part);
      }
    }
  } else {
    RegistersGrow<240>();
    BwdConsume<S>(p, sm, t, &tile, warpgroup - 1);
  }
}

// May start while the launch before is still running.
template <class Kernel>
void LaunchPart(Kernel kernel, int blocks, int threads, int shared_bytes, bool early, cudaStream_t stream,
                const AttentionBwdParams& p, const BwdMaps& maps) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = early ? 1 : 0;
  (void)cudaLaunchKernelEx(&config, kernel, p, maps);  // cudaGetLastError() has the error.
}

template <class S>
Status LaunchAttentionBwd(const AttentionBwdParams& p, const BwdMaps& maps, cudaStream_t stream) {
  // Of plain kernels, grouped queries have one of their own: with the code of warps that work ahead it is 1 to 2 %
  // slower.  Centred calls whose rows are not prepared ahead take means of dK by launches.
  using Ahead = BwdShape<typename S::T, S::kHeadDim, S::kGeneral, S::kRounded, S::kRowSums, S::kCount, S::kMayWorkAhead,
                         S::kChannels>;
  const bool ahead = S::kPlain ? p.seq.group == 1 : p.ahead > 0;
  const auto kernel = ahead ? AttentionBwdKernel<Ahead> : AttentionBwdKernel<S>;
  const int shared_bytes = ahead ? Ahead::kSharedBytes : S::kSharedBytes;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  // Of the shape the other kernels read only what all shapes of a head dim share.
  using Rows = BwdShape<typename S::T, S::kHeadDim, false, false, false, false>;
  LaunchBwdAround<Rows, typename Rows::Keys>(p, stream, [&] {
    const int tiles = p.seq.kv_heads * p.key_tiles * p.shares;
    const int at_once =
        S::kCenters && !ahead && p.launch_pairs > 0 ? p.launch_pairs * (p.key_tiles / p.seq.batch) : tiles;
    AttentionBwdParams part = p;
    for (part.first_tile = 0; part.first_tile < tiles; part.first_tile += at_once) {
      LaunchPart(kernel, std::min(at_once, tiles - part.first_tile), S::kThreads, shared_bytes,
                 part.first_tile > 0 || p.overlaps, stream, part, maps);
    }
  });
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

// For attention_bwd_shapes.cuh.  kChannels: BwdShape's.
template <class T, int kHeadDim, int kChannels = kHeadDim>
struct BwdKernels {
  template <bool kGeneral, bool kRounded, bool kRowSums>
  static constexpr bool kExact = !kGeneral && !kRowSums && !(kRounded && kHeadDim == 64);

  template <bool kGeneral, bool kRounded, bool kRowSums, bool kCount>
  static BwdLauncher Make() {
    using S = BwdShape<T, kHeadDim, kGeneral, kRounded, kRowSums, kCount, false, kChannels>;
    return {S::kRows,
            S::kCols,
            S::kCols,
            S::kTurnSteps,
            S::kCount,
            S::kCenters ? kCenterUnitRows<S> : 0,
            LaunchAttentionBwd<S>,
            S::kMayWorkAhead ? kAheadRows<S> : 0};
  }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CUH_
