// attention_bwd_pair_parts.cuh: what a consumer of the pair does in a step: its products, and handing on P, dS and dQ;
// and behind the last, dK and dV.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_PARTS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_PARTS_CUH_

#include "cuda/accumulator_sums.cuh"
#include "cuda/attention_bwd_turns.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_pair_layout.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/query_steps.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm90 {

// D[64 keys, 32 queries] = A[64 keys, 256] B[32 queries, 256]^T.
template <class S>
__device__ __forceinline__ void IssuePairScores(float (&d)[S::kScoreRows / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 16; ++i) {
    Wgmma<typename S::T, S::kScoreRows, false, false>::Ss(d, a + (i / 4) * (S::kKeys * 8) + (i % 4) * 2,
                                                          b + (i / 4) * (S::kRows * 8) + (i % 4) * 2, i > 0);
  }
}

// D[64 keys, 128 channels] += A[64 keys, 32 queries] B[32 queries, 128 channels], of a warpgroup's own queries from its
// registers and of the other's from shared memory; `a` and `b` have all 64.
template <class S>
__device__ __forceinline__ void IssuePairKeysOwn(float (&d)[S::kChannels / 2], const uint32_t (&a)[S::kScoreRows / 4],
                                                 uint64_t b, int group) {
#pragma unroll
  for (int i = 0; i < S::kScoreRows / 16; ++i) {
    Wgmma<typename S::T, S::kChannels, false, true>::Rs(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                                                        b + (group * (S::kScoreRows / 16) + i) * 128, 1);
  }
}
template <class S>
__device__ __forceinline__ void IssuePairKeysOther(float (&d)[S::kChannels / 2], uint64_t a, uint64_t b, int group) {
#pragma unroll
  for (int i = 0; i < S::kScoreRows / 16; ++i) {
    const int from = (group ^ 1) * (S::kScoreRows / 16) + i;
    Wgmma<typename S::T, S::kChannels, false, true>::Ss(d, a + from * 2, b + from * 128, 1);
  }
}

// D[64 queries, 64 channels and perhaps 8 of ones] += A[64 queries, 64 keys] B[64 keys, as D]; A lies transposed.
template <class S>
__device__ __forceinline__ void IssuePairQueries(float (&d)[S::kQueries / 2], uint64_t a, uint64_t b, bool first) {
#pragma unroll
  for (int i = 0; i < S::kKeys / 16; ++i) {
    Wgmma<typename S::T, S::kQueries, true, true>::Ss(d, a + i * 128, b + i * 128, !first || i > 0);
  }
}

// Leaves a warpgroup's 32 queries of P^T or dS^T at `to`, where a key's row has all 64.
template <class S>
__device__ __forceinline__ void StorePairScores(uint32_t to, int thread, const uint32_t (&words)[S::kScoreRows / 4]) {
  const int row = thread % 128 / 32 * 16 + thread % 16;
  const int first = thread / 128 * (S::kScoreRows / 8) + thread % 32 / 16;
#pragma unroll
  for (int i = 0; i < S::kScoreRows / 4; i += 4) {
    StoreMatrices(to + row * 128 + ((first + i / 2) ^ row % 8) * 16, words[i], words[i + 1], words[i + 2],
                  words[i + 3]);
  }
  ProxyFence();
}

// Adds a warpgroup's dQ of one step, and one warpgroup rowsum(dS), which all have.
template <class S>
__device__ __forceinline__ void AddPairQueries(const AttentionBwdParams& p, const BwdTile* tile, const QueryStep& step,
                                               const float (&dq)[S::kQueries / 2]) {
  const BwdTile t = *tile;
  const int head = t.kv_head * p.seq.group + step.member, m = step.tile;
  const int thread = ThreadIndexAgain() - 128, lane = thread % 32, rank = static_cast<int>(ClusterRank());
  const int64_t row = RowBase(p, t.sequence, head) + m * S::kRows;
  if (S::kGeneral && p.turns != nullptr) AwaitTurn<S>(p, t, m, head, rank * S::kTurnWarps + thread / 32, lane);
  AddToSums<S::kQueryColumns / 2, S::kQueryThreads>(p.dq_sum + row * S::kHeadDim + rank * (S::kRows * S::kOutputs),
                                                    thread, dq);
  if constexpr (S::kRowSums) {
    if (rank == 0 && thread < 128 && lane % 4 == 0) {
      float* const sums = p.ds_sum + row + S::QueryRow(thread);
      ReduceAdd(sums, dq[S::kQueryColumns / 2]);
      ReduceAdd(sums + 8, dq[S::kQueryColumns / 2 + 2]);
    }
  }
}

// The next key tile may add its dQ.
template <class S>
__device__ __forceinline__ void PassPairTurn(const AttentionBwdParams& p, const BwdTile* tile, const QueryStep& step) {
  const int thread = ThreadIndexAgain() - 128, rank = static_cast<int>(ClusterRank());
  PassTurn<S>(p, *tile, step.tile, tile->kv_head * p.seq.group + step.member, rank * S::kTurnWarps + thread / 32,
              thread % 32);
}

// A warpgroup's channels of 64 keys of dV or dK, which has `channels`.
template <class S>
__device__ __forceinline__ void StorePairKeys(const BwdTile& t, void* base, const Strides& stride, int channels,
                                              float scale, const float (&x)[S::kChannels / 2]) {
  const int thread = ThreadIndexAgain() - 128, lane = thread % 32, channel = thread / 128 * S::kChannels;
  const int key = t.key + static_cast<int>(ClusterRank()) * S::kKeys + S::QueryRow(thread);
  const Sequence& seq = t.sequence;
  const auto place = [&](int at) -> uint16_t* {
    if (at >= seq.k_len) return nullptr;
    return static_cast<uint16_t*>(base) + seq.index * stride.batch + t.kv_head * stride.head +
           (seq.k_start + at) * stride.token + channel;
  };
  uint32_t words[S::kChannels / 4];
#pragma unroll
  for (int i = 0; i < S::kChannels / 4; ++i) words[i] = PackPair<typename S::T>(x[2 * i] * scale, x[2 * i + 1] * scale);
  StoreRows<S::kChannels>(words, place(key), place(key + 8), channels - channel, lane);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_PARTS_CUH_
