// attention_bwd_params.h: what the backward kernels need beside tensor maps.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARAMS_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARAMS_H_

#include "cuda/sm90/attention_fwd_params.h"

namespace bellwether::kernels::cuda::sm90 {

struct BwdParams {
  const void *o, *o_lo, *d_o;  // o_lo: bf16, or null
  const float* lse;
  void *dq, *dk, *dv;
  FwdStrides o_stride, o_lo_stride, d_o_stride, dq_stride, dk_stride, dv_stride;
  int64_t lse_batch_stride, lse_head_stride;
  // Workspace.  [batch * heads][q_padded]: L in log2 units, +inf where P must be
  // 0; delta.  [batch * heads][q_padded * head_dim]: dQ / scale, each tile in the
  // order of the accumulators.
  float *lse_log2, *delta, *dq_sum;
  int batch, heads, kv_heads, group, q_len, k_len, q_padded;
  int kv_tiles;  // per head
  int section;   // (batch, kv head) pairs that run together, for L2
  float scale, scale_log2;
  bool causal;
};

struct BwdMaps {
  CUtensorMap q, k, v, d_o;
};

// Query rows of a workspace array are padded to a multiple of this.
inline constexpr int kBwdRowPadding = 128;

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARAMS_H_
