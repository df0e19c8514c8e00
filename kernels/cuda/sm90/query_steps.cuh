// query_steps.cuh: in which order a CTA of the backward takes its queries.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_QUERY_STEPS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_QUERY_STEPS_CUH_

#include "cuda/attention_bwd_tiles.cuh"

namespace bellwether::kernels::cuda::sm90 {

// A step of a CTA: a query head of the group, from 0 on, and a query tile.  p.tile_step 0:
// head by head, from the first queries on.  1 or -1: all heads of a query tile, from the
// first or the last queries on.  From the last on, all CTAs of a kv head, whose tiles of
// keys are seen by more or by fewer queries, read the same queries at the same time.
// Shared steps are dealt out in turn, so that this holds for all shares.
struct QueryStep {
  int member, tile;
};

// `by` steps on.
__device__ __forceinline__ void AdvanceByTiles(const AttentionBwdParams& p, int by, QueryStep* step) {
  step->member += by;
  while (step->member >= p.seq.group) {
    step->member -= p.seq.group;
    step->tile += p.tile_step;
  }
}

template <class Tile>
__device__ __forceinline__ QueryStep FirstQueryStep(const AttentionBwdParams& p, const Tile& t) {
  QueryStep step = {0, p.tile_step < 0 ? t.end_tile - 1 : t.first_tile};
  if (p.tile_step != 0) AdvanceByTiles(p, t.share, &step);
  return step;
}

template <class Tile>
__device__ __forceinline__ void Advance(const AttentionBwdParams& p, const Tile& t, QueryStep* step) {
  if (p.tile_step != 0) {
    AdvanceByTiles(p, p.shares, step);
  } else if (++step->tile == t.end_tile) {
    step->tile = t.first_tile;
    ++step->member;
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_QUERY_STEPS_CUH_
