// attention_bwd_tiles.cuh: which keys a CTA of the backward has, which queries it
// needs, and where rows lie in the workspace.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_TILES_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_TILES_CUH_

#include <climits>

#include "cuda/sequences.cuh"

namespace bellwether::kernels::cuda {

// The padded row of row 0.
__device__ __forceinline__ int64_t RowBase(const AttentionBwdParams& p, const Sequence& s, int head) {
  const int64_t base = head * p.rows_per_head + s.index * p.rows_per_sequence;
  if (p.seq.q_starts == nullptr) return base;
  return base + int64_t{FirstTile(p.seq.q_starts, s.index, kBwdRowPadding)} * kBwdRowPadding;
}

// The query head of a block, and its sequence if not packed: grid y and z, or pairs in grid y.
struct BlockHead {
  int head, sequence;
};
__device__ __forceinline__ BlockHead LocateBlockHead(const AttentionBwdParams& p) {
  if (p.ahead == 0) return {static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
  const int pair = p.block_pair + blockIdx.y, sequence = pair / p.seq.heads;
  return {pair - sequence * p.seq.heads, sequence};
}

// The sequence and row of a kernel whose blocks walk all padded rows of a head, in `sequence`
// if not packed.  The row may be past the end.
struct PaddedRow {
  Sequence sequence;
  int row;
};
__device__ __forceinline__ PaddedRow LocatePaddedRow(const SequenceParams& p, int padded_row, int sequence) {
  if (p.q_starts == nullptr) return {BatchSequence(p, sequence), padded_row};
  const Sequence s = PackedSequence(p, p.q_starts, kBwdRowPadding, padded_row / kBwdRowPadding);
  return {s, padded_row - FirstTile(p.q_starts, s.index, kBwdRowPadding) * kBwdRowPadding};
}

// This CTA's keys, and the query tiles [first_tile, end_tile) that see some of them.  With
// those of every query head of the group they are steps; the CTA takes every p.shares-th,
// from number `share` on.
template <class Seq>
struct BwdTileOf {
  Seq sequence;
  int key, kv_head, first_tile, end_tile;
  int share, steps;
};
using BwdTile = BwdTileOf<Sequence>;

__device__ __forceinline__ int LastSection(int whole_sections, int section_tiles) {
  constexpr int kTilesMin = 256;  // two of a multiprocessor
  const bool odd = whole_sections > 1 && whole_sections % 2 == 1 && section_tiles < kTilesMin;
  return whole_sections - (odd ? 2 : 1);
}

// Returns false if nothing has this number.
template <class S, class Seq>
__device__ __forceinline__ bool LocateBwdTile(const AttentionBwdParams& p, int tile, BwdTileOf<Seq>* t) {
  const SequenceParams& q = p.seq;
  const int shares = S::kShares ? p.shares : 1;
  int pairs = q.kv_heads * shares;  // of sequence, kv head and share
  if (S::kGeneral && q.q_starts != nullptr) {
    static_cast<Sequence&>(t->sequence) = PackedSequence(q, q.k_starts, S::kCols, tile / pairs);
    tile -= FirstTile(q.k_starts, t->sequence.index, S::kCols) * pairs;
  } else {
    static_cast<Sequence&>(t->sequence) = BatchSequence(q, 0);
    pairs *= q.batch;
  }
  const Seq& s = t->sequence;
  const int key_tiles = (s.k_len + S::kCols - 1) / S::kCols;
  if (tile >= key_tiles * pairs) return false;
  const int section_pairs =
      min(max(p.section_queries * shares / (max(s.q_len, 1) * q.group), kBwdSectionPairsMin), pairs);
  const int section_tiles = section_pairs * key_tiles;
  int section = tile / section_tiles;
  // The last of few sections has what is left over, and with sections of one wave an even number of
  // them: as one ends with its short tiles, the next begins with its long ones.
  const int last = S::kShares && shares > 1 ? LastSection(pairs / section_pairs, section_tiles) : INT_MAX;
  section = min(section, last);
  const int in_section = tile - section * section_tiles;
  const int width =
      section == last ? pairs - last * section_pairs : min(section_pairs, pairs - section * section_pairs);
  const int rank = in_section / width;
  int pair = section * section_pairs + in_section - rank * width;
  t->share = pair % shares;
  pair /= shares;
  // Causal: the first keys are seen by most queries.  Turns have an order of their own.
  const bool backwards = S::kGeneral && p.turns != nullptr && !p.first_keys_first;
  t->key = (backwards ? key_tiles - 1 - rank : rank) * S::kCols;
  t->kv_head = pair % q.kv_heads;
  if (!S::kGeneral || q.q_starts == nullptr) t->sequence.index = pair / q.kv_heads;
  SetKeyBounds(q, &t->sequence);

  const int shift = s.k_len - s.q_len;
  t->first_tile = q.causal ? max(0, FirstKeyFrom(s, t->key) - shift) / S::kRows : 0;
  t->end_tile = (s.q_len + S::kRows - 1) / S::kRows;
  if (S::kGeneral && q.window > 0) {
    const int last_query = min(t->key + S::kCols, KeyEnd(s)) - 1 - shift + q.window - 1;
    t->end_tile = min(t->end_tile, last_query < 0 ? 0 : last_query / S::kRows + 1);
  }
  if constexpr (std::is_same_v<Seq, MaskedSequence>) {  // Its keys are all padding.
    if (t->key >= s.key_end || t->key + S::kCols <= s.key_begin) t->end_tile = t->first_tile;
  }
  const int left = q.group * (t->end_tile - t->first_tile) - t->share;
  t->steps = left > 0 ? (left + shares - 1) / shares : 0;
  return true;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_TILES_CUH_
