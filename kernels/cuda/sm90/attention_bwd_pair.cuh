// Stabilized attention, backward of head dims up to 256, Hopper; see
// bellwether/kernels/attention.h and attention_bwd.cuh, whose other kernels it shares.
//
// Work      two CTAs, a cluster, per tile of 128 keys: each has 64 of them for S, dP, dK and dV, and 128 of the 256
//           channels of dQ.  Each of a CTA's two warpgroups has 32 of a step's 64 queries for the
//           scores, S^T = K Q^T and dP^T = V dO^T.  It has 128 of the channels for dV += P^T dO and dK += dS^T Q, and
//           64 for dQ = dS K.  So P^T
//           and dS^T go through shared memory to both, dS^T to the other CTA's too, and dK and dV of 64 x 256 fit the
//           registers.  dP^T runs under the exponentials, dV under dS^T; behind dK are dQ of the step before and S^T
//           of the next; dQ is added to global memory from the registers meanwhile.  Warpgroup 0 loads: each CTA half
//           of Q and dO for both.
// Memory    Q, dO once per 128 keys, from L2; dQ sums: 4 bytes an element added per 128 keys.
//           Shared memory: a step reads and writes some 460 KB of it, 3,600 cycles beside 2,560 of products.
// Numerics  as attention_bwd.cuh.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "bellwether/kernels/status.h"
#include "cuda/attention_bwd_errors.cuh"
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_bwd_scores.cuh"
#include "cuda/attention_bwd_shares.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/attention_bwd_pair_layout.cuh"
#include "cuda/sm90/attention_bwd_pair_parts.cuh"
#include "cuda/sm90/attention_bwd_pair_produce.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// `tile` is t in shared memory, for what would otherwise stay in registers.
template <class S>
__device__ __forceinline__ void BwdPairConsume(const AttentionBwdParams& p, const BwdPairShared<S>& sm,
                                               const BwdTile& t, const BwdTile* tile, int warpgroup) {
  using T = typename S::T;
  static_assert(S::kRows == S::kKeys, "of both the tiles are alike");
  constexpr int kScores = S::kScoreRows / 2, kWords = S::kScoreRows / 4;
  // Descriptors are made anew where they are used: kept, they take registers that are short.
  const auto rows_of = [](uint32_t tile, int group) {
    return TileDescriptor(tile + group * S::kScoreRows * 128, 0, 1024);
  };
  const auto channels_of = [](uint32_t tile, int group) {
    return TileDescriptor(tile + group * 2 * S::kRows * 128, S::kRows * 128, 1024);
  };
  const auto box_of = [&](uint32_t tile, int box) {
    const uint32_t at = tile + box * S::kRows * 128;
    return TileDescriptor(at, S::kRowSums ? sm.ones - at : 0, 1024);
  };
  // The warpgroup, the CTA and 0, of which the compiler does not know that they stay.  A vote has them in uniform
  // registers at once, where reading the thread's index and a shuffle wait in line behind all of shared memory's work.
  const int rank = static_cast<int>(ClusterRank());
  const auto is_again = [](int value, int other) {
    asm volatile("" : "+r"(value));
    return __any_sync(0xffffffffu, value == other) ? 1 : 0;
  };
  const int consumer = static_cast<int>(threadIdx.x) - 128;
  const auto thread_again = [&] {
    int thread = consumer;
    asm volatile("" : "+r"(thread));
    return thread;
  };
  const auto group_again = [&] { return is_again(warpgroup, 1); };
  const auto rank_again = [&] { return is_again(rank, 1); };
  const auto zero_again = [&] { return is_again(warpgroup, 2); };

  float dk[S::kChannels / 2], dv[S::kChannels / 2];
#pragma unroll
  for (int i = 0; i < S::kChannels / 2; ++i) dk[i] = dv[i] = 0.f;
  const uint32_t steps = t.steps;

  if (steps > 0) {
    QueryStep query = FirstQueryStep(p, t);
    QueryStep last = query, older = query;  // of the step before, and of that before it
    uint32_t step = 0;
    float s[kScores];
    // dQ of a step that is over: the other CTA's dS has had the time to come.
    const auto issue_queries = [&](float(&dq)[S::kQueries / 2], uint32_t of) {
      const uint32_t buffer = of & 1;
      BarrierWait(sm.ds_full + 8 * buffer, of / 2 & 1);
      WgmmaFence();
      const uint32_t ds = sm.ds + buffer * S::kScoreBytes, their_ds = sm.their_ds + buffer * S::kScoreBytes;
      IssuePairQueries<S>(dq, rows_of(ds, 0), box_of(sm.k, rank_again() * (S::kBoxes / 2) + group_again()), true);
      IssuePairQueries<S>(dq, rows_of(their_ds, 0), box_of(sm.theirs, group_again()), false);
      WgmmaCommit();
    };
    const auto release_queries = [&](uint32_t of) {
      if (thread_again() % 32 == 0) {
        BarrierArriveThere(AddressOfRank(sm.ds_empty + 8 * (of & 1), ClusterRank() ^ 1));
      }
    };
    BarrierWait(sm.kv_full, 0);
    BarrierWait(sm.q_full, 0);
    PinRegisters(dk);
    PinRegisters(dv);
    WgmmaFence();
    IssuePairScores<S>(s, rows_of(sm.k, 0), rows_of(sm.q, warpgroup));
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    BarrierWait(sm.d_o_full, 0);
    // counted: the rows of this step count for the statistics.
    const auto run_step = [&](auto is_first, auto is_last, auto counted) {
      constexpr bool kFirst = decltype(is_first)::value, kLast = decltype(is_last)::value;
      float dp[kScores];
      uint32_t probs[kWords], words[kWords];
      const auto stage = [&] { return step % S::kStages; };
      WgmmaFence();
      IssuePairScores<S>(dp, rows_of(sm.v, zero_again()), rows_of(sm.d_o, group_again()));
      WgmmaCommit();
      // S of this step is there already; dP runs under its exponentials.
      if constexpr (S::kGeneral) {
        if (p.score.cap_scale != 0.f) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) s[i] = Tanh(s[i] * p.score.cap_scale);
        }
      }
      const BwdTile here = *tile;
      const int thread = thread_again(), first_query = thread / 128 * S::kScoreRows + thread % 4 * 2;
      const int key = here.key + static_cast<int>(ClusterRank()) * S::kKeys;
      if (NeedsMask<S::kGeneral>(p.seq, here.sequence, key, S::kKeys, query.tile * S::kRows, S::kRows)) {
        MaskTransposed<S::kGeneral>(s, p.seq, here.sequence, key + S::QueryRow(thread),
                                    query.tile * S::kRows + first_query);
      }
      const uint32_t lse = sm.lse + stage() * S::kRowBytes + first_query * 4, delta = sm.delta + first_query * 4;
      [[maybe_unused]] const uint32_t inverse = sm.inverse + stage() * S::kRowBytes + first_query * 4;
      ToProbabilities<T, S::kRounded>(s, s, p.score.scale_log2, lse, inverse);
#pragma unroll
      for (int i = 0; i < kWords; ++i) probs[i] = PackPair<T>(s[2 * i], s[2 * i + 1]);
      // P of the step before has been read: dO of this one came when both warpgroups had finished dV.
      StorePairScores<S>(sm.probs, thread_again(), probs);
      {  // The other warpgroup's queries last, when they are there.
        const int group = group_again();
        const uint64_t d_o = channels_of(sm.d_o, group);
        PinRegisters(dv);
        PinRegisters(probs);
        WgmmaFence();
        IssuePairKeysOwn<S>(dv, probs, d_o, group);
        NamedSync(1, 256);
        IssuePairKeysOther<S>(dv, rows_of(sm.probs, 0), d_o, group);
      }
      WgmmaCommit();
      // What is waited for before dP is: the other CTA has read dS of two steps
      // before and has signalled that, and both warpgroups here have passed the
      // barrier.
      const uint32_t ds = sm.ds + (step & 1) * S::kScoreBytes;
      BarrierWait(sm.ds_empty + 8 * (step & 1), (step / 2 & 1) ^ 1);
      float2 deltas[kScores / 4];
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) deltas[i] = LoadShared2(delta + i * 32);
      WgmmaWait<1>();
      PinRegisters(dp);
      if constexpr (decltype(counted)::value) {
        const BwdTile of = *tile;
        AddErrors<4, kScores>(p.errors + RowBase(p, of.sequence, of.kv_head * p.seq.group + query.member) +
                                  query.tile * S::kRows + group_again() * S::kScoreRows,
                              delta, thread_again() % 32, [&](int i, float d) { return s[i] * (dp[i] - d); });
      }
      if constexpr (S::kGeneral) {
        if (p.score.cap_scale != 0.f) {
          ApplyCapDerivative<S::kRounded>(dp, s, p.score.scale_log2, lse, delta, inverse);
        }
      }
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float2 d = deltas[i / 4];
        words[i / 2] = PackPair<T>(s[i] * (dp[i] - d.x), s[i + 1] * (dp[i + 1] - d.y));
        words[i / 2 + 1] = PackPair<T>(s[i + 2] * (dp[i + 2] - d.x), s[i + 3] * (dp[i + 3] - d.y));
      }
      StorePairScores<S>(ds, thread_again(), words);
      const int group = group_again();
      const uint64_t q = channels_of(sm.q + stage() * S::kQBytes, group);
      PinRegisters(dk);
      PinRegisters(words);
      WgmmaFence();
      IssuePairKeysOwn<S>(dk, words, q, group);
      NamedSync(1, 256);
      IssuePairKeysOther<S>(dk, rows_of(ds, 0), q, group);
      WgmmaCommit();
      if (thread_again() == 0) {
        const uint32_t full = sm.ds_full + 8 * (step & 1), there = ClusterRank() ^ 1;
        BarrierArriveExpect(full, S::kScoreBytes);
        BulkCopyThere(AddressOfRank(sm.their_ds + (step & 1) * S::kScoreBytes, there), ds, AddressOfRank(full, there),
                      S::kScoreBytes);
      }
      WgmmaWait<1>();  // dV
      PinRegisters(dv);
      PinRegisters(probs);
      BarrierArrive(sm.d_o_empty);
      QueryStep next_query = query;
      Advance(p, *tile, &next_query);
      [[maybe_unused]] float dq[S::kQueries / 2];
      if constexpr (!kFirst) issue_queries(dq, step - 1);
      if constexpr (!kLast) {
        const int next = (step + 1) % S::kStages;
        BarrierWait(sm.q_full + 8 * next, (step + 1) / S::kStages & 1);
        WgmmaFence();
        IssuePairScores<S>(s, rows_of(sm.k, zero_again()), rows_of(sm.q + next * S::kQBytes, group_again()));
        WgmmaCommit();
      }
      if constexpr (!kFirst) {
        // A step behind the additions, so that the fence finds them done.
        if (S::kGeneral && p.turns != nullptr && step > 1) PassPairTurn<S>(p, tile, older);
        WgmmaWait<kLast ? 0 : 1>();  // dK, dQ
        PinRegisters(dq);
        AddPairQueries<S>(p, tile, last, dq);
        release_queries(step - 1);  // here, since ptxas moves the next wait above the additions, but not above this
      }
      if constexpr (!kLast) BarrierWait(sm.d_o_full, (step + 1) & 1);
      WgmmaWait<0>();  // dK, and S of the next step
      PinRegisters(words);
      PinRegisters(dk);
      PinRegisters(s);
      BarrierArrive(sm.q_empty + 8 * stage());
      older = last;
      last = query;
      query = next_query;
    };
    // What counts has code of its own, so that the other steps cost what they do without.
    const auto run = [&](auto is_first, auto is_last) {
      if constexpr (S::kCount) {
        if (p.stats.Count(tile->sequence.index, query.tile * S::kRows))
          return run_step(is_first, is_last, std::true_type{});
      }
      run_step(is_first, is_last, std::false_type{});
    };
    if (steps == 1) {
      run(std::true_type{}, std::true_type{});
    } else {
      run(std::true_type{}, std::false_type{});
      for (step = 1; step + 1 < steps; ++step) run(std::false_type{}, std::false_type{});
      run(std::false_type{}, std::true_type{});
    }
    // dQ of the last step.
    float dq[S::kQueries / 2];
    issue_queries(dq, step);
    if (S::kGeneral && p.turns != nullptr && step > 0) PassPairTurn<S>(p, tile, older);
    WgmmaWait<0>();
    PinRegisters(dq);
    AddPairQueries<S>(p, tile, last, dq);
    if (S::kGeneral && p.turns != nullptr) PassPairTurn<S>(p, tile, last);
    PinRegisters(dv);
    PinRegisters(dk);
  }

  const BwdTile done = *tile;
  if (p.shares > 1) {
    __shared__ int arrived;
    const int split = static_cast<int>(ClusterRank());
    const auto sync = [] { NamedSync(1, 256); };
    if (!AddShares<S>(p, done, split, thread_again(), &arrived, sync, dv, dk)) return;
  }
  StorePairKeys<S>(done, p.dv, p.dv_stride, p.seq.v_dim, 1.f, dv);
  StorePairKeys<S>(done, p.dk, p.dk_stride, p.seq.head_dim, p.scale, dk);
}

// Grid: kv_heads * key_tiles * p.shares * kSplits, in clusters of kSplits.  Block: S::kThreads.
template <class S>
__global__ void __cluster_dims__(S::kSplits, 1, 1) __launch_bounds__(S::kThreads, 1)
    AttentionBwdPairKernel(const __grid_constant__ AttentionBwdParams p, const __grid_constant__ BwdMaps maps) {
  extern __shared__ char raw[];
  const BwdPairShared<S> sm(raw);
  __shared__ BwdTile tile;
  BwdTile t;
  if (!LocateBwdTile<S>(p, blockIdx.x / S::kSplits, &t)) return;  // Both CTAs.
  if (threadIdx.x == 0) {
    tile = t;
    BarrierInit(sm.kv_full, 1);
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(sm.q_full + 8 * i, 1);
      BarrierInit(sm.q_ready + 8 * i, 1);
      // Every consumer thread reads L and delta, and every one arrives.
      BarrierInit(sm.q_empty + 8 * i, 256);
      BarrierInit(sm.ds_full + 8 * i, 1);
      BarrierInit(sm.ds_empty + 8 * i, 8);  // warps
    }
    BarrierInit(sm.d_o_full, 1);
    BarrierInit(sm.d_o_ready, 1);
    BarrierInit(sm.d_o_empty, 256);
    BarrierInitFence();
  }
  if constexpr (S::kRowSums) StoreOnes<S>(sm.ones);
  __syncthreads();
  ClusterSync();  // The barriers are there before the other CTA reaches for them.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    RegistersShrink<24>();
    if (threadIdx.x == 0) BwdPairProduce<S>(p, maps, sm, &tile);
  } else {
    RegistersGrow<240>();
    BwdPairConsume<S>(p, sm, t, &tile, warpgroup - 1);
  }
  ClusterSync();  // Neither CTA leaves while the other may reach for its shared memory.
}

template <class S>
Status LaunchAttentionBwdPair(const AttentionBwdParams& p, const BwdMaps& maps, cudaStream_t stream) {
  const auto kernel = AttentionBwdPairKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  // Of the shape the other kernels read only what all shapes share.
  using Rows = BwdPairShape<typename S::T, false, false, false, false>;
  LaunchBwdAround<Rows, typename Rows::Keys>(p, stream, [&] {
    kernel<<<p.seq.kv_heads * p.key_tiles * p.shares * S::kSplits, S::kThreads, S::kSharedBytes, stream>>>(p, maps);
  });
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

// For attention_bwd_shapes.cuh.
template <class T>
struct BwdPairKernels {
  template <bool kGeneral, bool kRounded, bool kRowSums>
  static constexpr bool kExact = !kGeneral;

  template <bool kGeneral, bool kRounded, bool kRowSums, bool kCount>
  static BwdLauncher Make() {
    using S = BwdPairShape<T, kGeneral, kRounded, kRowSums, kCount>;
    return {S::kRows, S::kCols, S::kKeys, S::kTurnSteps, S::kCount, 0, LaunchAttentionBwdPair<S>};
  }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_CUH_
