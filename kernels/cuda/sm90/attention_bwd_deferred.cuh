// attention_bwd_deferred.cuh: the steps of attention_bwd.cuh's consumers in an order of their own, of plain shapes.
//
// dQ of a step is issued behind S of the next one and runs under its exponentials.  Then dP and dV are issued, dS is
// made under dV, and dK follows.  A warpgroup says that its dS is there and waits for the other's only where it needs
// it, which is a step later.  So the two may be up to a step apart, and the second one begins once the first has its
// first S: the exponentials of one run under the products of the other.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_DEFERRED_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_DEFERRED_CUH_

#include "cuda/attention_masks.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_layout.cuh"
#include "cuda/sm90/attention_bwd_parts.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// All steps of a tile that has some; K and V are there.  `tile` is in shared memory.
template <class S>
__device__ __forceinline__ void RunDeferredSteps(const AttentionBwdParams& p, const BwdShared<S>& sm,
                                                 const typename S::Tile* tile, const BwdOperands& from, int warpgroup,
                                                 int steps, float (&dv)[S::kChannels / 2],
                                                 float (&dk)[S::kChannels / 2]) {
  using T = typename S::T;
  constexpr int kScores = S::kRows / 2, kPairs = S::kRows / 4, kBoth = 256;
  const int first_column = threadIdx.x % 4 * 2;
  RingPosition<S::kStages> at;
  const auto issue_queries = [&](int buffer, float(&dq)[S::kQueries / 2]) {
    NamedSync(kDsFull + 2 - warpgroup * 2 + buffer, kBoth);
    WgmmaFence();
    IssueQueries<S>(dq, from.ds_half + buffer * (S::kDsBytes / 16), from.k_half);
    WgmmaCommit();
  };
  const auto hand_on = [&](int parity, float(&dq)[S::kQueries / 2]) {
    PinRegisters(dq);
    StoreQueries<S>(sm.dq, sm.ds_sum, sm.dq_empty, parity, dq);
    NamedArrive(kDqFull, kBwdBarrierThreads);
  };
  int step = 0;
  const auto run_step = [&](auto is_first) {
    constexpr bool kFirst = decltype(is_first)::value;
    float s[kScores], dp[kScores], pr[kScores], dq[S::kQueries / 2];
    const uint32_t lse = sm.lse + at.stage * S::kRowBytes + first_column * 4;
    const uint32_t delta = sm.delta + at.stage * S::kRowBytes + first_column * 4;
    const uint64_t q_tile = from.q_tiles + at.stage * (S::kQBytes / 16);
    const uint64_t d_o_tile = from.d_o_tiles + at.stage * (S::kQBytes / 16);
    BarrierWait(sm.q_full + 8 * at.stage, at.parity);
    WgmmaFence();
    IssueInner<S>(s, from.k_rows, q_tile);
    WgmmaCommit();
    const int before = ~step & 1;  // the buffer and parity of the step before
    if constexpr (!kFirst) issue_queries(before, dq);
    const int m = LoadShared(sm.steps + 8 * at.stage);
    float2 lses[kScores / 4];
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) lses[i] = LoadShared2(lse + i * 32);
    WgmmaWait<kFirst ? 0 : 1>();
    PinRegisters(s);
    if (kFirst && ThreadIndexAgain() < 256) BarrierArrive(sm.skew);
    const typename S::Tile of = *tile;
    if (NeedsMask<S::kGeneral>(p.seq, of.sequence, of.key, S::kCols, m * S::kRows, S::kRows)) {
      const int thread = ThreadIndexAgain() - 128;
      MaskTransposed<S::kGeneral>(s, p.seq, of.sequence, of.key + thread / 32 * 16 + thread % 32 / 4,
                                  m * S::kRows + thread % 4 * 2);
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 l = lses[i / 4];
      pr[i] = Exp2(fmaf(s[i], p.score.scale_log2, -l.x));
      pr[i + 1] = Exp2(fmaf(s[i + 1], p.score.scale_log2, -l.y));
      pr[i + 2] = Exp2(fmaf(s[i + 2], p.score.scale_log2, -l.x));
      pr[i + 3] = Exp2(fmaf(s[i + 3], p.score.scale_log2, -l.y));
    }
    if constexpr (!kFirst) {
      AwaitValues(pr, sm.spare);
      WgmmaWait<0>();
      hand_on(before, dq);
    }
    BarrierWait(sm.d_o_full + 8 * at.stage, at.parity);
    WgmmaFence();
    IssueInner<S>(dp, from.v_rows, d_o_tile);
    WgmmaCommit();
    uint32_t probs[kPairs], ds[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) probs[i] = PackPair<T>(pr[2 * i], pr[2 * i + 1]);
    PinRegisters(probs);
    PinRegisters(dv);
    WgmmaFence();
    IssueOuter<S>(dv, probs, d_o_tile);
    WgmmaCommit();
    WgmmaWait<1>();  // dP
    PinRegisters(dp);
    const bool is_read_again = step + S::kStages < steps;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 d = LoadShared2(delta + i * 8);
      ds[i / 2] = PackPair<T>(pr[i] * (dp[i] - d.x), pr[i + 1] * (dp[i + 1] - d.y));
      ds[i / 2 + 1] = PackPair<T>(pr[i + 2] * (dp[i + 2] - d.x), pr[i + 3] * (dp[i + 3] - d.y));
    }
    // The other warpgroup has read this buffer: it finished dQ of two steps before ahead of dS of the step before,
    // which this one has awaited.
    StoreScores<S>(sm.ds + (step & 1) * S::kDsBytes + warpgroup * (S::kRows * 128), ds);
    NamedArrive(kDsFull + warpgroup * 2 + (step & 1), kBoth);
    PinRegisters(ds);
    PinRegisters(dk);
    WgmmaFence();
    IssueOuter<S>(dk, ds, q_tile);
    WgmmaCommit();
    WgmmaWait<1>();  // dV
    PinRegisters(dv);
    PinRegisters(probs);
    if (is_read_again) NamedArrive(kDoEmpty + at.stage, kBwdBarrierThreads);
    WgmmaWait<0>();  // dK
    PinRegisters(dk);
    PinRegisters(ds);
    if (is_read_again) NamedArrive(kQEmpty + at.stage, kBwdBarrierThreads);
    at.Advance();
  };
  if (ThreadIndexAgain() >= 256) BarrierWait(sm.skew, 0);
  run_step(std::true_type{});
#pragma unroll 1
  for (step = 1; step < steps; ++step) run_step(std::false_type{});
  float dq[S::kQueries / 2];
  const int last = ~steps & 1;
  issue_queries(last, dq);
  WgmmaWait<0>();
  hand_on(last, dq);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_DEFERRED_CUH_
