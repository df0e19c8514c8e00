// Host side of the Hopper backward: tensor maps, workspace, tile order.

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/attention_bwd_shares.h"
#include "cuda/attention_convert.h"
#include "cuda/attention_workspace.h"
#include "cuda/sm90/attention.h"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/tensor_map.h"
#include "error.h"

namespace bellwether::kernels::cuda::sm90 {
namespace {

// Q, dO and the dQ sums of the heads that run together stay in L2.
constexpr int64_t kSectionBytes = int64_t{32} << 20;
// As many tiles as a whole Hopper GPU runs at a time, at head dim 128: then all tiles of a head read its Q together.
constexpr int64_t kSectionBytesOfOneWave = int64_t{16} << 20;

// Sections of one wave where they were measured: plain batches, a CTA for each tile.
int64_t SectionBytes(const AttentionBackwardParams& b, int shares) {
  const AttentionForwardParams& a = b.forward;
  const bool plain = a.heads == a.kv_heads && !IsPacked(a) && !b.deterministic;
  return plain && shares == 1 && WidestDim(a) <= 128 ? kSectionBytesOfOneWave : kSectionBytes;
}

// Launches a batch by sections, whose dK is centred under the next one: see
// attention_bwd_center.cuh.  In a section the longest tiles come first, so that none is left
// for long to wait for.
void PlaceLaunches(const BwdLauncher& launcher, AttentionBwdParams* p) {
  constexpr int kTilesMin = 256;  // two of a multiprocessor
  const SequenceParams& seq = p->seq;
  const int pairs = seq.batch * seq.kv_heads, tiles = p->key_tiles / seq.batch;
  const int64_t queries = int64_t{seq.q_len} * seq.group;
  const int section = std::max(static_cast<int>(p->section_queries / queries), kBwdSectionPairsMin);
  const int enough = std::max((kTilesMin + tiles - 1) / tiles, kBwdSectionPairsMin);
  if (section < enough || pairs <= enough) return;
  int64_t weight = 0;
  for (int key = 0; key < seq.k_len; key += launcher.cols) weight += CenterWeight(seq, key, launcher.rows);
  const int units = (seq.k_len + launcher.center_rows - 1) / launcher.center_rows;
  if (weight < units || weight > INT32_MAX) return;  // Short sequences: it would take longer than behind them all.
  if (section > enough) p->section_queries = static_cast<int>(enough * queries);
  p->launch_pairs = enough;
}

// How many pairs ahead rows are prepared, or 0.  All that a tile's CTA waits for then began a wave of CTAs before it.
int PairsAhead(const BwdLauncher& launcher, const AttentionBwdParams& p) {
  constexpr int kTilesMin = 192;  // about one and a half of a multiprocessor
  // Of the mean tile.  With 576 (1k, causal) its idle warps take longer than its steps: 308 TFLOP/s instead of 340.
  // Of centred keys they have more to do: at head dim 128, 1k (full) and 2k (causal) are 5 % slower so.
  constexpr int kQueriesMin = 1024, kCentredMin = 1536;
  constexpr int kLengthMax = 1 << 20;  // The kernel has 32 bits for the product of rows and tiles.
  const SequenceParams& seq = p.seq;
  if (launcher.ahead_rows == 0 || seq.group > 1 || p.shares > 1 || std::max(seq.q_len, seq.k_len) > kLengthMax)
    return 0;
  if (p.stats.sums != nullptr) return 0;  // The last kernel takes them.
  if (seq.causal && seq.q_len != seq.k_len) return 0;
  const int least = p.center && seq.head_dim > 64 ? kCentredMin : kQueriesMin;
  if ((seq.causal ? (seq.q_len + launcher.cols) / 2 : seq.q_len) < least) return 0;
  const int pairs = seq.batch * seq.heads, tiles = p.key_tiles / seq.batch;
  const int section = std::max(p.section_queries / seq.q_len, kBwdSectionPairsMin);
  const int ahead = section * tiles >= kTilesMin ? section : 2 * section;
  return ahead < pairs ? ahead : 0;
}

// Whether tiles that take turns begin with the first keys: whether they are so long that, on
// a whole Hopper GPU, one begins late enough after the one before it, of the same pair; of
// grouped queries always.  By length alone, of packed sequences the mean: dQ depends on neither
// the GPU nor the batch.
bool BeginsWithFirstKeys(const BwdLauncher& launcher, const SequenceParams& seq) {
  if (!seq.causal || seq.window > 0) return false;  // All tiles are as long.
  if (seq.group > 1) return true;
  const int64_t seen = std::min(seq.q_len, seq.k_len) / (seq.q_starts == nullptr ? 1 : seq.batch);
  return seen / launcher.rows / 2 >= launcher.turn_steps;
}

// The order of a CTA's steps.
int TileStep(const AttentionBwdParams& p, bool deterministic) {
  if (deterministic && p.first_keys_first) return -1;
  if (p.shares == 1) return 0;
  return deterministic ? 1 : -1;
}

}  // namespace

Status AttentionBackward(const AttentionBackwardParams& b, void* stream) {
  const AttentionForwardParams& a = b.forward;
  const BwdLauncher launcher = FindBwdLauncher(b);
  const int64_t key_tiles = CountTiles(a, a.k_len, launcher.cols);
  // The grid's y and z and the kernel's tile arithmetic.
  if (a.q_len + a.k_len > (1 << 28) || a.batch > 65535 || a.heads > 65535 || a.sequences > (1 << 20) ||
      a.kv_heads * key_tiles > (1 << 29)) {
    return Fail(Status::kUnsupported, "batch, heads, a length or their product is too large");
  }

  BwdMaps maps = {};
  const TensorMapShape keys = KeyShape(a);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("q", a.q, QueryShape(a), a.dtype, launcher.rows, &maps.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("d_o", b.d_o, OutputShape(a), a.dtype, launcher.rows, &maps.d_o));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("k", a.k, keys, a.dtype, launcher.key_box, &maps.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("v", a.v, ValueShape(a), a.dtype, launcher.key_box, &maps.v));

  AttentionBwdParams p = ToBwdParams(b);
  PlaceWorkspace(b, &p);
  if (!launcher.counts) p.errors = nullptr;
  p.key_tiles = static_cast<int>(key_tiles);
  p.first_keys_first = b.deterministic && BeginsWithFirstKeys(launcher, p.seq);
  p.shares = BackwardShares(a);
  p.section_queries = static_cast<int>(SectionBytes(b, p.shares) / (8 * a.head_dim));
  p.tile_step = TileStep(p, b.deterministic);
  p.ahead = PairsAhead(launcher, p);
  if (p.ahead > 0 && p.center) {
    p.launch_pairs = p.ahead;  // The last kernels take the means from what nothing came behind.
    if (EncodeTensorMap("dk", b.dk, keys, a.dtype, launcher.ahead_rows, &maps.d_k) != Status::kOk) {
      p.ahead = p.launch_pairs = 0;  // It can be centred without.
    }
  }
  const bool has_sums = p.center || p.stats.sums != nullptr;
  if (p.ahead == 0 && p.center) p.section_queries = static_cast<int>(kSectionBytes / (8 * a.head_dim));
  // A share without steps waits for nothing, nor do kernels with sums unless rows are prepared ahead.
  p.overlaps = launcher.ahead_rows > 0 && p.shares == 1 && (p.ahead > 0 || !has_sums);
  if (p.ahead > 0) {
    const TensorMapShape out = OutputShape(a);
    const int rows = launcher.ahead_rows;
    BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("o", a.o, out, a.dtype, rows, &maps.o));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("d_o", b.d_o, out, a.dtype, rows, &maps.d_o_unit));
    if (p.o_lo != nullptr) {
      BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("o_lo", a.o_lo, out, DType::kBFloat16, rows, &maps.o_lo));
    }
  }
  if (p.ahead == 0 && launcher.center_rows > 0 && p.center && p.shares == 1) PlaceLaunches(launcher, &p);
  if (p.ahead == 0 && p.launch_pairs > 0 &&
      EncodeTensorMap("dk", b.dk, keys, a.dtype, launcher.center_rows, &maps.d_k) != Status::kOk) {
    p.launch_pairs = 0;  // It can be centred without.
  }
  const Status status = launcher.launch(p, maps, static_cast<cudaStream_t>(stream));
  return status == Status::kOk ? status : Fail(status, "the backward kernels did not launch");
}

}  // namespace bellwether::kernels::cuda::sm90
