// attention_fwd_params.h: what the forward kernel needs beside its tensor maps.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PARAMS_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PARAMS_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "bellwether/kernels/status.h"

namespace bellwether::kernels::cuda::sm90 {

struct FwdStrides {
  int64_t batch, head, token;  // in elements of 2 bytes
};

struct FwdParams {
  void* o;
  void* o_lo;  // bf16, or null
  float* lse;
  FwdStrides o_stride, o_lo_stride;
  int64_t lse_batch_stride, lse_head_stride;
  int* counter;  // zeroed; null = tiles are taken round robin
  int batch, heads, group, q_len, k_len;
  int row_tiles;  // tiles of query rows per head
  int tiles;      // batch * heads * row_tiles
  int section;    // (batch, head) pairs that run together, for L2
  float scale_log2;
  bool causal;
};

// Tensor maps {head_dim, token, head, batch}: boxes of 64 columns, kRows or kCols
// tokens, 128-byte swizzle, zeros outside.
struct FwdMaps {
  CUtensorMap q, k, v;
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_PARAMS_H_
