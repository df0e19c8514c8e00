// Stabilized attention, backward, compute capability 8.0 and later; see
// bellwether/kernels/attention.h.
//
// Work      prepare and finish: attention_bwd_rows.cuh.  main: one CTA per tile of
//           kCols keys, longest first, loops over the tiles of kRows queries of every
//           query head of its group.  A warp owns kTiles tiles of 16 keys, as rows:
//           S^T = K Q^T, dP^T = V dO^T, P^T = exp2(S^T - L), dS^T = P^T (dP^T - delta),
//           dV += P^T dO, dK += dS^T Q with P^T and dS^T from registers, by kChunk
//           queries at a time.  dS^T goes to shared memory once for dQ = dS K, of
//           which each warp computes a part and adds it to global memory.  Q of the
//           next step is copied during the whole step, dO during dQ.
//           Head dim 256: kSplits CTAs per tile of keys own 128 channels of dQ, dK
//           and dV each, and compute S and dP both.
// Memory    Q, dO once per tile of keys, from L2; dQ sums: 4 bytes an element
//           added per tile of keys.
// Numerics  as the Hopper backward: S, dP, P, delta, dQ, dK, dV in fp32; P and dS
//           rounded to the input type as operands; the order of additions to dQ is
//           not fixed, unless tiles of keys take turns (attention_bwd_turns.cuh).
//           Then CTAs of later keys start first, so that none waits for one that
//           cannot run.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_CUH_

#include <cuda_runtime.h>

#include "bellwether/kernels/status.h"
#include "cuda/accumulator_sums.cuh"
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_bwd_scores.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_bwd_turns.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm80/attention_params.h"
#include "cuda/sm80/products.cuh"
#include "cuda/sm80/shared_copy.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm80 {

// kRounded: P is what the forward's product read.  kRowSums: rowsum(dS) is taken, for
// centring or for the statistics.
template <class T_, int kHeadDim_, int kWarps_, int kShare_, bool kRounded_, bool kRowSums_>
struct BwdShape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kShare = kShare_;  // warps that have the same keys
  static constexpr bool kGeneral = true, kRounded = kRounded_, kRowSums = kRowSums_;
  static constexpr int kBlocks = kHeadDim < 128 ? 2 : 1;                  // a multiprocessor
  static constexpr int kTiles = kShare > 1 || kHeadDim == 64 ? 2 : 1;     // of 16 keys, a warp
  static constexpr int kCols = 16 * kTiles * kWarps / kShare;             // keys a CTA
  static constexpr int kRows = kHeadDim == 256 && kShare == 1 ? 16 : 64;  // queries a step
  static constexpr int kChunk = kRows / (kShare > 1 ? kShare : kTiles);   // queries at a time
  static constexpr int kUnroll = kHeadDim == 64 ? 2 : 4;  // of dP, for want of registers
  static constexpr int kSplits = kHeadDim == 256 && kShare == 1 ? 2 : 1;
  static constexpr int kOutputs = kHeadDim / kSplits;  // channels of dQ, dK, dV
  static constexpr int kOwned = kOutputs / kShare;     // of dK and dV, a warp
  // A warp's part of dQ: see attention_bwd_rows.cuh.
  static constexpr int kQueryWarps = kRows >= 32 ? 2 : 1;  // along the queries
  static constexpr int kQueryTiles = kRows / 16 / kQueryWarps;
  static constexpr int kQueryColumns = kOutputs / (kWarps / kQueryWarps);
  static constexpr int kQueryThreads = kThreads;
  static __device__ int QueryRow(int thread) {
    return thread / 32 % kQueryWarps * (16 * kQueryTiles) + thread % 32 / 4;
  }
  static __device__ int QueryColumn(int thread) {
    return thread / 32 / kQueryWarps * kQueryColumns;
  }

  static constexpr int kKvBytes = kCols * kHeadDim * 2, kQBytes = kRows * kHeadDim * 2;
  static constexpr int kDsBytes = kCols * kRows * 2;
  static constexpr int kRowBytes = kRows * 4;  // of L, delta or 1 / lt
  static constexpr int kStageBytes = (kQBytes + 3 * kRowBytes + 127) / 128 * 128;  // Q with these
  static constexpr int kPlaceBytes = 128;                                          // of the tile
  static constexpr int kPBytes = kShare > 1 ? kDsBytes : 0;
  // These, K, V, dO, dS, P, two stages.
  static constexpr int kSharedBytes =
      kPlaceBytes + 2 * kKvBytes + kQBytes + kDsBytes + kPBytes + 2 * kStageBytes;
  static_assert(kSplits * kWarps <= kTurnsOfStep && kQueryColumns % 16 == 0);
};

// Where things lie in shared memory; what has two stages last.
template <class S>
struct BwdShared {
  SharedCopy<BwdTile> tile;
  uint32_t k, v, d_o, ds, p, q, lse, delta, inverse;

  __device__ __forceinline__ explicit BwdShared(const void* raw) : tile(SharedAddress(raw)) {
    k = SharedAddress(raw) + S::kPlaceBytes;
    v = k + S::kKvBytes;
    d_o = v + S::kKvBytes;
    ds = d_o + S::kQBytes;
    p = ds + S::kDsBytes;
    q = p + S::kPBytes;
    lse = q + S::kQBytes;
    delta = lse + S::kRowBytes;
    inverse = delta + S::kRowBytes;
  }
};

// One step: a tile of queries of one head.
struct BwdStep {
  int head, tile;

  __device__ __forceinline__ bool IsFirst(const SequenceParams& p, const BwdTile& t) const {
    return head == t.kv_head * p.group && tile == t.first_tile;
  }
  __device__ __forceinline__ bool Exists(const SequenceParams& p, const BwdTile& t) const {
    return head < (t.kv_head + 1) * p.group;
  }
  __device__ __forceinline__ BwdStep Next(const BwdTile& t) const {
    return tile + 1 < t.end_tile ? BwdStep{head, tile + 1} : BwdStep{head + 1, t.first_tile};
  }
  __device__ __forceinline__ BwdStep Last(const BwdTile& t) const {
    return tile > t.first_tile ? BwdStep{head, tile - 1} : BwdStep{head - 1, t.end_tile - 1};
  }
};

// K or V of this CTA.
template <class S>
__device__ __forceinline__ void CopyKeys(uint32_t to, const BwdParams& p, const BwdTile& t,
                                         const void* from, const Strides& stride) {
  const Sequence& seq = t.sequence;
  TileCopier<S::kHeadDim, S::kCols, S::kThreads>::Copy(
      to, TokensOf(from, stride, seq.index, t.kv_head, seq.k_start), stride.token, p.seq.head_dim,
      t.key, seq.k_len);
}

template <class S>
__device__ __forceinline__ void CopyQueries(const BwdParams& p, const BwdShared<S>& sm,
                                            const Sequence& seq, const BwdStep& step, int stage) {
  const int thread = ThreadIndexAgain(), row = step.tile * S::kRows;
  TileCopier<S::kHeadDim, S::kRows, S::kThreads>::Copy(
      sm.q + stage, TokensOf(p.q, p.q_stride, seq.index, step.head, seq.q_start), p.q_stride.token,
      p.seq.head_dim, row, seq.q_len);
  constexpr int kVectors = S::kRowBytes / 16;
  if (thread < 3 * kVectors) {
    const int array = thread / kVectors, at = thread % kVectors * 4;
    const float* const from = array == 0 ? p.lse_log2 : array == 1 ? p.delta : p.inverse;
    CopyAsync(sm.lse + stage + array * S::kRowBytes + at * 4,
              from + RowBase(p, seq, step.head) + row + at, S::kRounded || array < 2);
  }
}

template <class S>
__device__ __forceinline__ void CopyGradients(const BwdParams& p, const BwdShared<S>& sm,
                                              const Sequence& seq, const BwdStep& step) {
  TileCopier<S::kHeadDim, S::kRows, S::kThreads>::Copy(
      sm.d_o, TokensOf(p.d_o, p.d_o_stride, seq.index, step.head, seq.q_start), p.d_o_stride.token,
      p.seq.head_dim, step.tile * S::kRows, seq.q_len);
}

// Writes a tile of dS^T, 16 keys and kCount * 2 queries, as [key][query].  `at` is
// this lane's place in the first chunk of its first key.
template <class S, int kCount>
__device__ __forceinline__ void StoreTransposed(const uint32_t (&ds)[kCount], uint32_t at,
                                                int chunk) {
  using Layout = TileLayout<S::kRows>;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int in_group = (chunk + i / 2) % Layout::kGroup;
    const uint32_t to = (at ^ (in_group * 16)) + (chunk + i / 2 - in_group) * 16;
    StoreShared(to, ds[i]);
    StoreShared(to + 8 * Layout::kPitch, ds[i + 1]);
  }
}

// dQ of a step, this warp's part, added to the sums.
template <class S>
__device__ __forceinline__ void AddQueries(const BwdParams& p, const BwdShared<S>& sm,
                                           const BwdStep& step, int split) {
  using T = typename S::T;
  constexpr int kCount = S::kQueryColumns / 2;
  const int thread = ThreadIndexAgain(), lane = thread % 32;
  const int first = S::QueryRow(thread) - lane / 4;
  const ColumnsReader<S::kRows> ds(sm.ds, lane);
  const RowsReader<S::kHeadDim> k(sm.k, lane);
  float dq[S::kQueryTiles][kCount] = {}, sums[S::kQueryTiles][4] = {};
#pragma unroll
  for (int key = 0; key < S::kCols; key += 16) {
    uint32_t a[S::kQueryTiles][4];
#pragma unroll
    for (int m = 0; m < S::kQueryTiles; ++m) ds.template Load<true>(a[m], key, first / 8 + 2 * m);
    OuterStep<T, S::kQueryColumns>(dq, a, k, key,
                                   (split * S::kOutputs + S::QueryColumn(thread)) / 8);
    if constexpr (S::kRowSums) SumStep<T>(sums, 0, a);
  }
  const BwdTile t = sm.tile.Load();
  if (p.turns != nullptr)
    AwaitTurn<S>(p, t, step.tile, step.head, split * S::kWarps + thread / 32, lane);
  const int64_t row = RowBase(p, t.sequence, step.head) + step.tile * S::kRows;
  float flat[S::kQueryTiles * kCount];
#pragma unroll
  for (int i = 0; i < S::kQueryTiles * kCount; ++i) flat[i] = dq[i / kCount][i % kCount];
  AddToSums<S::kQueryTiles * kCount, S::kThreads>(
      p.dq_sum + row * S::kHeadDim + split * S::kRows * S::kOutputs, thread, flat);
  if constexpr (S::kRowSums) {
    if (lane % 4 == 0 && S::QueryColumn(thread) == 0 && split == 0) {
#pragma unroll
      for (int m = 0; m < S::kQueryTiles; ++m) {
        ReduceAdd(p.ds_sum + row + S::QueryRow(thread) + 16 * m, sums[m][0]);
        ReduceAdd(p.ds_sum + row + S::QueryRow(thread) + 16 * m + 8, sums[m][2]);
      }
    }
  }
}

// D += A B of kChunk queries from `row` on, A from registers.
template <class S>
__device__ __forceinline__ void AddStep(float (&d)[S::kTiles][S::kOwned / 2],
                                        const uint32_t (&a)[S::kTiles][S::kChunk / 4],
                                        const RowsReader<S::kHeadDim>& b, int row) {
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
__device__ __forceinline__ void AddShared(float (&d)[S::kTiles][S::kOwned / 2], uint32_t a_tile,
                                          uint32_t b_tile) {
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
// dS^T in shared memory.  `stage` is the offset of Q's stage.
template <class S>
__device__ __forceinline__ void AddKeys(const BwdParams& p, const BwdShared<S>& sm, int tile_row,
                                        int row, int stage, int split,
                                        float (&dk)[S::kTiles][S::kOwned / 2],
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
  InnerProduct<T, kElements>(s, Rows(sm.k + key * kElements * 2, lane), Columns(sm.q + stage, lane),
                             row);
  const uint32_t of_query = stage + (row + lane % 4 * 2) * 4;
  const uint32_t lse = sm.lse + of_query, delta = sm.delta + of_query,
                 inverse = sm.inverse + of_query;
  const BwdTile t = sm.tile.Load();
  const bool masked =
      NeedsMask<true>(p.seq, t.sequence, t.key + key, 16 * S::kTiles, tile_row + row, S::kChunk);
  uint32_t a[S::kTiles][S::kChunk / 4];
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    if (p.score.cap_scale != 0.f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[m][i] = Tanh(s[m][i] * p.score.cap_scale);
    }
    if (masked) {
      MaskTransposed<true>(s[m], p.seq, t.sequence, t.key + key + 16 * m + lane / 4,
                           tile_row + row + lane % 4 * 2);
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
  InnerProduct<T, kElements, S::kUnroll>(dp, Rows(sm.v + key * kElements * 2, lane),
                                         Columns(sm.d_o, lane), row);
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    if (p.score.cap_scale != 0.f) {
      ApplyCapDerivative<S::kRounded>(dp[m], s[m], p.score.scale_log2, lse, delta, inverse);
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 d = LoadShared2(delta + i * 8);
      a[m][i / 2] = PackPair<T>(s[m][i] * (dp[m][i] - d.x), s[m][i + 1] * (dp[m][i + 1] - d.y));
      a[m][i / 2 + 1] =
          PackPair<T>(s[m][i + 2] * (dp[m][i + 2] - d.x), s[m][i + 3] * (dp[m][i + 3] - d.y));
    }
    StoreTransposed<S>(a[m], sm.ds + own_at + 16 * m * TileLayout<S::kRows>::kPitch, row / 8);
  }
  if constexpr (S::kShare == 1) {
    AddStep<S>(dk, a, Rows(sm.q + stage + split * S::kOutputs * 2, ThreadIndexAgain() % 32), row);
  } else {
    SyncSharers<S>();
    AddShared<S>(dv, sm.p, sm.d_o);
    AddShared<S>(dk, sm.ds, sm.q + stage);
  }
}

// Rounds `sums` times `factor` to a tensor of keys.
template <class S>
__device__ __forceinline__ void StoreKeys(const BwdParams& p, const BwdTile& t,
                                          const float (&sums)[S::kTiles][S::kOwned / 2],
                                          float factor, void* base, const Strides& stride,
                                          int split) {
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
    StoreRows<kStored>(words, place(key), place(key + 8), min(p.seq.head_dim - channel, S::kOwned),
                       lane);
  }
}

// Grid: kv_heads * key_tiles * kSplits.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    AttentionBwdKernel(const __grid_constant__ BwdParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int split = blockIdx.x % S::kSplits;
  const BwdShared<S> sm(shared);
  BwdStep step;
  bool more;  // steps
  {
    BwdTile t;
    if (!LocateBwdTile<S>(p, blockIdx.x / S::kSplits, &t)) return;
    if (threadIdx.x == 0) sm.tile.Store(t);
    step = {t.kv_head * p.seq.group, t.first_tile};
    more = t.first_tile < t.end_tile;
    if (more) {
      CopyKeys<S>(sm.k, p, t, p.k, p.k_stride);
      CopyKeys<S>(sm.v, p, t, p.v, p.v_stride);
      CopyQueries(p, sm, t.sequence, step, 0);
      CopyGradients(p, sm, t.sequence, step);
    }
    CopyCommit();
  }

  float dk[S::kTiles][S::kOwned / 2] = {}, dv[S::kTiles][S::kOwned / 2] = {};
  const auto pass_turn = [&](const BwdTile& t, const BwdStep& of) {
    const int thread = ThreadIndexAgain();
    PassTurn<S>(p, t, of.tile, of.head, split * S::kWarps + thread / 32, thread % 32);
  };
  int stage = 0;  // of Q, in bytes
#pragma unroll 1
  while (more) {
    CopyWait<0>();
    __syncthreads();  // Q and dO are there, and every warp has read the last ones and dS.
    {
      const BwdTile t = sm.tile.Load();
      const BwdStep next = step.Next(t);
      if (next.Exists(p.seq, t)) CopyQueries(p, sm, t.sequence, next, S::kStageBytes - stage);
      CopyCommit();
      if (p.turns != nullptr && !step.IsFirst(p.seq, t)) pass_turn(t, step.Last(t));
    }
    if constexpr (S::kShare > 1) {
      AddKeys<S>(p, sm, step.tile * S::kRows, ThreadIndexAgain() / 32 % S::kShare * S::kChunk,
                 stage, split, dk, dv);
    } else {
#pragma unroll 1
      for (int row = 0; row < S::kRows; row += S::kChunk) {
        AddKeys<S>(p, sm, step.tile * S::kRows, row, stage, split, dk, dv);
      }
    }
    __syncthreads();  // dS is there, and every warp has read dO.
    {
      const BwdTile t = sm.tile.Load();
      const BwdStep next = step.Next(t);
      if (next.Exists(p.seq, t)) CopyGradients(p, sm, t.sequence, next);
      CopyCommit();
    }
    AddQueries<S>(p, sm, step, split);
    {
      const BwdTile t = sm.tile.Load();
      step = step.Next(t);
      more = step.Exists(p.seq, t);
    }
    stage = S::kStageBytes - stage;
  }
  __syncthreads();  // The tile is there, even if no query sees its keys.
  const BwdTile t = sm.tile.Load();
  if (p.turns != nullptr && t.first_tile < t.end_tile) pass_turn(t, step.Last(t));
  StoreKeys<S>(p, t, dv, 1.f, p.dv, p.dv_stride, split);
  StoreKeys<S>(p, t, dk, p.scale, p.dk, p.dk_stride, split);
}

template <class S>
Status LaunchAttentionBwd(const BwdParams& p, cudaStream_t stream) {
  const auto kernel = AttentionBwdKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) !=
      cudaSuccess) {
    return Status::kDeviceError;
  }
  // Of the shape the other kernels read only what all shapes of its tiles share.
  using Rows = BwdShape<typename S::T, S::kHeadDim, S::kWarps, S::kShare, false, false>;
  LaunchBwdAround<Rows>(p, stream, [&] {
    kernel<<<p.seq.kv_heads * p.key_tiles * S::kSplits, S::kThreads, S::kSharedBytes, stream>>>(p);
  });
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_CUH_
