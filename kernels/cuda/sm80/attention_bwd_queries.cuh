// attention_bwd_queries.cuh: dQ = dS K of a step of the backward.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_QUERIES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_QUERIES_CUH_

#include "cuda/accumulator_sums.cuh"
#include "cuda/attention_bwd_turns.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm80/attention_bwd_layout.cuh"
#include "cuda/sm80/attention_params.h"
#include "cuda/sm80/products.cuh"

namespace bellwether::kernels::cuda::sm80 {

// dQ of a step, this warp's part, added to the sums.
template <class S>
__device__ __forceinline__ void AddQueries(const BwdParams& p, const BwdShared<S>& sm, const BwdStep& step, int split) {
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
    OuterStep<T, S::kQueryColumns>(dq, a, k, key, (split * S::kOutputs + S::QueryColumn(thread)) / 8);
    if constexpr (S::kRowSums) SumStep<T>(sums, 0, a);
  }
  const typename S::Tile t = sm.tile.Load();
  if (p.turns != nullptr) AwaitTurn<S>(p, t, step.tile, step.head, split * S::kWarps + thread / 32, lane);
  const int64_t row = RowBase(p, t.sequence, step.head) + step.tile * S::kRows;
  float flat[S::kQueryTiles * kCount];
#pragma unroll
  for (int i = 0; i < S::kQueryTiles * kCount; ++i) flat[i] = dq[i / kCount][i % kCount];
  AddToSums<S::kQueryTiles * kCount, S::kThreads>(p.dq_sum + row * S::kHeadDim + split * S::kRows * S::kOutputs, thread,
                                                  flat);
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

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_QUERIES_CUH_
