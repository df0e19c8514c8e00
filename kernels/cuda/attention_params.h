// attention_params.h: what attention kernels of every architecture need beside
// their way to reach Q, K, V and dO.
//
// Sequences lie either in a batch of equal lengths or packed one behind the other
// (q_starts != null).  Then the batch strides are 0 here, so that an
// element is always batch * stride.batch + (start + row) * stride.token, with
// start 0 in a batch.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_PARAMS_H_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_PARAMS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "bellwether/kernels/attention.h"

namespace bellwether::kernels::cuda {

struct Strides {
  int64_t batch, head, token;  // in elements of 2 bytes
};

struct SequenceParams {
  const int32_t *q_starts, *k_starts;  // [batch + 1] on the device, or both null
  int batch, heads, kv_heads, group;   // group = heads / kv_heads
  int q_len, k_len;                    // of each sequence, if not packed
  int head_dim, v_dim;                 // channels that exist, of v and o v_dim; a kernel may pad them
  int window;                          // keys a row sees up to its own; 0 = no limit
  bool causal;
  const int32_t* key_bounds;  // [batch][2] on the device, the keys of each sequence without padding; or null
};

inline constexpr float kLog2E = 1.44269504088896341f;

// Log2 units.  Scores further apart tie in no sense, unless bf16 rounds both alike.
inline constexpr float kTieWindow = 0.01f;

// Scores in log2 units are x = scale_log2 * s, or with a cap
// scale_log2 * tanh(cap_scale * s).
struct ScoreParams {
  float scale_log2, cap_scale;  // cap_scale 0 = no cap
  float scale;                  // scale_log2 ln 2: scores in natural units
  float tie_window;             // kTieWindow in units of s
};

// What masked kernels have beside key bounds.
struct MaskParams {
  ProbeMask tensor;
  bool paired;          // values of two adjacent keys are one aligned word, of any even key
  float inverse_scale;  // a natural logit in units of s
  const float* sinks;   // [heads], natural logits; or null
};

// The shifted maximum of mode paper, in log2 units.
struct PaperShift {
  float beta, eps, min, max;
};

// The rows that count, as StatsRows has them.
struct StatsParams {
  float* sums;  // [kProbeStatCount][heads], added to; or null
  int64_t stride;
  uint32_t every, sequence_stride, phase;
  uint32_t inverse;  // 2^32 / every, rounded up; 0 for every = 1

  __device__ __forceinline__ float* At(int stat, int head) const { return sums + stat * stride + head; }
  // Of all rows of the block that `row` is in.
  // The quotient is exact: blocks are fewer than 2^22, and `every` at most 2^10.
  __device__ __forceinline__ bool Count(int sequence, int row) const {
    const uint32_t at = static_cast<uint32_t>(row) / uint32_t{kStatsBlockRows} + sequence * sequence_stride + phase;
    return sums != nullptr && (every == 1 || at == static_cast<uint32_t>(uint64_t{at} * inverse >> 32) * every);
  }
};

struct AttentionFwdParams {
  SequenceParams seq;
  ScoreParams score;
  PaperShift paper;
  void* o;
  void* o_lo;  // bf16, or null
  float* lse;
  float *anchor, *rounded_sum;  // like lse, or null
  Strides o_stride, o_lo_stride;
  int64_t lse_batch_stride, lse_head_stride;
  StatsParams stats;
  uint64_t seed;     // of random rounding
  int section_keys;  // keys of the (batch, head) pairs that run together, for L2
  MaskParams mask;
};

// Rows of a workspace array are padded so that every sequence begins at a
// multiple of this.
inline constexpr int kBwdRowPadding = 128;
// Keys that are summed together for their mean.
inline constexpr int kMeanKeys = 128;
// Keys of a tile of the Hopper backward.
inline constexpr int kBwdTileKeys = 128;
// CTAs that have a tile together, and each its own keys of it, at most.
inline constexpr int kShareCounts = 2;
// Pairs of sequence and kv head that run together at least: fewer, and the last long tiles run alone.
inline constexpr int kBwdSectionPairsMin = 4;
// Counts of turns of a step: warps that add to different parts of its dQ, at most.
inline constexpr int kTurnsOfStep = 16;

struct AttentionBwdParams {
  SequenceParams seq;
  ScoreParams score;
  const void *o, *o_lo, *d_o;  // o_lo: bf16, or null
  const float* lse;
  const float *anchor, *rounded_sum;  // as the forward wrote them; or null
  const void* k;                      // for its mean
  void *dq, *dk, *dv;
  Strides k_stride, o_stride, o_lo_stride, d_o_stride;
  Strides dq_stride, dk_stride, dv_stride;
  int64_t lse_batch_stride, lse_head_stride;
  StatsParams stats;
  float scale;   // of q k, before a cap
  bool rounded;  // P as the forward's product read it, from anchor and rounded_sum
  bool center;
  // Workspace, by padded row: L in log2 units, or the anchor; +inf where P must
  // be 0.  1 / lt.  delta.  rowsum(dS) as the products read it, and e =
  // -rowsum(dS) before dS is rounded, of the rows that count.  Each is null if
  // it is not needed.
  float *lse_log2, *inverse, *delta, *ds_sum, *errors;
  // [row][padded head_dim]: dQ / scale, each step as accumulator_sums.cuh has it.
  float* dq_sum;
  // [row / rows of a step][kTurnsOfStep]: key tiles that have been added; or null.
  int* turns;
  bool first_keys_first;  // the order of turns: attention_bwd_turns.cuh
  // If CTAs share the steps of a tile, attention_bwd_shares.cuh: [kv head][chunk][CTA][share][dV, dK]
  // their parts, as accumulator_sums.cuh has them; [kv head][chunk][kShareCounts] parts that are there.
  float* share_sums;
  int* share_counts;
  int shares;     // 1 or more
  int tile_step;  // the order of a CTA's steps: sm90/query_steps.cuh
  // [kv head][chunk][padded head_dim]: sums over kMeanKeys keys of K and of dK;
  // [kv head][sequence][padded head_dim]: their means.
  float *key_sums, *d_key_sums, *key_mean, *d_key_mean;
  int64_t rows_per_head, rows_per_sequence;  // padded; the latter 0 if packed
  int key_tiles;                             // numbers of tiles of one kv head
  int chunks;                                // of kMeanKeys keys, of one kv head
  int section_queries;                       // of the (sequence, kv head) pairs that run together, for L2
  int launch_pairs;                          // that are launched together, 0 for all: sm90/attention_bwd_center.cuh
  int first_tile;                            // of this launch
  // sm90/attention_bwd_ahead.cuh: a pair's CTAs prepare the rows of the pair that is so many later, and finish those of
  // the one that is so many before.  0: kernels of their own do it for all.
  int ahead;
  int* pair_counts;  // [2][pairs]: warps that have prepared a pair's rows, CTAs whose dQ is added; or null
  int block_pair;    // of the first block of a kernel for p.ahead pairs
  bool overlaps;     // The main kernel and the last may start while the one before ends.
  MaskParams mask;
  float* d_sinks;    // [heads], or null
  uint8_t* visible;  // [batch][kv_heads][k_len]: the keys that centring is about; or null
};

// How many units of dK (4 KB) a CTA of the backward can centre beside its own
// tile of keys without being longer busy.  It is one a step, except for the
// steps that go into finding out which, and the last.
__host__ __device__ __forceinline__ int CenterWeight(const SequenceParams& p, int key, int step_rows) {
  constexpr int kStepsMin = 6;
  const int seen = p.causal ? key - (p.k_len - p.q_len) : 0;  // the first query that sees the tile
  const int steps = p.group * ((p.q_len + step_rows - 1) / step_rows - (seen > 0 ? seen / step_rows : 0));
  return steps > kStepsMin ? steps - kStepsMin : 0;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_PARAMS_H_
