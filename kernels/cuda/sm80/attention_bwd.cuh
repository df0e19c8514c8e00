// Stabilized attention, backward, compute capability 8.0 and later; see
// bellwether/kernels/attention.h.
//
// Work      prepare and finish: attention_bwd_rows.cuh.  main: one CTA per tile of
//           kCols keys, longest first, loops over the tiles of kRows queries of every
//           query head of its group.  A warp owns kTiles tiles of 16 keys, as rows.
//           S^T = K Q^T, dP^T = V dO^T, P^T = exp2(S^T - L), dS^T = P^T (dP^T - delta).
//           dV += P^T dO, dK += dS^T Q with P^T and dS^T from registers, by kChunk
//           queries at a time.  dS^T goes to shared memory once for dQ = dS K, of
//           which each warp computes a part and adds it to global memory.  Q of the
//           next step is copied during the whole step, dO during dQ.
//           With two stages of dO and dS, dQ is a step behind and a step has one
//           barrier: half of the warps begin it with dQ of the last step, the others
//           end it with that, so that one half's products run under the other's
//           exponentials.
//           Head dim 256: kSplits CTAs per tile of keys own 128 channels of dQ, dK
//           and dV each, and compute S and dP both.
// Memory    Q, dO once per tile of keys, from L2; dQ sums: 4 bytes an element
//           added per tile of keys.
// Numerics  as the Hopper backward: S, dP, P, delta, dQ, dK, dV in fp32; P and dS
//           rounded to the input type as operands.  The order of additions to dQ is
//           not fixed, unless tiles of keys take turns (attention_bwd_turns.cuh).
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_CUH_

#include <cuda_runtime.h>

#include "bellwether/kernels/status.h"
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_bwd_turns.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm80/attention_bwd_copies.cuh"
#include "cuda/sm80/attention_bwd_keys.cuh"
#include "cuda/sm80/attention_bwd_layout.cuh"
#include "cuda/sm80/attention_bwd_queries.cuh"
#include "cuda/sm80/attention_params.h"

namespace bellwether::kernels::cuda::sm80 {

// The additions of this warp to dQ of `step` are over.
template <class S>
__device__ __forceinline__ void PassTurnOf(const BwdParams& p, const typename S::Tile& t, const BwdStep& step,
                                           int split) {
  const int thread = ThreadIndexAgain();
  PassTurn<S>(p, t, step.tile, step.head, split * S::kWarps + thread / 32, thread % 32);
}

// All steps from `step` on, of which there is one; what they read has been asked for.
// One stage of dO and dS: dK and dV of a step, a barrier, its dQ.
template <class S>
__device__ __forceinline__ void RunSteps(const BwdParams& p, const void* shared, BwdStep step, int split,
                                         float (&dk)[S::kTiles][S::kOwned / 2], float (&dv)[S::kTiles][S::kOwned / 2]) {
  bool more = true;
  int stage = 0;
#pragma unroll 1
  while (more) {
    const BwdShared<S> sm(shared, stage);
    CopyWait<0>();
    __syncthreads();  // Q and dO are there, and every warp has read the last ones and dS.
    {
      const typename S::Tile t = sm.tile.Load();
      const BwdStep next = step.Next(t);
      if (next.Exists(p.seq, t)) {
        CopyQueries(p, BwdShared<S>(shared, stage ^ 1), t.sequence, next);
        PrefetchMask<S>(p, t, next);
      }
      CopyCommit();
      if (p.turns != nullptr && !step.IsFirst(p.seq, t)) PassTurnOf<S>(p, t, step.Last(t), split);
    }
    if constexpr (S::kShare > 1) {
      AddKeys<S>(p, sm, step, ThreadIndexAgain() / 32 % S::kShare * S::kChunk, split, dk, dv);
    } else {
#pragma unroll 1
      for (int row = 0; row < S::kRows; row += S::kChunk) {
        AddKeys<S>(p, sm, step, row, split, dk, dv);
      }
    }
    __syncthreads();  // dS is there, and every warp has read dO.
    const typename S::Tile t = sm.tile.Load();
    const BwdStep next = step.Next(t);
    more = next.Exists(p.seq, t);
    if (more) CopyGradients(p, sm, t.sequence, next);
    CopyCommit();
    AddQueries<S>(p, sm, step, split);
    step = next;
    stage ^= 1;
  }
  const typename S::Tile t = BwdShared<S>(shared, 0).tile.Load();
  if (p.turns != nullptr) PassTurnOf<S>(p, t, step.Last(t), split);
}

// The same with two stages: a pass of the loop is dK and dV of `step` and dQ of the
// one before.  The buffers that it fills are those that the last pass read.
template <class S>
__device__ __forceinline__ void RunStepsApart(const BwdParams& p, const void* shared, BwdStep step, int split,
                                              float (&dk)[S::kTiles][S::kOwned / 2],
                                              float (&dv)[S::kTiles][S::kOwned / 2]) {
  bool more = true, first = true;
  int stage = 0;
#pragma unroll 1
  while (true) {
    const BwdShared<S> sm(shared, stage), other(shared, stage ^ 1);
    CopyWait<0>();
    __syncthreads();  // Q, dO and dS of the last step are there, and all it read is read.
    BwdStep next;
    {
      const typename S::Tile t = sm.tile.Load();
      next = step.Next(t);
      if (more && next.Exists(p.seq, t)) {
        CopyQueries(p, other, t.sequence, next);
        PrefetchMask<S>(p, t, next);
        CopyGradients(p, other, t.sequence, next);
      }
      CopyCommit();
    }
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int warp = ThreadIndexAgain() / 32;
      if (part == (warp < S::kWarps / 2 ? 0 : 1)) {
        if (more) AddKeys<S>(p, sm, step, warp % S::kShare * S::kChunk, split, dk, dv);
      } else if (!first) {
        const typename S::Tile t = sm.tile.Load();
        const BwdStep last = step.Last(t);
        if (p.turns != nullptr && !last.IsFirst(p.seq, t)) PassTurnOf<S>(p, t, last.Last(t), split);
        AddQueries<S>(p, other, last, split);
      }
    }
    if (!more) break;
    const typename S::Tile t = sm.tile.Load();
    step = next;
    more = step.Exists(p.seq, t);
    first = false;
    stage ^= 1;
  }
  const typename S::Tile t = BwdShared<S>(shared, 0).tile.Load();
  if (p.turns != nullptr) PassTurnOf<S>(p, t, step.Last(t), split);
}

// Grid: kv_heads * key_tiles * kSplits.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) AttentionBwdKernel(const __grid_constant__ BwdParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int split = blockIdx.x % S::kSplits;
  BwdStep step;
  bool any;
  {
    const BwdShared<S> sm(shared, 0);
    typename S::Tile t;
    if (!LocateBwdTile<S>(p, blockIdx.x / S::kSplits, &t)) return;
    if (threadIdx.x == 0) sm.tile.Store(t);
    step = {t.kv_head * p.seq.group, t.first_tile};
    any = t.first_tile < t.end_tile;
    if (any) {
      CopyKeys<S>(sm.k, t, p.k, p.k_stride, p.seq.head_dim);
      CopyKeys<S>(sm.v, t, p.v, p.v_stride, p.seq.v_dim);
      CopyQueries(p, sm, t.sequence, step);
      CopyGradients(p, sm, t.sequence, step);
    }
    CopyCommit();
  }

  float dk[S::kTiles][S::kOwned / 2] = {}, dv[S::kTiles][S::kOwned / 2] = {};
  if (any) {
    if constexpr (S::kStages == 2) {
      RunStepsApart<S>(p, shared, step, split, dk, dv);
    } else {
      RunSteps<S>(p, shared, step, split, dk, dv);
    }
  }
  __syncthreads();  // The tile is there, even if no query sees its keys.
  const typename S::Tile t = BwdShared<S>(shared, 0).tile.Load();
  StoreKeys<S>(t, dv, 1.f, p.dv, p.dv_stride, p.seq.v_dim, split);
  StoreKeys<S>(t, dk, p.scale, p.dk, p.dk_stride, p.seq.head_dim, split);
}

template <class S>
Status LaunchAttentionBwd(const BwdParams& p, cudaStream_t stream) {
  const auto kernel = AttentionBwdKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  // Of the shape the other kernels read only what all shapes of its tiles share.
  using Rows = BwdShape<typename S::T, S::kHeadDim, S::kWarps, S::kShare, 1, false, false>;
  LaunchBwdAround<Rows, typename S::Keys>(p, stream, [&] {
    kernel<<<p.seq.kv_heads * p.key_tiles * S::kSplits, S::kThreads, S::kSharedBytes, stream>>>(p);
  });
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_CUH_
