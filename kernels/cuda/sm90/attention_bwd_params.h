// attention_bwd_params.h: what the Hopper backward adds to the shared parameters.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARAMS_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARAMS_H_

#include <cuda.h>

#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda::sm90 {

// Rows of a workspace array are padded so that every sequence begins at a
// multiple of this.
inline constexpr int kBwdRowPadding = 128;
// Keys a CTA, and keys that are summed together for their mean.
inline constexpr int kBwdKeys = 128;
inline constexpr int kMeanKeys = 256;

struct BwdParams : AttentionBwdParams {
  // Workspace, by padded row: L in log2 units, or the anchor; +inf where P must be
  // 0.  1 / lt.  delta.  rowsum(dS), null if nobody asks.
  float *lse_log2, *inverse, *delta, *ds_sum;
  // [row][64 or 128]: dQ / scale, each tile in the order of the accumulators.
  float* dq_sum;
  // [row / rows of a step][8 warps]: key tiles that have been added; or null.
  int* turns;
  // [kv head][chunk][head_dim]: sums over kMeanKeys keys; [kv head][sequence]
  // [head_dim]: their mean.
  float *key_sums, *key_mean;
  int64_t rows_per_head, rows_per_sequence;  // padded; the latter 0 if packed
  int key_tiles;                             // numbers of tiles of one kv head
  int chunks;                                // of kMeanKeys keys, of one kv head
  bool center;
  int section_queries;  // of the (sequence, kv head) pairs that run together, for L2
};

struct BwdMaps {
  CUtensorMap q, k, v, d_o;
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARAMS_H_
