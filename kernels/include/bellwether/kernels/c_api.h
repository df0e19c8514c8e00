/* c_api.h: the kernels as a C99 interface, for ctypes and for C.

   Rules:
   (1) Every function returns a bw_kernel_status; bw_kernels_last_error() says
       in one sentence what was wrong with the last failing call of this
       thread: field, value, legal range.  Then nothing was written.
   (2) Nothing is allocated that outlives a call, nothing is printed, nothing
       is thrown.  On a CUDA device work is enqueued on the caller's stream and
       nothing synchronizes; on the CPU it is done when the call returns.
   (3) Strides count elements.  Structs start with struct_size = sizeof of the
       caller's struct.  Where a longer one goes on behind this library's it must
       be zero; what a shorter one of an older header lacks counts as zero.
   (4) Any thread; calls that write the same memory must not overlap. */

#ifndef BELLWETHER_KERNELS_C_API_H_
#define BELLWETHER_KERNELS_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BW_KERNELS_EXPORT __attribute__((visibility("default")))
#else
#define BW_KERNELS_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define BW_KERNELS_API_VERSION_MAJOR 1
#define BW_KERNELS_API_VERSION_MINOR 12

typedef enum bw_kernel_status {
  BW_KERNEL_OK = 0,
  BW_KERNEL_INVALID_ARGUMENT = 1,
  BW_KERNEL_UNSUPPORTED = 2, /* Legal, but not built for this shape or type. */
  BW_KERNEL_UNAVAILABLE = 3, /* This build or machine has no such device. */
  BW_KERNEL_DEVICE_ERROR = 4
} bw_kernel_status;

typedef enum bw_dtype { BW_F32 = 0, BW_BF16 = 1, BW_F16 = 2, BW_BOOL = 3 /* masks alone; 1 byte */ } bw_dtype;
typedef enum bw_backend { BW_CPU = 0, BW_CUDA = 1 } bw_backend;

/* (major << 16) | minor of the library. */
BW_KERNELS_EXPORT uint32_t bw_kernels_abi_version(void);
/* Valid until this thread's next failing call; "" before the first. */
BW_KERNELS_EXPORT const char* bw_kernels_last_error(void);
/* 1 if the kernels that are built for the backend can run in this process, BW_CUDA: on
   the current device; else 0.  BW_CUDA has all but bw_increment_rank(), which has no
   backend to choose. */
BW_KERNELS_EXPORT int bw_kernels_available(uint32_t backend);

/* A [batch][head][token][head_dim] view; the last stride must be 1. */
typedef struct bw_tensor4 {
  const void* data; /* NULL = absent */
  int64_t batch_stride, head_stride, token_stride;
} bw_tensor4;

/* ---- gates ----
   A call that is captured into a CUDA graph runs whenever the graph does.  With a gate it
   looks first, each time: gate[0] = 0 and it writes nothing; gate[1] is added to the seed of
   the rows, so that each run samples other ones.  On the CPU it looks when it is called. */

/* ---- the statistics probe (probe.h is its specification) ---- */

/* One float per query head each, [heads] apart by `stat_stride`.  Order of the
   rows of bw_probe_params.out. */
typedef enum bw_probe_stat {
  BW_PROBE_ROWS = 0,
  BW_PROBE_COMMON_MODE_SUM,
  BW_PROBE_SPREAD_SUM,
  BW_PROBE_TIED_ROWS_BF16,
  BW_PROBE_TIED_ROWS_EPS,
  BW_PROBE_TIED_ROWS_EPS_PAPER,
  BW_PROBE_SATURATED_ROWS,
  BW_PROBE_LOGIT_MAX, /* max, not sum; initialise with -inf */
  BW_PROBE_ENTROPY_SUM,
  BW_PROBE_SINK_SUM,
  BW_PROBE_NONFINITE_ROWS,
  BW_PROBE_DELTA_BIAS_SUM, /* these four only with v, o and d_o */
  BW_PROBE_DELTA_BIAS_SUMSQ,
  BW_PROBE_DELTA_ABS_SUM,
  BW_PROBE_DELTA_ERROR_ABS_SUM,
  BW_PROBE_STAT_COUNT
} bw_probe_stat;

typedef enum bw_probe_kv_stat {
  BW_PROBE_KV_SEQUENCES = 0,
  BW_PROBE_KV_KEY_COHERENCE_SUM,
  BW_PROBE_KV_STAT_COUNT
} bw_probe_kv_stat;

typedef struct bw_probe_params {
  uint32_t struct_size;
  uint32_t backend; /* bw_backend */
  uint32_t dtype;   /* bw_dtype of q, k, v, o, d_o */
  uint32_t threads; /* CPU: 0..256, at most so many; 0 = one */
  void* stream;     /* CUDA */
  int64_t batch, heads, kv_heads, q_len, k_len, head_dim, v_dim;
  bw_tensor4 q, k;      /* [batch][heads][q_len][head_dim], [..][kv_heads][k_len][..] */
  bw_tensor4 v, o, d_o; /* all three or none; o as the op returned it */
  float scale;          /* of the scores; finite, > 0 */
  float softcap;        /* 0 = none */
  uint8_t causal;       /* 1: keys up to the diagonal; key t + k_len - q_len is row t's */
  uint8_t drift_only;   /* 1: rows, common mode, spread, nonfinite and kv_out alone; no v, o, d_o */
  uint8_t reserved[2];
  int32_t window;         /* 0 = none; else only later keys than the diagonal - window */
  uint32_t rows_per_head; /* 0 = every row; else that many hashed strata */
  uint64_t seed;          /* Of the row hash: the same on all tensor-parallel ranks */
  int64_t head_offset;    /* Global id of head 0, enters the hash. */
  int64_t stat_stride;    /* Floats between two statistics in `out`, >= heads */
  float* out;             /* [BW_PROBE_STAT_COUNT][heads]; added to (max for logit) */
  int64_t kv_stat_stride;
  float* kv_out;        /* [BW_PROBE_KV_STAT_COUNT][kv_heads], added to; NULL = no */
  const uint64_t* gate; /* NULL, or [2] in memory of the device: see "gates" */
  /* Since 1.2.  Strides of 0 broadcast.  What is allowed by all parts is allowed. */
  uint8_t top_left;       /* 1: the diagonal is key t of row t */
  uint8_t mask_by_sample; /* 1: rows of the mask are the sampled rows; no gate then */
  uint8_t reserved2[2];
  int32_t window_right;  /* 0 = none; else only earlier keys than the diagonal + window_right */
  const int32_t* ranges; /* NULL, or [batch][q_len][3]: begin, end, diagonal of each row */
  int64_t range_batch_stride, range_row_stride;
  const void* mask;    /* NULL, or [batch][heads][q_len][k_len]: BW_BOOL, 0 = hidden, or added to the scores */
  uint32_t mask_dtype; /* bw_dtype */
  uint32_t reserved3;
  int64_t mask_batch_stride, mask_head_stride, mask_row_stride, mask_key_stride;
  const uint8_t* visible; /* [batch][heads][k_len], 0 = no row sees the key; with ranges or mask not NULL */
  int64_t visible_batch_stride, visible_head_stride, visible_key_stride;
  const float* sinks; /* NULL, or [heads] logits in the softmax's sum */
} bw_probe_params;

BW_KERNELS_EXPORT bw_kernel_status bw_probe(const bw_probe_params* params);

/* The row that stands for `stratum` of 0..strata-1 when rows_per_head = strata
   < q_len: the hash is written out in probe.h.  head is the global head.  -1
   unless 1 <= strata <= q_len < 2^31 and stratum < strata. */
BW_KERNELS_EXPORT int64_t bw_probe_sampled_row(uint64_t seed, uint64_t batch, uint64_t head, uint64_t stratum,
                                               uint64_t strata, uint64_t q_len);

/* ---- the laws of attention, since 1.5 (attention_laws.h is their specification) ---- */

/* Rows of bw_attention_laws_params.out, [heads] each. */
typedef enum bw_law_head_stat {
  BW_LAW_DO_SUM = 0,
  BW_LAW_DO_ABS_SUM,
  BW_LAW_DO_SUMSQ,
  BW_LAW_DO_NONFINITE,
  BW_LAW_DQ_SUM,
  BW_LAW_DQ_ABS_SUM,
  BW_LAW_DQ_SUMSQ,
  BW_LAW_DQ_NONFINITE,
  BW_LAW_ROWS_LEFT_OUT,
  BW_LAW_HEAD_STAT_COUNT
} bw_law_head_stat;

/* Rows of bw_attention_laws_params.kv_out, [kv_heads] each. */
typedef enum bw_law_kv_stat {
  BW_LAW_A1 = 0, /* 8 projections */
  BW_LAW_A2 = 8, /* 8 projections */
  BW_LAW_A3 = 16,
  BW_LAW_A4,
  BW_LAW_A1_VARIANCE,
  BW_LAW_A2_VARIANCE,
  BW_LAW_A3_VARIANCE,
  BW_LAW_A4_VARIANCE,
  BW_LAW_A1_ALIKE,
  BW_LAW_A2_ALIKE,
  BW_LAW_A3_ALIKE,
  BW_LAW_A4_ALIKE,
  BW_LAW_DK_SUM,
  BW_LAW_DK_ABS_SUM,
  BW_LAW_DK_SUMSQ,
  BW_LAW_DK_NONFINITE,
  BW_LAW_DV_SUM,
  BW_LAW_DV_ABS_SUM,
  BW_LAW_DV_SUMSQ,
  BW_LAW_DV_NONFINITE,
  BW_LAW_KV_STAT_COUNT
} bw_law_kv_stat;

/* How the kernel that made the tensors rounds. */
typedef enum bw_law_arithmetic {
  BW_LAW_FUSED = 0,      /* P and dS before products, results at the end */
  BW_LAW_COMPOSED = 1,   /* scores and dP, too: attention out of matrix products */
  BW_LAW_ACCUMULATED = 2 /* dk and dv each time some rows are added: PyTorch's flash attention for CPUs */
} bw_law_arithmetic;

typedef struct bw_attention_laws_params {
  uint32_t struct_size;
  uint32_t arithmetic; /* bw_law_arithmetic */
  /* The call as bw_probe() takes it, with v, o and d_o, and without drift_only.  Of it stat_stride,
     out, kv_stat_stride and kv_out are not read. */
  const bw_probe_params* call;
  bw_tensor4 d_q;      /* [batch][heads][q_len][head_dim], as the op returned it */
  bw_tensor4 d_k;      /* [batch][kv_heads][k_len][head_dim] */
  bw_tensor4 d_v;      /* [batch][kv_heads][k_len][v_dim] */
  int64_t stat_stride; /* floats between two rows of `out`, >= heads */
  float* out;          /* [BW_LAW_HEAD_STAT_COUNT][heads], added to */
  int64_t kv_stat_stride;
  float* kv_out; /* [BW_LAW_KV_STAT_COUNT][kv_heads], added to */
} bw_attention_laws_params;

/* BW_F32: the laws' rows (of kv_out all before BW_LAW_DK_SUM) are not written. */
BW_KERNELS_EXPORT bw_kernel_status bw_attention_laws(const bw_attention_laws_params* params);

/* Of one tensor X beside its reference; rows of bw_attention_shadow_params.out: those of o, then
   those of dq; of kv_out: those of dk, then those of dv. */
typedef enum bw_shadow_stat {
  BW_SHADOW_DOT = 0,
  BW_SHADOW_GOT_SUMSQ,
  BW_SHADOW_REF_SUMSQ,
  BW_SHADOW_REST,
  BW_SHADOW_VARIANCE,
  BW_SHADOW_VARIANCE_SQ,
  BW_SHADOW_TENSOR_STAT_COUNT,
  BW_SHADOW_STAT_COUNT = 2 * BW_SHADOW_TENSOR_STAT_COUNT
} bw_shadow_stat;

/* Rows of bw_attention_shadow_params.factors: those of o, then those of dq; of kv_factors: those of dk,
   then those of dv.  All 0 with BW_F32.  Since 1.8. */
typedef enum bw_factor_stat {
  BW_FACTOR = 0, /* a tensor's factor less 1, times BW_FACTOR_VARIANCE */
  BW_FACTOR_VARIANCE,
  BW_FACTOR_ALIKE,
  BW_FACTOR_TENSOR_STAT_COUNT,
  BW_FACTOR_STAT_COUNT = 2 * BW_FACTOR_TENSOR_STAT_COUNT
} bw_factor_stat;

typedef struct bw_attention_shadow_params {
  uint32_t struct_size;
  uint32_t arithmetic;
  const bw_probe_params* call; /* as above */
  bw_tensor4 d_q, d_k, d_v;
  int64_t stat_stride;
  float* out; /* [BW_SHADOW_STAT_COUNT][heads], added to */
  int64_t kv_stat_stride;
  float* kv_out;          /* [BW_SHADOW_STAT_COUNT][kv_heads], added to */
  uint32_t keys_per_head; /* that many hashed strata of the keys; 0 = none, and kv_out stays as it is */
  uint32_t reserved;
  /* Since 1.8.  Added to, with the strides above; both NULL: not wanted. */
  float* factors;    /* [BW_FACTOR_STAT_COUNT][heads] */
  float* kv_factors; /* [BW_FACTOR_STAT_COUNT][kv_heads]; stays as it is without keys */
} bw_attention_shadow_params;

BW_KERNELS_EXPORT bw_kernel_status bw_attention_shadow(const bw_attention_shadow_params* params);

/* ---- key-gradient leak ---- */

typedef struct bw_key_leak_params {
  uint32_t struct_size;
  uint32_t backend, dtype, threads;
  void* stream;
  int64_t batch, kv_heads, k_len, head_dim;
  bw_tensor4 d_k;       /* As the kernel returned it, before repeat_kv's sum. */
  float* leak_sum;      /* [kv_heads], added to: norm(sum_j dK_j) per sequence */
  float* gradient_sum;  /* [kv_heads], added to: sum_j norm(dK_j) */
  const uint64_t* gate; /* NULL, or [2] in memory of the device: see "gates" */
} bw_key_leak_params;

BW_KERNELS_EXPORT bw_kernel_status bw_key_leak(const bw_key_leak_params* params);

/* ---- sums of products, for the laws of linear layers (law_products.h is the specification) ----
   Since 1.6. */

/* One double each of a product, in this order. */
typedef enum bw_law_product_stat {
  BW_LAW_PRODUCT_SUM = 0,    /* sum of x y */
  BW_LAW_PRODUCT_ABS_SUM,    /* sum of |x y| */
  BW_LAW_PRODUCT_X_VARIANCE, /* sum of (ulp(x) y)^2 / 12; not with BW_GRID_NONE */
  BW_LAW_PRODUCT_Y_VARIANCE, /* sum of (x ulp(y))^2 / 12 */
  BW_LAW_PRODUCT_X_NONFINITE,
  BW_LAW_PRODUCT_Y_NONFINITE,
  BW_LAW_PRODUCT_STAT_COUNT
} bw_law_product_stat;

/* The numbers that elements were rounded to. */
typedef enum bw_grid { BW_GRID_NONE = 0, BW_GRID_F32 = 1, BW_GRID_TF32 = 2, BW_GRID_BF16 = 3, BW_GRID_F16 = 4 } bw_grid;

typedef struct bw_law_operand {
  const void* data;
  uint32_t dtype;     /* bw_dtype */
  uint32_t grid;      /* bw_grid */
  int64_t strides[3]; /* >= 0; 0 broadcasts */
} bw_law_operand;

typedef struct bw_law_product {
  int64_t extents[3]; /* 0..2^31-1 each, 2^48 elements together */
  bw_law_operand x, y;
} bw_law_product;

typedef struct bw_law_products_params {
  uint32_t struct_size;
  uint32_t backend, threads;
  uint32_t reserved;
  void* stream;
  int64_t count;                  /* 1..16 */
  const bw_law_product* products; /* [count], in host memory */
  double* out;                    /* [count][BW_LAW_PRODUCT_STAT_COUNT], added to */
} bw_law_products_params;

BW_KERNELS_EXPORT bw_kernel_status bw_law_products(const bw_law_products_params* params);

/* ---- sums of a matrix, for the laws whose sums are zero (law_sums.h is the specification) ----
   Since 1.7. */

/* Doubles of a result, in this order. */
typedef enum bw_law_sum_stat {
  BW_LAW_SUM_SUM = 0,
  BW_LAW_SUM_ABS_SUM,
  BW_LAW_SUM_ULP_SUM,
  BW_LAW_SUM_VARIANCE, /* sum of ulp^2 / 12 */
  BW_LAW_SUM_LOW_BITS, /* BW_F32: elements that no BW_BF16 equals */
  BW_LAW_SUM_STAT_COUNT
} bw_law_sum_stat;

typedef struct bw_law_sums_params {
  uint32_t struct_size;
  uint32_t backend, dtype, threads;
  void* stream;
  int64_t kept, summed;               /* 0..2^31-1 each, 2^48 elements together; a result for each kept one */
  int64_t kept_stride, summed_stride; /* elements, >= 0 */
  const void* data;
  double* out; /* [kept][BW_LAW_SUM_STAT_COUNT], added to */
} bw_law_sums_params;

BW_KERNELS_EXPORT bw_kernel_status bw_law_sums(const bw_law_sums_params* params);

/* ---- norms, extremes and counts of parameters (tensor_stats.h is the specification) ----
   Since 1.9. */

/* Doubles of a tensor, in this order. */
typedef enum bw_tensor_stat {
  BW_TENSOR_ELEMENTS = 0,
  BW_TENSOR_GRAD_SUMSQ,
  BW_TENSOR_GRAD_MAX,
  BW_TENSOR_GRAD_NONFINITE,
  BW_TENSOR_GRAD_ZEROS,
  BW_TENSOR_WEIGHT_SUMSQ,
  BW_TENSOR_WEIGHT_MAX,
  BW_TENSOR_WEIGHT_NONFINITE,
  BW_TENSOR_WEIGHT_BITS, /* modulo 2^52; equal before and after: nothing has moved */
  BW_TENSOR_CHANGE_SUMSQ,
  BW_TENSOR_CHANGED,
  BW_TENSOR_LAG_SUM, /* sum of g^2 / max(vhat, eps^2) */
  BW_TENSOR_DOT,     /* sum of g m */
  BW_TENSOR_MOMENT_SUMSQ,
  BW_TENSOR_STAT_COUNT
} bw_tensor_stat;

typedef struct bw_tensor_part {
  const void* data; /* [elements], dense; NULL = absent */
  uint32_t dtype;   /* bw_dtype */
  uint32_t reserved;
} bw_tensor_part;

typedef struct bw_tensor_of_step {
  int64_t elements;                                    /* 0..2^40 */
  bw_tensor_part grad, weight, before, moment, second; /* before: the weight before the step */
  double beta2, eps;                                   /* of the second moment */
  double steps;          /* number of the coming step, from 1 on, or what is added to *steps_at */
  const float* steps_at; /* NULL, or in memory of the device */
} bw_tensor_of_step;

typedef struct bw_tensor_stats_params {
  uint32_t struct_size;
  uint32_t backend, threads;
  uint32_t reserved;
  void* stream;
  int64_t count;                    /* 0..2^20 */
  const bw_tensor_of_step* tensors; /* [count], in host memory */
  const float* scale;               /* NULL = 1, or what the loss was multiplied by, in memory of the device */
  double* out;                      /* [count][BW_TENSOR_STAT_COUNT], written */
  void* workspace;                  /* BW_CUDA: bw_tensor_stats_workspace_bytes() in memory of the device */
} bw_tensor_stats_params;

/* Of count and the tensors' elements; 0 if one is illegal, or there is no tensor. */
BW_KERNELS_EXPORT uint64_t bw_tensor_stats_workspace_bytes(const bw_tensor_stats_params* params);
BW_KERNELS_EXPORT bw_kernel_status bw_tensor_stats(const bw_tensor_stats_params* params);

/* ---- how far gradients are beyond second moments, over steps (moment_lag.h is the specification) ----
   Since 1.12. */

/* Doubles of a part, both 0 at first. */
typedef enum bw_moment_lag_stat {
  BW_MOMENT_LAG_MAX = 0,   /* largest of all calls: sum of g^2 / max(vhat, eps^2), over count */
  BW_MOMENT_LAG_SATURATED, /* of all calls: elements of g, NaN, infinite or as large as their type can hold */
  BW_MOMENT_LAG_STAT_COUNT
} bw_moment_lag_stat;

typedef struct bw_moment_lag_part {
  const void* grad;                  /* elements 0, stride, 2 stride, ...; NULL: left out of this call */
  const void* second;                /* elements of v before the coming step */
  uint32_t grad_dtype, second_dtype; /* bw_dtype */
  int64_t count;                     /* 1..2^20 */
  int64_t stride;                    /* 1..2^40 */
  double beta2, eps;                 /* of the second moment */
  double steps;                      /* number of the coming step, from 1 on, or what is added to *steps_at */
  const float* steps_at;             /* NULL, or in memory of the device */
} bw_moment_lag_part;

typedef struct bw_moment_lags_params {
  uint32_t struct_size;
  uint32_t backend;
  void* stream;
  int64_t count;                   /* 0..16 */
  const bw_moment_lag_part* parts; /* [count], in host memory */
  const float* scale;              /* NULL = 1, or what the loss was multiplied by, in memory of the device */
  const float* skip;               /* in memory of the device: above 0 nothing is written; NULL = 0 */
  double* out;                     /* [count][BW_MOMENT_LAG_STAT_COUNT], updated */
} bw_moment_lags_params;

BW_KERNELS_EXPORT bw_kernel_status bw_moment_lags(const bw_moment_lags_params* params);

/* ---- what the laws of modules need (law_modules.h is the specification) ----
   Since 1.10. */

/* The rows of a matrix; elements of a row lie together. */
typedef struct bw_law_matrix {
  const void* data;
  uint32_t dtype; /* bw_dtype */
  uint32_t reserved;
  int64_t row_stride; /* elements, >= 0 */
} bw_law_matrix;

#define BW_LAW_PARTS_MAX 4

/* Doubles of a row, in this order: a law's difference, its variance by independent roundings, and
   what roundings may move it by otherwise. */
typedef enum bw_law_norm_row {
  BW_LAW_NORM_SCALE_DIFFERENCE = 0,
  BW_LAW_NORM_SCALE_VARIANCE,
  BW_LAW_NORM_SCALE_ALIKE,
  BW_LAW_NORM_MEAN_DIFFERENCE, /* these three: 0 if the mean is not taken off */
  BW_LAW_NORM_MEAN_VARIANCE,
  BW_LAW_NORM_MEAN_ALIKE,
  BW_LAW_NORM_OFF, /* the mean by the root of the mean square */
  BW_LAW_NORM_ROW_COUNT
} bw_law_norm_row;

/* Doubles of a feature. */
typedef enum bw_law_norm_feature {
  BW_LAW_NORM_SUM = 0, /* of (y - shift) dy */
  BW_LAW_NORM_VARIANCE,
  BW_LAW_NORM_ALIKE,
  BW_LAW_NORM_ABS_SUM,
  BW_LAW_NORM_FEATURE_COUNT
} bw_law_norm_feature;

typedef struct bw_law_norms_params {
  uint32_t struct_size;
  uint32_t backend, threads;
  uint32_t centred; /* 1: the mean of x is taken off; 0 */
  void* stream;
  int64_t rows, n; /* 0..2^31-1 each, 2^48 elements together */
  bw_law_matrix x, y;
  bw_law_matrix d_x[BW_LAW_PARTS_MAX], d_y[BW_LAW_PARTS_MAX]; /* gradients, in parts that add up to them */
  uint32_t d_x_parts, d_y_parts;                              /* 1..BW_LAW_PARTS_MAX */
  const double* gain;                                         /* [n] */
  const double* shift;                                        /* [n] */
  double eps;                                                 /* >= 0 */
  double inside;         /* >= 0: what sums and roots inside may add, of the product of the norms */
  double* row_stats;     /* [BW_LAW_NORM_ROW_COUNT][rows], written */
  double* feature_stats; /* [BW_LAW_NORM_FEATURE_COUNT][n], added to */
  double* rest;          /* [2], added to: squares of what the formula does not explain of y, and of y */
} bw_law_norms_params;

BW_KERNELS_EXPORT bw_kernel_status bw_law_norms(const bw_law_norms_params* params);

/* Doubles of a row of logits. */
typedef enum bw_law_logit_stat {
  BW_LAW_LOGIT_UNSURE = 0, /* 1 - p of the likeliest class */
  BW_LAW_LOGIT_ROUNDINGS,  /* what all p of it may be off, in units of a rounding of log p */
  BW_LAW_LOGIT_STAT_COUNT
} bw_law_logit_stat;

typedef struct bw_law_logits_params {
  uint32_t struct_size;
  uint32_t backend, threads;
  uint32_t reserved;
  void* stream;
  int64_t rows, classes; /* 0..2^31-1 each, 2^48 elements together */
  bw_law_matrix z;
  double* out; /* [BW_LAW_LOGIT_STAT_COUNT][rows], written */
} bw_law_logits_params;

BW_KERNELS_EXPORT bw_kernel_status bw_law_logits(const bw_law_logits_params* params);

#define BW_EQUAL_GROUPS 4 /* of columns that a row is known by, four each */

/* Doubles of a group. */
typedef enum bw_law_equal_stat {
  BW_LAW_EQUAL_THERE = 0, /* rows of which not all columns are zero */
  BW_LAW_EQUAL_ALIKE,     /* sum over them of the rows that are like the row */
  BW_LAW_EQUAL_STAT_COUNT
} bw_law_equal_stat;

typedef struct bw_law_equal_rows_params {
  uint32_t struct_size;
  uint32_t backend, dtype, threads;
  void* stream;
  int64_t rows, width;               /* 0..2^30, 0..2^31-1 */
  int64_t row_stride, column_stride; /* elements, >= 0 */
  const void* data;
  void* scratch; /* BW_CUDA: bw_law_equal_rows_scratch_bytes() of memory of the device, on multiples of 8 */
  int64_t scratch_bytes;
  double* out; /* [BW_EQUAL_GROUPS][BW_LAW_EQUAL_STAT_COUNT], added to */
} bw_law_equal_rows_params;

/* 0 if rows is not 0..2^30. */
BW_KERNELS_EXPORT int64_t bw_law_equal_rows_scratch_bytes(int64_t rows);
BW_KERNELS_EXPORT bw_kernel_status bw_law_equal_rows(const bw_law_equal_rows_params* params);

/* ---- size, extremes and shape of an activation (module_stats.h is the specification) ----
   Since 1.11. */

/* Doubles of an activation, in this order. */
typedef enum bw_module_stat {
  BW_MODULE_ELEMENTS = 0,
  BW_MODULE_SUMSQ,
  BW_MODULE_LARGEST,
  BW_MODULE_NONFINITE,
  BW_MODULE_FOURTHS,
  BW_MODULE_TOP_SUMSQ, /* of the channel with the most; 0 without channel_sumsq */
  BW_MODULE_TOP,       /* its number */
  BW_MODULE_STAT_COUNT
} bw_module_stat;

typedef struct bw_module_stats_params {
  uint32_t struct_size;
  uint32_t backend, dtype, threads;
  void* stream;
  const void* data;
  int64_t rows, channels; /* 0..2^31-1, 0..2^24, 2^48 elements together */
  int64_t row_stride;     /* elements, >= 0 */
  double* channel_sumsq;  /* NULL, or [channels] in memory of the device, added to */
  double* out;            /* [BW_MODULE_STAT_COUNT] in memory of the device, added to */
  void* workspace;        /* BW_CUDA: bw_module_stats_workspace_bytes() in memory of the device */
} bw_module_stats_params;

/* Of rows and channels; 0 if one is illegal, or 0. */
BW_KERNELS_EXPORT uint64_t bw_module_stats_workspace_bytes(const bw_module_stats_params* params);
BW_KERNELS_EXPORT bw_kernel_status bw_module_stats(const bw_module_stats_params* params);

/* ---- per-head spectral norms (spectral.h is the specification) ---- */

typedef struct bw_spectral_params {
  uint32_t struct_size;
  uint32_t backend, dtype, threads;
  void* stream;
  int64_t heads;      /* matrices */
  int64_t rows;       /* of one head: head_dim, 1..512 */
  int64_t columns;    /* of one head: the model's width, >= 1 */
  const void* weight; /* element (h, i, j) at h * head_stride + i * row_stride
                         + j * column_stride */
  int64_t head_stride, row_stride, column_stride;
  float* sigma;       /* [heads] out: sqrt of the largest Ritz value (a lower
                         bound up to rounding); NaN if a weight is not finite */
  float* residual;    /* [heads] out or NULL: norm(G v - theta v) */
  float* stable_rank; /* [heads] out or NULL: tr G / theta */
  float* direction;   /* [heads][rows] in/out or NULL: the top left singular
                         vector; a unit vector on entry warms the start */
  float* overlap;     /* [heads] out or NULL: abs(cosine) of direction before
                         and after; NaN if it was 0 before.  Needs direction */
  float* gram;        /* [heads][rows][rows] out or NULL: G = W W^T */
  /* NULL, or further weights, 65536 in all, which a GPU measures at the same time.  Of theirs
     backend, threads and stream are not read. */
  const struct bw_spectral_params* next;
} bw_spectral_params;

BW_KERNELS_EXPORT bw_kernel_status bw_spectral_norms(const bw_spectral_params* params);

/* Effective rank (exp of the entropy of the squared singular values) of the
   first-order change of W_Q^T W_K, per query head.  All four weights
   [rows, columns] per head, float32, laid out as in bw_spectral_params. */
typedef struct bw_increment_rank_params {
  uint32_t struct_size;
  uint32_t threads;
  int64_t heads, kv_heads, rows, columns;
  const float *wq, *wq_before; /* [heads] */
  const float *wk, *wk_before; /* [kv_heads] */
  int64_t q_head_stride, q_row_stride, k_head_stride, k_row_stride;
  float* effective_rank; /* [heads] out; NaN if nothing changed */
} bw_increment_rank_params;

BW_KERNELS_EXPORT bw_kernel_status bw_increment_rank(const bw_increment_rank_params* params);

/* ---- K-centring ---- */

typedef struct bw_center_keys_params {
  uint32_t struct_size;
  uint32_t backend, dtype, threads;
  void* stream;
  int64_t batch, kv_heads, k_len, head_dim;
  bw_tensor4 k;              /* in */
  bw_tensor4 out;            /* out: k - mean over the sequence's tokens; may be k.  The
                                backward is the same map, applied to the gradient. */
  const int32_t* cu_seqlens; /* [sequences + 1] offsets into k_len with batch 1
                                (packed sequences), or NULL */
  int64_t sequences;
  const uint8_t* visible; /* NULL, or [batch][kv_heads][k_len]: 0 = outside the mean, and unchanged */
  int64_t visible_batch_stride, visible_head_stride, visible_key_stride;
} bw_center_keys_params;

BW_KERNELS_EXPORT bw_kernel_status bw_center_keys(const bw_center_keys_params* params);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* BELLWETHER_KERNELS_C_API_H_ */
