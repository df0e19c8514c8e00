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
  BW_ATTENTION_HPM = 2,
  BW_ATTENTION_PAPER = 3,
  BW_ATTENTION_SR = 4,
  BW_ATTENTION_HP_NOLT = 5,
  BW_ATTENTION_LT = 6
} bw_attention_mode;

typedef struct bw_attention_forward_params {
  uint32_t struct_size;
  uint32_t backend; /* bw_backend */
  uint32_t dtype;   /* bw_dtype of q, k, v, o */
  uint32_t mode;    /* bw_attention_mode */
  void* stream;
  int64_t batch, heads, kv_heads, q_len, k_len, head_dim;
  bw_tensor4 q;    /* [batch][heads][q_len][head_dim] */
  bw_tensor4 k, v; /* [batch][kv_heads][k_len][head_dim, of v v_dim] */
  bw_tensor4 o;    /* out: [batch][heads][q_len][v_dim] */
  bw_tensor4 o_lo; /* out, bf16, like o; data NULL = not wanted; HP, HPM, HP_NOLT only */
  float* lse;      /* out: [batch][heads][q_len], natural log */
  float* anchor;   /* out, strides as lse; with rounded_sum: HPM, else NULL */
  float* rounded_sum;
  int64_t lse_batch_stride, lse_head_stride;
  const int32_t* cu_seqlens_q; /* [sequences + 1], both or none */
  const int32_t* cu_seqlens_k;
  int64_t sequences; /* 0 without cu_seqlens */
  float* stats;      /* added to: [BW_PROBE_STAT_COUNT][heads], or NULL */
  int64_t stat_stride;
  uint64_t seed; /* SR, and which rows the statistics count */
  float scale;
  float softcap;    /* 0 = none */
  float paper_eps;  /* PAPER: 1e-3 */
  float paper_beta; /* PAPER: 2 */
  int32_t window;   /* keys; 0 = none */
  uint32_t threads; /* CPU: as in bw_probe_params */
  uint8_t causal;   /* 1: key j is allowed for row t if j <= t + k_len - q_len */
  uint8_t reserved[3];
  uint32_t stats_every; /* one block of 384 rows in so many counts; 1 = all rows, 0 = 16 */
  void* workspace;      /* bw_attention_forward_workspace() bytes, or NULL */
  uint64_t workspace_bytes;
  int64_t v_dim;             /* 0 = head_dim */
  const int32_t* key_bounds; /* NULL, or [batch][2]: the first key and the one behind the last; not with cu_seqlens */
  const void* mask;    /* NULL, or [batch][heads][q_len][k_len]: BW_BOOL, 0 = hidden, or added to the scores; not with
                          cu_seqlens */
  uint32_t mask_dtype; /* bw_dtype */
  uint32_t reserved2;
  int64_t mask_batch_stride, mask_head_stride, mask_row_stride, mask_key_stride;
  const float* sinks; /* NULL, or [heads] logits */
} bw_attention_forward_params;

BW_KERNELS_EXPORT uint64_t bw_attention_forward_workspace(const bw_attention_forward_params* params);
BW_KERNELS_EXPORT bw_kernel_status bw_attention_forward(const bw_attention_forward_params* params);

typedef struct bw_attention_backward_params {
  uint32_t struct_size;
  uint8_t center;        /* 1: the gradient for k - mean(k) */
  uint8_t deterministic; /* 1: dq repeats bit for bit */
  uint8_t reserved[2];
  bw_attention_forward_params forward; /* as it was called; what follows lies behind its struct_size */
  bw_tensor4 d_o;                      /* like o */
  bw_tensor4 dq, dk, dv;               /* out; like q, k, v */
  void* workspace;                     /* bw_attention_backward_workspace() bytes */
  uint64_t workspace_bytes;
  float* d_sinks; /* out: [heads]; NULL = not wanted, and without sinks */
} bw_attention_backward_params;

BW_KERNELS_EXPORT uint64_t bw_attention_backward_workspace(const bw_attention_forward_params* params);
BW_KERNELS_EXPORT bw_kernel_status bw_attention_backward(const bw_attention_backward_params* params);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* BELLWETHER_KERNELS_ATTENTION_C_API_H_ */
