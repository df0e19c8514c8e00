// attention_bwd_turns.cuh: key tiles that add to dQ in a fixed order.
//
// A tile waits until the tiles of later keys have added theirs.  CTAs of later
// keys start first, so that none waits for one that cannot run.  With a causal
// mask they are a step or two ahead by themselves, but the longest tiles are
// left for the end.
//
// first_keys_first: a tile waits for the tiles of earlier keys instead, and
// begins at its last queries.  Then the longest start first.  But a CTA must
// begin some steps after the one of the keys before, or it waits for it all the
// time.  sm90/attention_bwd.cc chooses.
//
// Each warp that adds counts for itself: its part of a step's dQ is the same in
// every tile.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_TURNS_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_TURNS_CUH_

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/memory.cuh"

namespace bellwether::kernels::cuda {

// The count of the key tiles whose dQ this warp has added to query tile m.
template <class S, class Tile>
__device__ __forceinline__ int* TurnOf(const AttentionBwdParams& p, const Tile& t, int m, int head, int warp) {
  const int64_t row = RowBase(p, t.sequence, head) + m * S::kRows;
  return p.turns + row / S::kRows * kTurnsOfStep + warp;
}

// By one thread.
template <class S, class Tile>
__device__ __forceinline__ void AwaitTurnAlone(const AttentionBwdParams& p, const Tile& t, int m, int head, int warp) {
  const int tile = t.key / S::kCols;
  const int mine = p.first_keys_first ? tile - FirstKey(p.seq, t.sequence, m * S::kRows) / S::kCols
                                      : LastKey(p.seq, t.sequence, (m + 1) * S::kRows - 1) / S::kCols - tile;
  const int* const turn = TurnOf<S>(p, t, m, head, warp);
  while (LoadAcquire(turn) != mine) {
  }
}

template <class S, class Tile>
__device__ __forceinline__ void AwaitTurn(const AttentionBwdParams& p, const Tile& t, int m, int head, int warp,
                                          int lane) {
  if (lane == 0) AwaitTurnAlone<S>(p, t, m, head, warp);
  __syncwarp();
}

// The next key tile may add its dQ.  Called a step after the additions, so that
// the fence finds them done.
template <class S, class Tile>
__device__ __forceinline__ void PassTurn(const AttentionBwdParams& p, const Tile& t, int m, int head, int warp,
                                         int lane) {
  __threadfence();
  __syncwarp();
  if (lane == 0) ReduceAddRelease(TurnOf<S>(p, t, m, head, warp), 1);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_TURNS_CUH_
