#include "cuda/attention_workspace.h"

#include "cuda/attention_bwd_shares.h"
#include "cuda/attention_convert.h"

namespace bellwether::kernels::cuda {
namespace {

// At least what any path pads a row of dQ to.
int64_t PaddedDim(const AttentionForwardParams& a) { return WidestDim(a) <= 64 ? 64 : WidestDim(a) <= 128 ? 128 : 256; }

// Rows of the shortest step of any path.
int64_t StepRows(const AttentionForwardParams& a) { return WidestDim(a) <= 128 ? 64 : 16; }

// Sizes of the arrays, in elements of 4 bytes; each a multiple of 16 bytes.
struct WorkspaceLayout {
  int64_t rows_per_head, rows;  // padded; of one head (and sequence), of all
  int64_t chunks;               // of keys, of one kv head
  int64_t dq_sum, turns, key_sums, key_mean;
  int shares;
  int64_t share_sums, share_counts;
  int64_t visible;  // four bytes each

  explicit WorkspaceLayout(const AttentionForwardParams& a) {
    const int64_t sequences = IsPacked(a) ? a.sequences : a.batch;
    rows_per_head = IsPacked(a) ? CountTiles(a, a.q_len, kBwdRowPadding) * kBwdRowPadding
                                : (a.q_len + kBwdRowPadding - 1) / kBwdRowPadding * kBwdRowPadding;
    rows = rows_per_head * a.heads * (IsPacked(a) ? 1 : a.batch);
    chunks = CountTiles(a, a.k_len, kMeanKeys);
    dq_sum = rows * PaddedDim(a);
    turns = rows / StepRows(a) * kTurnsOfStep;
    key_sums = a.kv_heads * chunks * PaddedDim(a);
    key_mean = a.kv_heads * sequences * PaddedDim(a);
    shares = BackwardShares(a);
    share_sums = shares > 1 ? key_sums * kMeanKeys * 2 * shares : 0;
    share_counts = shares > 1 ? (a.kv_heads * chunks * kShareCounts + 3) / 4 * 4 : 0;
    visible = IsMasked(a) ? (a.batch * a.kv_heads * a.k_len + 15) / 16 * 4 : 0;
  }
};

}  // namespace

bool NeedsRowSums(const AttentionBackwardParams& b) {
  const bool built_with = IsMasked(b.forward) && b.forward.mode == AttentionMode::kHpm;
  return b.center || b.forward.stats != nullptr || built_with;
}

size_t BackwardWorkspaceBytes(const AttentionForwardParams& a) {
  const WorkspaceLayout layout(a);
  return static_cast<size_t>(layout.dq_sum + 5 * layout.rows + layout.turns + 2 * (layout.key_sums + layout.key_mean) +
                             layout.share_sums + layout.share_counts + layout.visible) *
         sizeof(float);
}

void PlaceWorkspace(const AttentionBackwardParams& b, AttentionBwdParams* p) {
  const WorkspaceLayout layout(b.forward);
  auto* at = static_cast<float*>(b.workspace);
  const auto take = [&](int64_t count) {
    float* const begin = at;
    at += count;
    return begin;
  };
  p->dq_sum = take(layout.dq_sum);
  p->lse_log2 = take(layout.rows);
  p->delta = take(layout.rows);
  p->inverse = take(layout.rows);
  float* const ds_sum = take(layout.rows);
  float* const errors = take(layout.rows);
  int* const turns = reinterpret_cast<int*>(take(layout.turns));
  p->key_sums = take(layout.key_sums);
  p->d_key_sums = take(layout.key_sums);
  p->key_mean = take(layout.key_mean);
  p->d_key_mean = take(layout.key_mean);
  p->share_sums = take(layout.share_sums);
  p->share_counts = reinterpret_cast<int*>(take(layout.share_counts));
  p->visible = reinterpret_cast<uint8_t*>(take(layout.visible));
  p->ds_sum = NeedsRowSums(b) ? ds_sum : nullptr;
  p->errors = b.forward.stats != nullptr ? errors : nullptr;
  p->turns = b.deterministic ? turns : nullptr;
  p->pair_counts = b.deterministic ? nullptr : turns;  // Only one of both is needed; this one is smaller.
  p->rows_per_head = layout.rows_per_head;
  p->rows_per_sequence = IsPacked(b.forward) ? 0 : layout.rows_per_head * b.forward.heads;
  p->chunks = static_cast<int>(layout.chunks);
}

}  // namespace bellwether::kernels::cuda
