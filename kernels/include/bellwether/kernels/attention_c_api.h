/* attention_c_api.h: attention.h as a C99 interface; the rules of c_api.h. */

#ifndef BELLWETHER_KERNELS_ATTENTION_C_API_H_
#define BELLWETHER_KERNELS_ATTENTION_C_API_H_

#include "bellwether/kernels/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bw_attention_mode {
  BW_ATTENTION_FA = 0,
  BW_ATTENTION_HP = 1,
  BW_ATTENTION_HPM = 2
} bw_attention_mode;

typedef struct bw_attention_forward_params {
  uint32_t struct_size;
  uint32_t backend; /* bw_backend */
  uint32_t dtype;   /* bw_dtype of q, k, v, o */
  uint32_t mode;    /* bw_attention_mode */
  void* stream;
  int64_t batch, heads, kv_heads, q_len, k_len, head_dim;
  bw_tensor4 q;    /* [batch][heads][q_len][head_dim] */
  bw_tensor4 k, v; /* [batch][kv_heads][k_len][head_dim] */
  bw_tensor4 o;    /* out, like q */
  bw_tensor4 o_lo; /* out, bf16, like q; data NULL = not wanted; not with FA */
  float* lse;      /* out: [batch][heads][q_len], natural log */
  int64_t lse_batch_stride, lse_head_stride;
  float scale;
  float softcap;  /* 0 */
  int32_t window; /* 0 */
  uint8_t causal; /* 1: key j is allowed for row t if j <= t + k_len - q_len */
  uint8_t reserved[3];
  void* workspace; /* bw_attention_forward_workspace() bytes, or NULL */
  uint64_t workspace_bytes;
} bw_attention_forward_params;

BW_KERNELS_EXPORT uint64_t
bw_attention_forward_workspace(const bw_attention_forward_params* params);
BW_KERNELS_EXPORT bw_kernel_status bw_attention_forward(const bw_attention_forward_params* params);

typedef struct bw_attention_backward_params {
  uint32_t struct_size;
  uint32_t reserved;
  bw_attention_forward_params forward; /* as it was called */
  bw_tensor4 d_o;                      /* like q */
  bw_tensor4 dq, dk, dv;               /* out; like q, k, v */
  void* workspace;                     /* bw_attention_backward_workspace() bytes */
  uint64_t workspace_bytes;
} bw_attention_backward_params;

BW_KERNELS_EXPORT uint64_t
bw_attention_backward_workspace(const bw_attention_forward_params* params);
BW_KERNELS_EXPORT bw_kernel_status
bw_attention_backward(const bw_attention_backward_params* params);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* BELLWETHER_KERNELS_ATTENTION_C_API_H_ */
