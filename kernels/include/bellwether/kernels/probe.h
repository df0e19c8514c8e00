// probe.h: per-head statistics of an attention whose operands are at hand.
//
// The statistics are those of proto/bellwether/v1/signals.proto: they show the
// softmax-invariant drift of W_Q, repeated maxima, and the bias of delta long
// before the loss shows anything.
//
// Symbols, for one sequence (one batch entry) and one query head:
//   S_Tj  = scale q_T . k_j; with softcap c > 0, c tanh(scale q_T . k_j / c);
//           plus the value of an additive mask
//   A_T   = keys that row T may see: those that every part of the mask allows
//           (below).  n_T = |A_T|.
//   V     = visible keys: those in A_T of any row of the head, sampled or not.
//           Padding is outside.  Causality, windows and documents leave every
//           key that some row sees.
//   m_T   = max S_Tj, l_T = sum exp(S_Tj - m_T), P_Tj = exp(S_Tj - m_T) / l_T,
//           all over A_T and, in m_T and l_T, the head's sink
//   kbar  = mean of the keys of V, Cov their covariance (divided by |V|)
//   dP_Tj = dO_T . v_j
//   delta_lp_T = dO_T . O_T with the O given;  delta_hp_T = sum_j P_Tj dP_Tj
//   e_T   = delta_lp_T - delta_hp_T
// Source: arXiv:2510.04212, Sections 3.3 and 4 (bias of delta, repeated
// maxima); the drift sums and the probe itself are Bellwether's.
//
// Mask.  The diagonal is the key that stands beside a row: T + k_len - q_len (the
// last row's is the last key), with top_left T, with `ranges` what they say.
//   causal            keys up to the diagonal
//   window w > 0      diagonal - w + 1 and later keys
//   window_right w>0  diagonal + w - 1 and earlier keys
//   ranges            keys begin..end-1 of the row, cut at 0 and k_len: documents, key
//                     lengths, padding on the left
//   mask              kBool: keys with a byte that is not 0.  Else the value is added
//                     to the score; -10,000 and less, as the mask's type rounds it
//                     (bfloat16: -9984), hides the key.
//
// Sinks.  A head's sink is a logit without a key.  It takes its part of l_T, so that
// P_T sums up to less than 1, and counts for nothing else: scores that tie, logit_max
// and n_T are those of keys.  -inf is no sink.
//
// Numerics.  S32 is S rounded to float32; every rule that compares scores uses
// S32: ties, non-finite scores, logit_max.  The CPU computes S in double, so
// that S32 is the correctly rounded score up to 1e-15 |q| |k|; a backend that
// accumulates in float32 may differ in rows within its rounding of a threshold.
// Everything summed is computed in double from S, and added once per call.
//
// Rows.  Every row, or rows_per_head of them per sequence and head, one from
// each of so many strata, chosen by SampledRow().  A row with an empty A_T
// (causal with k_len < q_len, or padding) has no scores and is not a row here.
// A row adds 1 to rows and to nonfinite_rows, and to nothing else, if S32 or the
// raw score before cap and mask is NaN or infinite, or its sink is NaN or +inf.
//
// A key of V that is not finite makes common_mode_sum, spread_sum and
// key_coherence_sum of its own heads NaN (kbar is), even if no sampled row sees
// it.  Keys outside V count for nothing.  A NaN in v, o or d_o makes only the
// four delta sums NaN.  No NaN crosses into another head; a NaN already in `out`
// stays.
//
// kv_out is over the keys that any query head of the key head has in V.  A
// sequence without one adds nothing to it.
//
// With drift_only a call writes kProbeRows, kProbeCommonModeSum, kProbeSpreadSum,
// kProbeNonfiniteRows and kv_out, all as it would without; v, o and d_o must be absent.
//
// The drift sums are of scale q.k, before cap and mask.  With softcap or sinks the
// loss is not invariant to a shift of the scores.  The drift sums then show how
// large the common mode is, but no longer that it leaves the loss unchanged.
// Ties, entropy and delta keep their meaning.

#ifndef BELLWETHER_KERNELS_PROBE_H_
#define BELLWETHER_KERNELS_PROBE_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

// P rounds to 1 in bfloat16 up to here, -ln(1 - 2^-9); and the paper's.
inline constexpr double kTieEps = 1.955e-3;
inline constexpr double kTieEpsPaper = 1e-3;
// An additive mask hides a key from here down; and in bfloat16.
inline constexpr float kHiddenFrom = -10000;
inline constexpr float kHiddenFromBf16 = -9984;
// A row is saturated if l < 1 + 2^-7.
inline constexpr double kSaturatedSum = 1.0078125;

// Rows of ProbeParams::out.  The last four are written only with v, o and d_o.
enum ProbeStat : int {
  kProbeRows = 0,          // rows
  kProbeCommonModeSum,     // sum_T |scale q_T . kbar|
  kProbeSpreadSum,         // sum_T scale sqrt(q_T^T Cov q_T)
  kProbeTiedRowsBf16,      // rows with bf16(S32) = its maximum more than once
  kProbeTiedRowsEps,       // rows with S32 >= max S32 - 1.955e-3 more than once
  kProbeTiedRowsEpsPaper,  // the same with 1e-3
  kProbeSaturatedRows,     // rows with l < 1 + 2^-7
  kProbeLogitMax,          // max S32, merged with `out` by max
  kProbeEntropySum,        // sum_T H_T / ln n_T, H_T = -sum P ln P; 0 if n_T = 1
  kProbeSinkSum,           // sum_T P_T0, of key 0; 0 for rows that may not see key 0
  kProbeNonfiniteRows,     // rows
  kProbeDeltaBiasSum,      // sum_T e_T
  kProbeDeltaBiasSumsq,    // sum_T e_T^2
  kProbeDeltaAbsSum,       // sum_T |delta_hp_T|
  kProbeDeltaErrorAbsSum,  // sum_T |e_T|
  kProbeStatCount
};

// Rows of ProbeParams::kv_out.
enum ProbeKvStat : int {
  kProbeKvSequences = 0,    // sequences
  kProbeKvKeyCoherenceSum,  // |mean_j k_j| / mean_j |k_j| over V; 0 if all keys are 0
  kProbeKvStatCount
};

// [batch][q_len][3] int32: begin, end and diagonal of each row.  Strides count int32; 0
// is the same for all.
struct ProbeRanges {
  const int32_t* data = nullptr;  // null = absent
  int64_t batch_stride = 0, row_stride = 0;
};

enum class MaskDType : int { kFloat32 = 0, kBFloat16, kFloat16, kBool };

// [batch][heads][q_len][k_len] by query heads.  Strides count elements; 0 is the same for all.
struct ProbeMask {
  const void* data = nullptr;  // null = absent
  MaskDType dtype = MaskDType::kBool;
  bool by_sample = false;  // its rows are the sampled rows 0, 1, ... of each head; no gate then
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
};

// [batch][heads][k_len] bytes by query heads, not 0 where the key is in V.  Must be given with
// ranges or a mask, whose union over all rows it is; else V follows from the other parts.
struct ProbeVisible {
  const uint8_t* data = nullptr;  // null = absent
  int64_t batch_stride = 0, head_stride = 0, key_stride = 0;
};

struct ProbeParams {
  DType dtype = DType::kFloat32;  // of q, k, v, o, d_o
  int64_t batch = 0;              // sequences, 0..2^20; 0 = nothing to do
  int64_t heads = 0;              // query heads, 1..65536, a multiple of kv_heads
  int64_t kv_heads = 0;           // query head h reads key head h / (heads / kv_heads)
  int64_t q_len = 0;              // 0..2^31-1
  int64_t k_len = 0;              // 0..2^31-1
  int64_t head_dim = 0;           // of q and k, 1..1024
  int64_t v_dim = 0;              // of v, o, d_o, 1..1024; ignored without them
  Tensor4 q;                      // [batch][heads][q_len][head_dim]
  Tensor4 k;                      // [batch][kv_heads][k_len][head_dim]
  Tensor4 v;                      // [batch][kv_heads][k_len][v_dim]; v, o, d_o: all or none
  Tensor4 o;                      // [batch][heads][q_len][v_dim], as the op returned it
  Tensor4 d_o;                    // [batch][heads][q_len][v_dim]
  float scale = 0;                // finite, > 0
  float softcap = 0;              // logits; finite, >= 0; 0 = none
  bool causal = false;
  bool drift_only = false;   // rows, common_mode, spread, nonfinite and `kv_out` alone
  bool top_left = false;     // of the diagonal
  int32_t window = 0;        // keys, >= 0; 0 = none
  int32_t window_right = 0;  // keys, >= 0; 0 = none
  ProbeRanges ranges;
  ProbeMask mask;
  ProbeVisible visible;
  const float* sinks = nullptr;    // [heads] logits; or null
  uint32_t rows_per_head = 0;      // 0, or >= q_len: every row
  uint64_t seed = 0;               // the same on all tensor-parallel ranks
  int64_t head_offset = 0;         // global id of head 0, >= 0
  int64_t stat_stride = 0;         // floats between two rows of `out`, >= heads
  float* out = nullptr;            // [kProbeStatCount][heads], added to
  int64_t kv_stat_stride = 0;      // >= kv_heads
  float* kv_out = nullptr;         // [kProbeKvStatCount][kv_heads], added to; or null
  const uint64_t* gate = nullptr;  // [kGateWords] where the kernel runs; null = open, 0
};

// One round of splitmix64.
constexpr uint64_t ProbeMix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The row that represents `stratum` of 0..strata-1, 1 <= strata <= q_len.
// Stratum i covers rows [floor(i q_len / strata), floor((i + 1) q_len / strata))
// and the upper 32 bits of a hash pick one:
//   h = Mix(Mix(Mix(Mix(seed) ^ batch) ^ head) ^ stratum),
//   row = first + (((h >> 32) * rows_in_stratum) >> 32)
// with 64-bit wrap-around.  `head` is the global head, so every sharding of the
// heads samples the same rows.
constexpr int64_t SampledRow(uint64_t seed, uint64_t batch, uint64_t head, uint64_t stratum, uint64_t strata,
                             uint64_t q_len) {
  const uint64_t h = ProbeMix(ProbeMix(ProbeMix(ProbeMix(seed) ^ batch) ^ head) ^ stratum);
  const uint64_t first = stratum * q_len / strata;
  const uint64_t size = (stratum + 1) * q_len / strata - first;
  return static_cast<int64_t>(first + (((h >> 32) * size) >> 32));
}

// Adds the statistics of one attention call to `out` and `kv_out`.  kCpu is
// done on return and needs about 8 k_len (head_dim + v_dim + 16) bytes a thread
// while it runs.  kCuda enqueues one kernel on the stream.  It reads every key of V
// once for 64 rows of a key head's queries (16 with drift_only), and adds to
// `out` in no fixed order.
//
// kInvalidArgument: a bound above is violated; what `ranges`, a mask and `visible`
// hold is not checked.  kUnsupported: head_dim or v_dim above 1024 (kCuda: above
// 576, or too wide for its shared memory; more than 2^30 tokens).  kUnavailable: no
// such backend here.  kDeviceError: out of memory.
//
// After each of these nothing was written.  Any thread; calls that add to the
// same memory must not overlap.
[[nodiscard]] Status Probe(const ProbeParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_PROBE_H_
