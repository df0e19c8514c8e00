// query_steps.cuh: in which order a CTA of the backward takes its queries.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_QUERY_STEPS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_QUERY_STEPS_CUH_

#include "cuda/attention_bwd_tiles.cuh"

namespace bellwether::kernels::cuda::sm90 {

// A step of a CTA: a query head of the group, from 0 on, and a query tile.  Head by head
// from the first queries on; or, where turns begin with the first keys, all heads of a
// query tile, from the last queries on: so all tiles that see them are as far.
struct QueryStep {
  int member, tile;
};

template <class S>
__device__ __forceinline__ QueryStep FirstQueryStep(const AttentionBwdParams& p, const BwdTile& t) {
  return {0, S::kGeneral && p.first_keys_first ? t.end_tile - 1 : t.first_tile};
}

template <class S>
__device__ __forceinline__ void Advance(const AttentionBwdParams& p, const BwdTile& t, QueryStep* step) {
  if (S::kGeneral && p.first_keys_first) {
    if (++step->member == p.seq.group) {
      step->member = 0;
      --step->tile;
    }
  } else if (++step->tile == t.end_tile) {
    step->tile = t.first_tile;
    ++step->member;
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_QUERY_STEPS_CUH_
