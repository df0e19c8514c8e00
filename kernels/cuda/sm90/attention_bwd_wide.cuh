// Stabilized attention, backward of head dims up to 192 with values of up to 128, Hopper; see
// bellwether/kernels/attention.h and attention_bwd.cuh, whose other kernels it shares.
//
// Work      one CTA per tile of 128 keys, of which each of two warpgroups has 64, and 64 queries a step, as
//           attention_bwd.cuh.  dV of 64 x 128 and dK of 64 x 192 leave registers for S and half of a dP.  S is issued
//           with dP of the first 32 queries, and dP of the others when dS of the first is made.  A warpgroup has
//           96 of the 192 channels of dQ = dS K, half of them at a time; they are added to global memory from the
//           registers, under dK.  Warpgroup 0 loads.
// Memory    Q, dO once per tile of keys, from L2; dQ sums: 4 bytes an element added per tile of keys.
//           A row of Q or K is four boxes 48 channels apart, so that no product's columns lie in parts of two: a
//           box's last 16 channels are the next one's first.  A step reads and writes some 450 KB of shared memory,
//           3,500 cycles beside 3,328 of products.
// Numerics  as attention_bwd.cuh.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_WIDE_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_WIDE_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "bellwether/kernels/status.h"
#include "cuda/accumulator_sums.cuh"
#include "cuda/attention_bwd_errors.cuh"
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_bwd_scores.cuh"
#include "cuda/attention_bwd_shares.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_bwd_turns.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/attention_bwd_parts.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/query_steps.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm90 {

// The booleans are BwdShape's.
template <class T_, bool kGeneral_, bool kRounded_, bool kRowSums_, bool kCount_>
struct BwdWideShape {
  using T = T_;
  using Keys = BwdWideShape;
  static constexpr int kHeadDim = 192, kValueDim = 128;
  static constexpr bool kGeneral = kGeneral_, kRounded = kRounded_, kRowSums = kRowSums_, kCount = kCount_;
  static constexpr int kCols = 128;                  // keys a CTA
  static constexpr int kRows = 64;                   // queries a step
  static constexpr int kHalfRows = kRows / 2;        // of which dP is computed at a time
  static constexpr int kBoxes = 4, kValueBoxes = 2;  // of a row
  static constexpr int kBoxChannels = kHeadDim / kBoxes;
  static constexpr int kStages = 2;
  static constexpr int kGradientStages = kRowSums ? 1 : 2;  // of dO; there is no room for a second beside the ones
  static constexpr int kQuerySteps = 4;                     // that are known: those loaded, and the one before
  static constexpr int kThreads = 384;
  static constexpr int kTurnSteps = 100;  // see BwdLauncher
  static constexpr int kKBytes = kBoxes * kCols * 128, kVBytes = kValueBoxes * kCols * 128;
  static constexpr int kQBytes = kBoxes * kRows * 128, kGradientBytes = kValueBoxes * kRows * 128;
  static constexpr int kRowBytes = kRows * 4;  // of L, delta or 1 / lt
  static constexpr int kDsBytes = kCols * kRows * 2;
  static constexpr int kOnesBytes = kRowSums ? kCols * 128 : 0;
  // Accumulators of half a warpgroup's dQ; rowsum(dS) stands behind all 64 channels of a box.
  static constexpr int kHalfQueries = kBoxChannels / 2, kLastQueries = kRowSums ? 36 : kHalfQueries;
  // What a consumer thread has of a step's dQ: see attention_bwd_rows.cuh.
  static constexpr int kQueryThreads = 256, kQueryTiles = 1, kQueryColumns = 2 * kBoxChannels;
  static constexpr int kOutputs = kHeadDim, kSplits = 1;
  static constexpr bool kSumsKeys = false, kShares = true, kMasked = false;
  static __device__ int QueryRow(int thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }
  static __device__ int QueryColumn(int thread) { return thread / 128 * kQueryColumns; }
  static_assert(kQueryThreads / 32 <= kTurnsOfStep);
  static constexpr int kSharedBytes = kKBytes + kVBytes + kStages * kQBytes + kGradientStages * kGradientBytes +
                                      2 * kDsBytes + kOnesBytes + (2 * kStages + kGradientStages) * kRowBytes + 1024 +
                                      128;
  static_assert(kSharedBytes <= 227 * 1024 - 64);  // beside them the tile
};

template <class S>
struct BwdWideShared {
  uint32_t k, v, q, d_o, ds, ones, lse, delta, inverse;  // tiles first, aligned to 1024 bytes
  uint32_t kv_full, q_full, q_empty, d_o_full, d_o_empty;
  uint32_t steps;  // [step % kQuerySteps] the QueryStep
  uint32_t spare;  // see AwaitValues()

  __device__ explicit BwdWideShared(char* raw) {
    k = (SharedAddress(raw) + 1023u) & ~1023u;
    v = k + S::kKBytes;
    q = v + S::kVBytes;
    d_o = q + S::kStages * S::kQBytes;
    ds = d_o + S::kGradientStages * S::kGradientBytes;
    ones = ds + 2 * S::kDsBytes;
    lse = ones + S::kOnesBytes;
    inverse = lse + S::kStages * S::kRowBytes;
    delta = inverse + S::kStages * S::kRowBytes;
    kv_full = delta + S::kGradientStages * S::kRowBytes;
    q_full = kv_full + 8;
    q_empty = q_full + 8 * S::kStages;
    d_o_full = q_empty + 8 * S::kStages;
    d_o_empty = d_o_full + 8 * S::kGradientStages;
    steps = d_o_empty + 8 * S::kGradientStages;
    spare = steps + 8 * S::kQuerySteps;
  }
};

// K and V once, then Q, dO and what belongs to their rows step by step.  By one thread.
template <class S>
__device__ __forceinline__ void BwdWideProduce(const AttentionBwdParams& p, const BwdMaps& maps,
                                               const BwdWideShared<S>& sm, const BwdTile* tile) {
  const auto load_boxes = [&](uint32_t dst, const CUtensorMap* map, uint32_t full, int rows, const TileOrigin& at,
                              int token) {
#pragma unroll
    for (int i = 0; i < S::kBoxes; ++i) {
      TmaLoad5(dst + i * rows * 128, map, full, i * S::kBoxChannels, at.x + token, at.y, at.z, at.head);
    }
  };
  {
    const BwdTile t = *tile;
    if (t.steps == 0) return;  // Nothing would wait for K and V.
    const Sequence& seq = t.sequence;
    const TileOrigin kv = OriginOf(p.seq, seq.index, seq.k_start, seq.k_len, t.kv_head);
    BarrierArriveExpect(sm.kv_full, S::kKBytes + S::kVBytes);
    load_boxes(sm.k, &maps.k, sm.kv_full, S::kCols, kv, t.key);
    LoadTile<S::kValueBoxes>(sm.v, &maps.v, sm.kv_full, S::kCols, kv, t.key);
  }
  // Little is kept across the loop, and it is not unrolled: 24 registers are few.
  QueryStep query = FirstQueryStep(p, *tile);
  RingPosition<S::kStages> at;
  RingPosition<S::kGradientStages> from;
#pragma unroll 1
  for (int step = 0; step < tile->steps; ++step, Advance(p, *tile, &query)) {
    const Sequence seq = tile->sequence;
    const TileOrigin q = OriginOf(p.seq, seq.index, seq.q_start, seq.q_len, tile->kv_head * p.seq.group + query.member);
    const int row = query.tile * S::kRows;
    const uint32_t q_full = sm.q_full + 8 * at.stage, d_o_full = sm.d_o_full + 8 * from.stage;
    const auto load_row = [&](uint32_t dst, const float* src, uint32_t full) {
      BulkLoad(dst, src + RowBase(p, seq, q.head) + row, full, S::kRowBytes);
    };
    BarrierWait(sm.q_empty + 8 * at.stage, at.parity ^ 1);
    StoreShared(sm.steps + 8 * (step % S::kQuerySteps), query.tile);
    StoreShared(sm.steps + 8 * (step % S::kQuerySteps) + 4, query.member);
    BarrierArriveExpect(q_full, S::kQBytes + (S::kRounded ? 2 : 1) * S::kRowBytes);
    load_boxes(sm.q + at.stage * S::kQBytes, &maps.q, q_full, S::kRows, q, row);
    load_row(sm.lse + at.stage * S::kRowBytes, p.lse_log2, q_full);
    if constexpr (S::kRounded) load_row(sm.inverse + at.stage * S::kRowBytes, p.inverse, q_full);
    BarrierWait(sm.d_o_empty + 8 * from.stage, from.parity ^ 1);
    BarrierArriveExpect(d_o_full, S::kGradientBytes + S::kRowBytes);
    LoadTile<S::kValueBoxes>(sm.d_o + from.stage * S::kGradientBytes, &maps.d_o, d_o_full, S::kRows, q, row);
    load_row(sm.delta + from.stage * S::kRowBytes, p.delta, d_o_full);
    at.Advance();
    from.Advance();
  }
}

// The part of an array from kFrom on.
template <int kCount, int kSize>
__device__ __forceinline__ float (&PartOf(float (&x)[kSize], int from))[kCount] {
  return reinterpret_cast<float(&)[kCount]>(x[from]);
}

// D[64 keys, 64 queries] = K[64 keys, 192] Q[64 queries, 192]^T.
template <class S>
__device__ __forceinline__ void IssueWideScores(float (&d)[S::kRows / 2], uint64_t k, uint64_t q) {
  constexpr int kParts = S::kBoxChannels / 16;
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 16; ++i) {
    Wgmma<typename S::T, S::kRows, false, false>::Ss(d, k + (i / kParts) * (S::kCols * 8) + (i % kParts) * 2,
                                                     q + (i / kParts) * (S::kRows * 8) + (i % kParts) * 2, i > 0);
  }
}

// D[64 keys, 32 queries] = V[64 keys, 128] dO[32 queries, 128]^T, of a half of the queries.
template <class S>
__device__ __forceinline__ void IssueWideGradients(float (&d)[S::kHalfRows / 2], uint64_t v, uint64_t d_o, int half) {
#pragma unroll
  for (int i = 0; i < S::kValueDim / 16; ++i) {
    Wgmma<typename S::T, S::kHalfRows, false, false>::Ss(
        d, v + (i / 4) * (S::kCols * 8) + (i % 4) * 2,
        d_o + half * (S::kHalfRows * 8) + (i / 4) * (S::kRows * 8) + (i % 4) * 2, i > 0);
  }
}

// dV[64 keys, 128] += P^T[64 keys, 32 queries] dO[32 queries, 128], of a half of the queries.
template <class S>
__device__ __forceinline__ void IssueWideValues(float (&d)[S::kValueDim / 2], const uint32_t (&a)[S::kHalfRows / 4],
                                                uint64_t d_o, int half) {
#pragma unroll
  for (int i = 0; i < S::kHalfRows / 16; ++i) {
    Wgmma<typename S::T, S::kValueDim, false, true>::Rs(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                                                        d_o + half * (S::kHalfRows * 8) + i * 128, 1);
  }
}

// dK[64 keys, 192] += dS^T[64 keys, 64 queries] Q[64 queries, 192].
template <class S>
__device__ __forceinline__ void IssueWideKeys(float (&d)[S::kHeadDim / 2], const uint32_t (&a)[S::kRows / 4],
                                              uint64_t q) {
  constexpr int kBox = S::kBoxChannels / 2;
#pragma unroll
  for (int i = 0; i < S::kRows / 16; ++i) {
#pragma unroll
    for (int box = 0; box < S::kBoxes; ++box) {
      Wgmma<typename S::T, S::kBoxChannels, false, true>::Rs(PartOf<kBox>(d, box * kBox), a[4 * i], a[4 * i + 1],
                                                             a[4 * i + 2], a[4 * i + 3],
                                                             q + box * (S::kRows * 8) + i * 128, 1);
    }
  }
}

// dQ[64 queries, a box's channels] = dS[64 queries, 128 keys] K[128 keys, as dQ]; dS lies as two tiles of 64 keys.
template <class S, int kCount>
__device__ __forceinline__ void IssueWideQueries(float (&d)[kCount], uint64_t ds, uint64_t k) {
#pragma unroll
  for (int i = 0; i < S::kCols / 16; ++i) {
    Wgmma<typename S::T, 2 * kCount, false, true>::Ss(d, ds + (i / 4) * (S::kRows * 8) + (i % 4) * 2, k + i * 128,
                                                      i > 0);
  }
}

// `tile` is in shared memory, for what would otherwise stay in registers.
template <class S>
__device__ __forceinline__ void BwdWideConsume(const AttentionBwdParams& p, const BwdWideShared<S>& sm,
                                               const BwdTile* tile, int warpgroup) {
  using T = typename S::T;
  constexpr int kScores = S::kRows / 2, kHalf = kScores / 2, kBox = S::kBoxChannels / 2;
  // Descriptors and addresses are made anew where they are used: kept, they take registers that are short.
  const auto rows_of = [&](uint32_t tile) { return TileDescriptor(tile + warpgroup * 64 * 128, 0, 1024); };
  const auto box_of = [&](int box) {
    const uint32_t address = sm.k + (warpgroup * 2 + box) * S::kCols * 128;
    return TileDescriptor(address, S::kRowSums && box == 1 ? sm.ones - address : 0, 1024);
  };

  float dk[S::kHeadDim / 2], dv[S::kValueDim / 2];
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 2; ++i) dk[i] = 0.f;
#pragma unroll
  for (int i = 0; i < S::kValueDim / 2; ++i) dv[i] = 0.f;

  if (tile->steps > 0) {
    BarrierWait(sm.kv_full, 0);
    PinRegisters(dk);
    PinRegisters(dv);
    uint32_t step = 0;
    const auto stage = [&] { return step % S::kStages; };
    const auto d_o_stage = [&] { return step % S::kGradientStages; };
    const auto q_tile = [&] { return TileDescriptor(sm.q + stage() * S::kQBytes, 0, 1024); };
    const auto d_o_tile = [&] {
      return TileDescriptor(sm.d_o + d_o_stage() * S::kGradientBytes, S::kRows * 128, 1024);
    };
    const auto ds_tile = [&] { return sm.ds + (step & 1) * S::kDsBytes; };
    const auto await_queries = [&] { BarrierWait(sm.q_full + 8 * stage(), step / S::kStages & 1); };
    const auto query_of = [&](uint32_t step) {
      const uint32_t from = sm.steps + 8 * (step % S::kQuerySteps);
      return QueryStep{LoadShared(from + 4), LoadShared(from)};
    };
    const auto query = [&] { return query_of(step); };
    const auto pass_turn = [&](uint32_t of) {
      const QueryStep at = query_of(of);
      const int thread = ThreadIndexAgain() - 128;
      PassTurn<S>(p, *tile, at.tile, tile->kv_head * p.seq.group + at.member, thread / 32, thread % 32);
    };
    // Of this thread's first query.
    const auto first = [] { return static_cast<uint32_t>(ThreadIndexAgain() % 4 * 8); };
    const auto lse = [&] { return sm.lse + stage() * S::kRowBytes + first(); };
    const auto inverse = [&] { return sm.inverse + stage() * S::kRowBytes + first(); };
    const auto delta = [&] { return sm.delta + d_o_stage() * S::kRowBytes + first(); };
    const auto run_step = [&] {
      float s[kScores], dp[kHalf];
      uint32_t words[S::kRows / 4];
      await_queries();
      WgmmaFence();
      IssueWideScores<S>(s, rows_of(sm.k), q_tile());
      WgmmaCommit();
      BarrierWait(sm.d_o_full + 8 * d_o_stage(), step / S::kGradientStages & 1);
      WgmmaFence();
      IssueWideGradients<S>(dp, rows_of(sm.v), d_o_tile(), 0);
      WgmmaCommit();
      WgmmaWait<1>();  // S; dP of the first half runs under the exponentials
      PinRegisters(s);
      if constexpr (S::kGeneral) {
        if (p.score.cap_scale != 0.f) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) s[i] = Tanh(s[i] * p.score.cap_scale);
        }
      }
      {
        const BwdTile of = *tile;
        const int row = query().tile * S::kRows;
        if (NeedsMask<S::kGeneral>(p.seq, of.sequence, of.key, S::kCols, row, S::kRows)) {
          const int thread = ThreadIndexAgain() - 128;
          MaskTransposed<S::kGeneral>(s, p.seq, of.sequence, of.key + thread / 32 * 16 + thread % 32 / 4,
                                      row + thread % 4 * 2);
        }
      }
      ToProbabilities<T, S::kRounded>(s, s, p.score.scale_log2, lse(), inverse());
      AwaitValues(s, sm.spare);
      // P and dS of a half as operands.
      const auto to_operands = [&](int half, float(&dp)[kHalf], uint32_t(&probs)[kHalf / 2]) {
        float(&pr)[kHalf] = PartOf<kHalf>(s, half * kHalf);
        const uint32_t skipped = half * S::kHalfRows * 4;
        if constexpr (S::kCount) {
          const BwdTile of = *tile;
          const QueryStep at = query();
          if (p.stats.Count(of.sequence.index, at.tile * S::kRows)) {
            AddErrors<1, kHalf>(p.errors + RowBase(p, of.sequence, of.kv_head * p.seq.group + at.member) +
                                    at.tile * S::kRows + half * S::kHalfRows,
                                delta() + skipped, ThreadIndexAgain() % 32,
                                [&](int i, float d) { return pr[i] * (dp[i] - d); });
          }
        }
        if constexpr (S::kGeneral) {
          if (p.score.cap_scale != 0.f) {
            ApplyCapDerivative<S::kRounded>(dp, pr, p.score.scale_log2, lse() + skipped, delta() + skipped,
                                            inverse() + skipped);
          }
        }
        const uint32_t at_delta = delta() + skipped;
        uint32_t* const ds = words + half * (kHalf / 2);
#pragma unroll
        for (int i = 0; i < kHalf; i += 4) {
          const float2 d = LoadShared2(at_delta + i * 8);
          probs[i / 2] = PackPair<T>(pr[i], pr[i + 1]);
          probs[i / 2 + 1] = PackPair<T>(pr[i + 2], pr[i + 3]);
          ds[i / 2] = PackPair<T>(pr[i] * (dp[i] - d.x), pr[i + 1] * (dp[i + 1] - d.y));
          ds[i / 2 + 1] = PackPair<T>(pr[i + 2] * (dp[i + 2] - d.x), pr[i + 3] * (dp[i + 3] - d.y));
        }
      };
      WgmmaWait<0>();
      PinRegisters(dp);
      uint32_t probs[kHalf / 2], other_probs[kHalf / 2];
      to_operands(0, dp, probs);
      PinRegisters(probs);
      PinRegisters(dv);
      WgmmaFence();
      IssueWideValues<S>(dv, probs, d_o_tile(), 0);
      IssueWideGradients<S>(dp, rows_of(sm.v), d_o_tile(), 1);
      WgmmaCommit();
      WgmmaWait<0>();
      PinRegisters(dv);
      PinRegisters(probs);
      PinRegisters(dp);
      PinRegisters(PartOf<kHalf>(s, kHalf));
      to_operands(1, dp, other_probs);
      // dS buffers alternate: one barrier a step suffices, as in attention_bwd.cuh.
      StoreScores<S>(ds_tile() + warpgroup * (S::kRows * 128), words);
      NamedSync(1, 256);

      float dq[S::kLastQueries];
      WgmmaFence();
      IssueWideQueries<S>(PartOf<kBox>(dq, 0), TileDescriptor(ds_tile(), 0, 1024), box_of(0));
      WgmmaCommit();
      PinRegisters(dv);
      PinRegisters(other_probs);
      PinRegisters(words);
      PinRegisters(dk);
      WgmmaFence();
      IssueWideValues<S>(dv, other_probs, d_o_tile(), 1);
      IssueWideKeys<S>(dk, words, q_tile());
      WgmmaCommit();
      WgmmaWait<1>();  // the first half of dQ
      PinRegisters(PartOf<kBox>(dq, 0));
      const auto row = [&] {
        const QueryStep here = query();
        return RowBase(p, tile->sequence, tile->kv_head * p.seq.group + here.member) + here.tile * S::kRows;
      };
      if constexpr (S::kGeneral) {
        if (p.turns != nullptr) {
          if (step > 0) pass_turn(step - 1);  // a step behind the additions, so that the fence finds them done
          const int thread = ThreadIndexAgain() - 128;
          const QueryStep here = query();
          AwaitTurn<S>(p, *tile, here.tile, tile->kv_head * p.seq.group + here.member, thread / 32, thread % 32);
        }
      }
      AddToSums<kBox, S::kQueryThreads>(p.dq_sum + row() * S::kHeadDim, ThreadIndexAgain() - 128, PartOf<kBox>(dq, 0));
      const auto await_keys = [&] {
        WgmmaWait<S::kRowSums ? 0 : 1>();  // dV, dK
        PinRegisters(dv);
        PinRegisters(dk);
        PinRegisters(other_probs);
        PinRegisters(words);
      };
      if constexpr (S::kRowSums) await_keys();  // With the sums registers do not suffice for both.
      WgmmaFence();
      IssueWideQueries<S>(dq, TileDescriptor(ds_tile(), 0, 1024), box_of(1));
      WgmmaCommit();
      if constexpr (!S::kRowSums) await_keys();
      BarrierArrive(sm.d_o_empty + 8 * d_o_stage());
      BarrierArrive(sm.q_empty + 8 * stage());
      WgmmaWait<0>();
      PinRegisters(dq);
      const int thread = ThreadIndexAgain() - 128;
      AddToSums<kBox, S::kQueryThreads>(p.dq_sum + row() * S::kHeadDim + kBox * S::kQueryThreads, thread, dq);
      if constexpr (S::kRowSums) {  // Both warpgroups have the same queries.
        if (thread < 128 && thread % 4 == 0) {
          ReduceAdd(p.ds_sum + row() + S::QueryRow(thread), dq[32]);
          ReduceAdd(p.ds_sum + row() + S::QueryRow(thread) + 8, dq[34]);
        }
      }
    };
#pragma unroll 1
    for (; step < static_cast<uint32_t>(tile->steps); ++step) run_step();
    if constexpr (S::kGeneral) {
      if (p.turns != nullptr) pass_turn(step - 1);
    }
    PinRegisters(dv);
    PinRegisters(dk);
  }

  if (p.shares > 1) {
    __shared__ int arrived;
    const auto sync = [] { NamedSync(1, 256); };
    if (!AddShares<S>(p, *tile, 0, ThreadIndexAgain() - 128, &arrived, sync, dv, dk)) return;
  }
  const BwdTile done = *tile;  // not kept above it: registers are short there
  const Sequence& seq = done.sequence;
  const int thread = ThreadIndexAgain() - 128, lane = thread % 32;
  const int key = done.key + thread / 32 * 16 + lane / 4;
  const auto place = [&](void* base, const Strides& stride, int at) -> uint16_t* {
    if (at >= seq.k_len) return nullptr;
    return static_cast<uint16_t*>(base) + seq.index * stride.batch + done.kv_head * stride.head +
           (seq.k_start + at) * stride.token;
  };
  uint32_t v_words[S::kValueDim / 4], k_words[S::kHeadDim / 4];
#pragma unroll
  for (int i = 0; i < S::kValueDim / 4; ++i) v_words[i] = PackPair<T>(dv[2 * i], dv[2 * i + 1]);
  StoreRows<S::kValueDim>(v_words, place(p.dv, p.dv_stride, key), place(p.dv, p.dv_stride, key + 8), p.seq.v_dim, lane);
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 4; ++i) k_words[i] = PackPair<T>(dk[2 * i] * p.scale, dk[2 * i + 1] * p.scale);
  StoreRows<S::kHeadDim>(k_words, place(p.dk, p.dk_stride, key), place(p.dk, p.dk_stride, key + 8), p.seq.head_dim,
                         lane);
}

// Grid: kv_heads * key_tiles * p.shares.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    AttentionBwdWideKernel(const __grid_constant__ AttentionBwdParams p, const __grid_constant__ BwdMaps maps) {
  extern __shared__ char raw[];
  const BwdWideShared<S> sm(raw);
  __shared__ BwdTile tile;
  {
    BwdTile t;
    if (!LocateBwdTile<S>(p, blockIdx.x, &t)) return;
    if (threadIdx.x == 0) {
      tile = t;
      BarrierInit(sm.kv_full, 1);
      // Every consumer thread reads L and delta, and every one arrives.
      for (int i = 0; i < S::kStages; ++i) {
        BarrierInit(sm.q_full + 8 * i, 1);
        BarrierInit(sm.q_empty + 8 * i, 256);
      }
      for (int i = 0; i < S::kGradientStages; ++i) {
        BarrierInit(sm.d_o_full + 8 * i, 1);
        BarrierInit(sm.d_o_empty + 8 * i, 256);
      }
      BarrierInitFence();
    }
  }
  if constexpr (S::kRowSums) StoreOnes<S>(sm.ones);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    RegistersShrink<24>();
    if (threadIdx.x == 0) BwdWideProduce<S>(p, maps, sm, &tile);
  } else {
    RegistersGrow<240>();
    BwdWideConsume<S>(p, sm, &tile, warpgroup - 1);
  }
}

template <class S>
Status LaunchAttentionBwdWide(const AttentionBwdParams& p, const BwdMaps& maps, cudaStream_t stream) {
  const auto kernel = AttentionBwdWideKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  // Of the shape the other kernels read only what all shapes share.
  using Rows = BwdWideShape<typename S::T, false, false, false, false>;
  LaunchBwdAround<Rows, typename Rows::Keys>(p, stream, [&] {
    kernel<<<p.seq.kv_heads * p.key_tiles * p.shares, S::kThreads, S::kSharedBytes, stream>>>(p, maps);
  });
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

// For attention_bwd_shapes.cuh.
template <class T>
struct BwdWideKernels {
  template <bool kGeneral, bool kRounded, bool kRowSums>
  static constexpr bool kExact = !kGeneral;

  template <bool kGeneral, bool kRounded, bool kRowSums, bool kCount>
  static BwdLauncher Make() {
    if constexpr (kGeneral && kRowSums) {
      return {};  // registers do not suffice: attention_bwd_launch.cc takes another kernel
    } else {
      // What counts where nothing is to be counted costs nothing; without it ptxas spills.
      using S = BwdWideShape<T, kGeneral, kRounded, kRowSums, kCount || kRowSums>;
      return {S::kRows, S::kCols, S::kCols, S::kTurnSteps, kCount, 0, LaunchAttentionBwdWide<S>};
    }
  }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_WIDE_CUH_
