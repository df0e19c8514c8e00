// attention.h: the stabilized attention.
//
// The backward of attention needs delta = rowsum(dO * O).  From an O rounded to
// 16 bits delta is biased, dQ gets a rank-one error that points the same way
// step after step, and training can diverge.  Mode hp removes the bias.  It also
// returns what rounding O took away, and divides by the sum of the probabilities
// as they were rounded.  So delta = rowsum(dO * (O + O_lo)) is the sum that the
// backward's exact probabilities ask for.
//
//   S = scale Q K^T, or with softcap c > 0: c tanh(scale Q K^T / c);
//       plus the value of an additive mask
//   m = rowmax S;  P = exp(S - m);  l = rowsum P
//   Pr = P rounded to the input type;  lt = rowsum Pr
//   O = Pr V / (fa, paper ? l : lt);  L = m + ln l;  O_lo = bf16(O - round(O))
//
// Allowed keys are probe.h's: row T sees key j if, causal, j <= T + k_len - q_len,
// and with a window w > 0 j > T + k_len - q_len - w.  `key_bounds` takes the padding
// away, and a mask hides keys as probe.h says, from -10,000 down.  Neither moves the
// diagonal.  Padding is never read.  A hidden key's value is multiplied by 0.
//
// A head's sink is one more logit of each row, with a value of 0: it takes its part of
// l and lt, unrounded, and of L.  -inf is none.
//
// Sequences of unequal lengths can be packed one behind the other: cu_seqlens_q and
// cu_seqlens_k hold, where the backend computes, at which token of q, o, ... and of
// k, v each begins, and last where all end.  A sequence never reads another's
// tokens, not even to multiply them by zero.
//
// Source: after arXiv:2510.04212, Section 3.3.

#ifndef BELLWETHER_KERNELS_ATTENTION_H_
#define BELLWETHER_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/probe.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

enum class AttentionMode : int {
  kFa = 0,      // as FlashAttention computes it: the baseline
  kHp = 1,      // unbiased delta
  kHpm = 2,     // hp whose backward reads Pr, so that dS sums to 0 for any V
  kPaper = 3,   // the paper's shifted maximum (its Algorithm 3)
  kSr = 4,      // O rounded at random: delta without bias, but noisier
  kHpNolt = 5,  // hp divided by l: an ablation
  kLt = 6,      // fa divided by lt (kCuda: hp without the residual): an ablation
};

// kPaper's shift above a repeated maximum is clamped to these, in units of log2.
inline constexpr double kPaperShiftMin = 0.3;
inline constexpr double kPaperShiftMaxBFloat16 = 40;
inline constexpr double kPaperShiftMaxFloat16 = 2;

// Statistics are those of some of the rows, in blocks of so many: counting every row
// costs more than training would pay (kernels/RESULTS.md).  Tiles of any kernel divide
// a block.
inline constexpr int64_t kStatsBlockRows = 384;
inline constexpr uint32_t kStatsEveryDefault = 16;

struct AttentionForwardParams {
  DType dtype = DType::kBFloat16;  // of q, k, v, o
  AttentionMode mode = AttentionMode::kHp;
  int64_t batch = 0;     // >= 0; packed: 0 or 1
  int64_t heads = 0;     // of q, 1..65536
  int64_t kv_heads = 0;  // divides heads; query head h reads h / (heads / kv_heads)
  int64_t q_len = 0;     // >= 0; packed: of all sequences together
  int64_t k_len = 0;     // >= 1; packed: the same
  int64_t head_dim = 0;
  int64_t v_dim = 0;  // of v and o; 0 = head_dim
  Tensor4 q;          // [batch][heads][q_len][head_dim]
  Tensor4 k;          // [batch][kv_heads][k_len][head_dim]
  Tensor4 v;          // [batch][kv_heads][k_len][v_dim]
  // Packed sequences: [sequences + 1], not decreasing, from 0 to q_len and k_len.
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  int64_t sequences = 0;  // 0 without cu_seqlens
  // [batch][2]: a batch entry's first key and the one behind its last, cut at 0 and k_len.
  // Null: all keys.  Not with cu_seqlens; nor is a mask, whose by_sample must be false.
  const int32_t* key_bounds = nullptr;
  ProbeMask mask;
  const float* sinks = nullptr;  // [heads] logits; or null
  float scale = 0;               // of the scores; finite, > 0
  bool causal = false;
  int32_t window = 0;                       // keys, >= 0; 0 = none
  float softcap = 0;                        // logits, finite, >= 0; 0 = none
  float paper_eps = 1e-3f, paper_beta = 2;  // kPaper: logits, >= 0; > 1
  // kSr, and which rows count.  The same on all tensor-parallel ranks, new each step.
  uint64_t seed = 0;
  Tensor4 o;             // out, written through: [batch][heads][q_len][v_dim]
  Tensor4 o_lo;          // out, bf16, the residual; absent = not wanted; kHp, kHpm, kHpNolt
  float* lse = nullptr;  // out: L, natural log; -inf for a row without any key or sink
  // out, strides as lse: Pr of a row is P in units of 2^anchor, rounded_sum its
  // sum lt in these units.  kHpm: both; else none.
  float* anchor = nullptr;
  float* rounded_sum = nullptr;
  int64_t lse_batch_stride = 0, lse_head_stride = 0;  // tokens are adjacent
  // Added to, with probe.h's rules: [kProbeStatCount][heads], or null.  The forward
  // adds rows, the three kinds of tied rows, saturated and nonfinite rows, the sums of
  // entropy and sink, and merges logit_max; the backward adds the four of delta.  All
  // of the rows that StatsRows counts, but logit_max of all that are finite.
  float* stats = nullptr;
  int64_t stat_stride = 0;                    // floats between two statistics, >= heads
  uint32_t stats_every = kStatsEveryDefault;  // 1..1024: blocks to one that counts; 1 = all rows
  // AttentionForwardWorkspaceBytes() bytes of device memory, 4-byte aligned, of
  // any content; or null, and causal rows are balanced less well.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// The rows that the statistics count: block b of sequence s, each from 0, if
// (b + s stride + phase) % every = 0; the same for all heads.  With at least `every`
// blocks a sequence each gives rows from all its parts, and stride is 1, so that they
// give unlike parts; with fewer, all sequences' blocks are counted through.  `every` is
// at most their number: each head has rows, as long as sequences are equally long.  A
// ratio p of n counted rows has the standard error sqrt(p (1 - p) / n) if rows are
// independent; neighbours are not quite.
struct StatsRows {
  int64_t every = 1, stride = 1, phase = 0;

  constexpr bool Count(int64_t sequence, int64_t row) const {
    return (row / kStatsBlockRows + sequence * stride + phase) % every == 0;
  }
};
constexpr StatsRows StatsRowsOf(const AttentionForwardParams& p) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t sequences = packed ? (p.sequences > 1 ? p.sequences : 1) : p.batch;
  const int64_t block = packed ? kStatsBlockRows * sequences : kStatsBlockRows;
  const int64_t blocks = (p.q_len + block - 1) / block;  // of a mean sequence
  int64_t every = blocks * sequences;
  if (every > p.stats_every) every = p.stats_every;
  if (every < 1) every = 1;
  return {every, every > blocks ? blocks : 1, static_cast<int64_t>(ProbeMix(p.seed) % static_cast<uint64_t>(every))};
}

constexpr int64_t ValueDim(const AttentionForwardParams& p) { return p.v_dim == 0 ? p.head_dim : p.v_dim; }

size_t AttentionForwardWorkspaceBytes(const AttentionForwardParams& params);

// kCuda enqueues on device.stream and returns; allocates nothing, never
// synchronizes.  A row without any allowed key gets O = 0 and O_lo = 0.
//
// kUnsupported on kCuda, one of:
// * a GPU below compute capability 8.0; dtype float32; stats in mode kSr;
// * head_dim or v_dim above 256 or no multiple of 8;
// * a base that is not 16-byte aligned; a stride of q, k, v, o or o_lo that is
//   not a multiple of 8 elements;
// * more than 2^29 tokens or 65535 heads.
//
// The larger of head_dim and v_dim costs as the next of 64, 96, 128, 256.  On Hopper 65..96 costs as
// 128, too, but for the plain forward.  The portable kernels serve masks and sinks on any
// GPU.  Hopper's take key_bounds up to 128, but not in a backward with center.  A mask's
// tensor is read again for every head and pass; keys that it hides cost what others do.
//
// kInvalidArgument: a bound above is violated.  Both errors mean that nothing
// was written.  kDeviceError: the launch failed.  Any thread; calls that write
// the same memory must not overlap.
[[nodiscard]] Status AttentionForward(const AttentionForwardParams& params, const Device& device);

// Backward:
//   P = exp(S - L), or kHpm: Pr / lt;  delta = rowsum(dO * (O + O_lo))
//   dS = P * (dO V^T - delta), with softcap times 1 - (S / c)^2
//   dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO
//   dsink = -sum_T exp(sink - L_T) delta_T, or kHpm: of Pr's lt
// dK and dV are sums over the query heads of their group, taken in fp32.
// center: dQ -= scale rowsum(dS) kbar^T and dK -= mean(dK), with the dS that the
// products read: what centring K would give.  Means are over the keys of the sequence
// without padding, and with a mask over those that any row of the key head's queries
// sees.  dK of any other key is 0.  An additive mask gets no gradient.
struct AttentionBackwardParams {
  AttentionForwardParams forward;  // as it was called; its workspace is not read,
                                   // o, o_lo, lse, anchor, rounded_sum are inputs now
  Tensor4 d_o;                     // like o
  Tensor4 dq, dk, dv;              // out, written through; like q, k, v
  float* d_sinks = nullptr;        // out: [heads]; null = not wanted, and without sinks
  bool center = false;             // not with softcap or sinks
  bool deterministic = false;      // dq repeats bit for bit; dk and dv always do
  void* workspace = nullptr;       // AttentionBackwardWorkspaceBytes(), 16-byte aligned
  size_t workspace_bytes = 0;
};

size_t AttentionBackwardWorkspaceBytes(const AttentionForwardParams& params);

// As AttentionForward.  On kCuda also kUnsupported: nothing to do (batch or
// q_len 0, where dk and dv would have to be cleared).  With o_lo absent delta
// comes from the rounded O.
//
// forward.stats: the four delta statistics of probe.h are added, with e =
// -sum_j P (dP - delta), the error of the delta used here.  P and dP are as
// they are here, and dS is not rounded for it.  In some cases e = -rowsum(dS)
// as the products read it.  That has the noise of rounding dS: no bias, up to
// 2^-9 |dS|.  The cases are on Hopper: center, deterministic, a window, a cap,
// packed sequences, or kHpm at head_dim 64.
[[nodiscard]] Status AttentionBackward(const AttentionBackwardParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_ATTENTION_H_
