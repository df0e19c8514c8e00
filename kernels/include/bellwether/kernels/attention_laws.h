// attention_laws.h: sums that exact arithmetic makes equal in the backward pass of attention, and
// what a kernel returned beside a reference.
//
// Symbols are those of probe.h.  For one sequence and one key head, T runs over the rows of all
// query heads of the key head (`group` of them), w_T = sum_j P_Tj:
//
//   A1  sum_j dk_j = 0                          biased delta, wrong dk, keys not written
//   A2  sum_j dv_j = sum_T w_T dO_T             rows of P that do not add up to w, wrong dv
//   A3  sum_T q_T . dq_T = sum_j k_j . dk_j     dq or dk wrong by a factor, heads exchanged
//   A4  sum_T o_T . dO_T = sum_j v_j . dv_j     wrong o, wrong dv
//
// Source: a shift of all keys changes no probability (A1); P and O are linear in V (A2, A4); q and
// k meet in their product alone (A3).  They hold for every mask, additive bias and grouped queries.
// Differences are left side less right side.  A1 and A2 are vectors: of their difference x
// projection i of 0..7 is sum_c s_ic x_c, s_ic = 1 if bit 0 of ProbeMix(i dim + c) is set, else -1.
//
// Left out, and their rows of kv_out then not written:
//   softcap            A1: the slope of a score depends on the key
//   sinks              A1 and A2, unless every row is sampled: then P_sink is known, and A1's right
//                      side is scale sum_T q_T sum_j dS_Tj
//   float32            all four: the null is not known.  The tensors' sums stay.
//   dropout of P       ends A2: such a call must not come here
//   a gradient that reaches q and k through the logsumexp adds to A1: such a call must not either
//
// A row that sees no key has w = 0 if its output is 0.  It has w = 1 if that is neither 0 nor NaN: P
// is then the same for all keys that all but the mask's tensor allow it, or for all of them.  If it is
// not finite the row counts in law_rows_left_out and for nothing in the laws.  The mask says which rows
// those are, and only rows whose output is 0 or not finite are looked up in it.  With mask_by_sample
// it does not say so of all rows: one with output 0 then has w = 0, and |its part of A2| is added to
// A2's alike.
//
// An element that is not finite makes its tensor's sums NaN, and the differences of the laws it is
// part of.  Nothing hides it.
//
// Variances are what independent roundings to the nearest give the differences, alike (>= 0) is how
// far they move if all of them go the same way.  A kernel is broken if |difference| is beyond alike
// by more standard deviations than chance gives.
//
//   e(x) = the distance of the type's numbers at x; subnormals have that of the smallest normal.
//   r(x) = x rounded to the type, less x.   u(x) = e(x)^2 / 12.
//
// Results.  Each stored element of o, dq, dk, dv adds c^2 u(x) times `roundings`.  c is 1 in A1 and
// A2, and its partner (d_o, q, k, v) in A3 and A4.  roundings = 2, kComposed 4.  Those of dk and dv
// are twice as many with group > 1.
// kAccumulated: those have group ceil(q_len / step) more, with a step of 256, 64 or 32 rows for
// q_len >= 768, >= 192 or less.  That is 2 of each partial sum, half as large as the last on average.
// What is added to dv at a time is alike for all keys where rows are broad:
//   s^2 = the mean over the sampled rows of a head of (keys sum P^2 / w^2 - 1)
//   t = 2^bits s / (sqrt(step) ceil(q_len / step)),  a = min(max((4 - t) / 2, 0), 1)
// Each head adds a ceil(q_len / step) sum over the columns of (sum c e)^2 / 12 of dv to A2 and A4.
// Elements of a column (one channel of one head) that are the same are rounded alike.  f = the share
// of its elements, 0 left out, that equal the one before them.  a = min(max((f - 0.4) / 0.2, 0), 1), and
// at least f^2: they may be one run, as the dv of keys that only rows without keys see.
// The column's part is then (1 - a) sum c^2 u + a (sum c e)^2 / 12.
//
// Inside.  From the sampled rows, with dS = P (dP - delta_hp) (both in double), e_T as in probe.h:
//   V_P  = 2 w(P)                        C_P  = r(P)
//   V_dT = 2 (sum_j dP^2 w(P) + (2^-24 sum |dO o|)^2 + sum dO^2 u(o))
//   V_S  = 2 (u(dS) + w(P) (dP - delta)^2 + (2^-24 P)^2 (dP^2 + delta^2))     C_S  = r(dS)
//   A1  variance (scale q8)^2 (sum_j V_S + V_dT);  channels scale q8 sum_j C_S and -scale q8 w e_T
//   A2  variance o8^2 sum_j V_P;                   channel o8 sum_j C_P
//   A4  variance 2 sum_j dP^2 V_P;                 channel sum_j dP C_P, of either sign
// q8 and o8 are the projections of q_T and dO_T; bits = 8 for bfloat16, 11 for float16.  kComposed
// rounds q.k (before scale) and dP first.
// w(P) = u(P) + (n u(|s| + 1) + F) P^2, s = the row's largest score.  n counts how often scores are rounded
// behind the product, with kComposed alone: once if the scale is no power of two, three times in a softcap.
// F = e^x (e^x - 1), x = 4 head_dim u32(|s| + 1), at most 14, u32 as u of float32: scores are sums in fp32,
// made once in each direction, and the logsumexp is one number of fp32.  At |s| = 200,000 P was so 1 to 2 % off.
// That of the logsumexp is the same for all P of a row.  It adds 2 F w^2 o8^2 to the variance of A2 and
// 4 F delta^2 to that of A4.  Of the shadow check it adds 2 F dq^2.  A1 and A3 do not change by it.
// Underflow.  Here u(x) is at most x^2: what is rounded to 0 has lost itself, no more.  Some kernels
// round scale dS where others round dS.  With f = |scale|, at most 1: where f dS is subnormal, e(dS) is
// the type's least number over f, and r(dS) = (f dS, rounded) / f - dS.
// A3 has alike = 2^-bits (|sum_j k_j . dk_j| + sum over heads |sum_T q_T . dq_T|), by sequence.  Where one key
// takes all, rows of dq are multiples of it, and what other keys add may be rounded away in all channels.
// Besides, A2 and A4 have a channel of either sign of
// 2^-13 |sum_j dv_j| and 2^-13 |sum v . dv|: an exponential that is approximated.
//
// From rows to all.  Each sequence and query head by itself: the sum of y over all rows is R X, with
// R = sum_s y / sum_s x over the sampled rows and X = sum x over all.  x is the row's size: |q| |dO|
// for A1, |dO| for A2 and A4, squared for variances.
// The error of R X squared is var ((X_rest / X_s)^2 Q_s + Q_rest), with Q = sum x^2 and
// var = n / (n - 1) sum_s (y - R x)^2 / Q_s.
// To variances 3 errors are added.  Channels are added up over the call's sequences and the group's
// heads; alike = the larger of the sum of the positive ones and less the sum of the negative ones,
// + 6 errors.  Of A1 and A2 it is that of the projection where it is largest; so is the variance.
// Where less than two rows were sampled, or none of those has a size, alike is at least
// |difference|: the law says nothing.
// Few rows so make the limit wider, never narrower.  Every row (rows_per_head = 0) costs as the scores
// and dP of all rows do.
// Measured on kernels for CPUs, in bfloat16 and causal calls of 512 tokens.  Of 64 rows alike is 10 to
// 20 standard deviations of A1, 8 to 9 of A2 and 4 to 6 of A4; of all rows it is at most 2.
// A head's dv that is 1 % too large is 13 of them beyond alike with 32 rows, 18 with 64, 26 with all.
// A P of the backward pass that is 2 % too large is 91, 90 and 110.  A3 needs no rows, and A1 finds
// gross faults alone.

#ifndef BELLWETHER_KERNELS_ATTENTION_LAWS_H_
#define BELLWETHER_KERNELS_ATTENTION_LAWS_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/probe.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

inline constexpr int kLawProjections = 8;
// Errors of the estimate from sampled rows that are added to alike and to variances.
inline constexpr double kLawAlikeErrors = 6;
inline constexpr double kLawVarianceErrors = 3;
// Shares of elements that equal the one before them: alike not at all, and all of them.
inline constexpr double kLawSameFrom = 0.4;
inline constexpr double kLawSameTo = 0.6;
// Spreads of what is added to dv, in distances of numbers: alike all of them, and not at all.
inline constexpr double kLawSpreadFrom = 2;
inline constexpr double kLawSpreadTo = 4;
// Of scores in fp32, per channel of q and k; and how large their variance is taken to be at most.
inline constexpr double kLawScoreRoundings = 4;
inline constexpr double kLawScoreVarianceMax = 14;
// An exponential that is approximated may be so far off, for all P alike.
inline constexpr double kLawExpError = 1.0 / 8192;

// Rows of `out`.  The sums are of all elements of a head, *_nonfinite counts elements.
enum LawHeadStat : int {
  kLawDoSum = 0,
  kLawDoAbsSum,
  kLawDoSumsq,
  kLawDoNonfinite,
  kLawDqSum,
  kLawDqAbsSum,
  kLawDqSumsq,
  kLawDqNonfinite,
  kLawRowsLeftOut,
  kLawHeadStatCount
};

// Rows of `kv_out`.
enum LawKvStat : int {
  kLawA1 = 0,                // 8 projections
  kLawA2 = kLawProjections,  // 8 projections
  kLawA3 = 2 * kLawProjections,
  kLawA4,
  kLawA1Variance,  // of any one projection
  kLawA2Variance,
  kLawA3Variance,
  kLawA4Variance,
  kLawA1Alike,
  kLawA2Alike,
  kLawA3Alike,
  kLawA4Alike,
  kLawDkSum,
  kLawDkAbsSum,
  kLawDkSumsq,
  kLawDkNonfinite,
  kLawDvSum,
  kLawDvAbsSum,
  kLawDvSumsq,
  kLawDvNonfinite,
  kLawKvStatCount
};

// How the kernel that made the tensors rounds.
enum class LawArithmetic : int {
  kFused = 0,       // P and dS before products, results at the end
  kComposed = 1,    // scores and dP, too: attention out of matrix products
  kAccumulated = 2  // dk and dv are kept in the type: PyTorch's flash attention for CPUs
};

// A call whose backward is over.
struct GradedAttention {
  // v, o and d_o given, drift_only false.  Where the probe writes is not read.
  ProbeParams call;
  LawArithmetic arithmetic = LawArithmetic::kFused;
  Tensor4 d_q;  // [batch][heads][q_len][head_dim], of the type of q, as the op returned it
  Tensor4 d_k;  // [batch][kv_heads][k_len][head_dim]
  Tensor4 d_v;  // [batch][kv_heads][k_len][v_dim]
};

// Rows of [heads] and of [kv_heads] floats, added to.
struct LawOutputs {
  int64_t stat_stride = 0;  // floats between two rows, >= heads
  float* out = nullptr;
  int64_t kv_stat_stride = 0;  // >= kv_heads
  float* kv_out = nullptr;
};

struct AttentionLawsParams {
  GradedAttention of;
  LawOutputs to;  // [kLawHeadStatCount][heads], [kLawKvStatCount][kv_heads]
};

// Adds the laws of one call to its outputs.  It reads each element of q, k, v, o, d_o, d_q, d_k and
// d_v once, and the sampled rows as the probe does.  kCpu is done on return.
//
// kCuda enqueues its kernels on the stream, with memory that the stream gives and takes back, and adds
// in one order: a call gives the same bits each time.  There rows of which a mask by sample does not
// say what they see may make A2's alike larger.
//
// kInvalidArgument, kUnsupported, kDeviceError as Probe(); kUnsupported also: kCuda with kAccumulated,
// which no kernel of a GPU does.  Then nothing was written.  Any thread; calls that add to the same
// memory must not overlap.
[[nodiscard]] Status AttentionLaws(const AttentionLawsParams& params, const Device& device);

// ---- the shadow check ----
//
// What a kernel returned beside the same in double: o and dq at the sampled rows, dk and dv at
// sampled keys with all their queries.  Rows and keys with an element that is not finite are left
// out here.  So are rows that see no key if their output is 0 or not finite, or no gradient comes to
// them: what padding comes to does no harm.
//
//   rest      sum of |got - exact - sum_i c_i channel_i|^2 of a row or key, each c_i the best of
//             0..1: one after the other, three times round
//   variance  sum over the elements of what independent roundings give them
//   excess    rest / variance: 1 if all is well.  It is a mean over variance^2 / variance_sq
//             independent rows.
//
// With p = V_P, C_P and so on from above, of an element of a row T or key j:
//   o   variance sum_j V_P v^2 + roundings u(o)                  channels sum_j C_P v, and below
//   dq  scale^2 (sum_j V_S k^2 + V_dT (sum_j P k)^2) + roundings u(dq)
//                                                   channels -scale e_T sum_j P k, scale sum_j C_S k
//   dk  scale^2 sum_T (V_S + V_dT P^2) q^2 + roundings u(dk)
//                                            channels -scale sum_T e_T P q, scale sum_T C_S q
//   dv  sum_T V_P dO^2 + roundings u(dv)                         channel sum_T C_P dO
// and two more each: r(exact), and r(exact + the channels) - the same.  u() is of the exact value.
// kAccumulated: dk and dv have one more channel, what they become if they are added up in the type,
// less what they are: head by head of the group and `step` rows at a time.  Their variance has 2 u()
// of each partial sum.  With a softcap dS, P and C_S are times its slope in dq and dk.
// float32: the grid is that of TF32, 11 bits, and the arithmetic always kFused.
//
// The factor.  A tensor that is f times what it should be is far less than its distance tells: its
// rows all point the same way.  With e a row or key of it in double, d = got - e, and V its variance
// and 2^-104 for each element
//
//   factor    sum e.d / V            f - 1 times factor_variance, 0 if all is well
//   variance  sum |e|^2 / V          of factor: e.d is a sum of independent roundings times numbers,
//                                    and its variance is at most |e|^2 V (Cauchy and Schwarz)
//   alike     the channels' sums of e.channel / V, the positive ones or the negative ones, whichever
//             is more, and 2^-13 variance: an exponential that is approximated
//
// sqrt(variance) is so the number of standard deviations that f = 2 makes.  Weights of 1 / V let each
// row count by what it knows: keys with small gradients, as the last ones of a causal call, no less.
// Numbers near the least normal one of fp32 are lost inside of kernels, and so are their variances on
// GPUs: with 2^-104 such rows count for nothing.
// All three are 0 in float32: an operand may be cut to TF32, which is a factor of its own.

inline constexpr double kShadowFactorFloor = 0x1p-104;

// The rows of one tensor: those of o then those of dq, of dk then those of dv.
enum ShadowStat : int {
  kShadowDot = 0,   // sum got . exact
  kShadowGotSumsq,  // sum |got|^2
  kShadowRefSumsq,  // sum |exact|^2
  kShadowRest,
  kShadowVariance,
  kShadowVarianceSq,  // sum over rows (keys) of their variance squared
  kShadowTensorStatCount,
  kShadowStatCount = 2 * kShadowTensorStatCount
};

// Of one tensor; rows of `factors` are those of o then dq, of `kv_factors` those of dk then dv.
enum FactorStat : int {
  kFactor = 0,
  kFactorVariance,
  kFactorAlike,
  kFactorTensorStatCount,
  kFactorStatCount = 2 * kFactorTensorStatCount
};

struct AttentionShadowParams {
  GradedAttention of;
  LawOutputs to;               // [kShadowStatCount][heads], [kShadowStatCount][kv_heads]
  uint32_t keys_per_head = 0;  // at least k_len: every key; 0: none, and kv_out stays as it is
  // [kFactorStatCount][heads] and [kv_heads] with the strides of `to`, added to.  Both or none.
  float* factors = nullptr;
  float* kv_factors = nullptr;
};

// The key that stands for `stratum` of 0..strata-1 of a key head whose first query head is `head`
// (global), as SampledRow() with a seed of its own.
constexpr int64_t SampledKey(uint64_t seed, uint64_t batch, uint64_t head, uint64_t stratum, uint64_t strata,
                             uint64_t k_len) {
  return SampledRow(ProbeMix(seed), batch, head, stratum, strata, k_len);
}

// Adds the comparison of one call to its outputs.  With keys it costs as the scores and dP of all
// rows do, whatever their number.  Errors as AttentionLaws(); kUnsupported also: keys with
// mask_by_sample, which does not say what the other rows see.
[[nodiscard]] Status AttentionShadow(const AttentionShadowParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_ATTENTION_LAWS_H_
