// attention_fwd_tiles.cuh: which query rows a tile has and which keys it needs.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_FWD_TILES_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_FWD_TILES_CUH_

#include "cuda/sequences.cuh"

namespace bellwether::kernels::cuda {

// The key tiles [begin, end) are needed, from the last to the first; those in
// [left, right) need no mask.  begin = end: no row sees any key.
template <class Seq>
struct FwdTileOf {
  int row;  // the first, in its sequence; kNoTile = there is no tile any more
  int head;
  Seq sequence;
  int begin, left, right, end;
};
using FwdTile = FwdTileOf<Sequence>;
inline constexpr int kNoTile = -1;

// Returns false if nothing has this number.  Of a sequence's tiles the longest
// come first (causal), with the heads innermost whose keys fit L2 together.
template <class S, class Seq>
__device__ __forceinline__ bool LocateTile(const AttentionFwdParams& p, int tile, FwdTileOf<Seq>* t) {
  const SequenceParams& q = p.seq;
  int pairs = q.heads;
  if (S::kGeneral && q.q_starts != nullptr) {
    static_cast<Sequence&>(t->sequence) = PackedSequence(q, q.q_starts, S::kRows, tile / q.heads);
    tile -= FirstTile(q.q_starts, t->sequence.index, S::kRows) * q.heads;
  } else {
    static_cast<Sequence&>(t->sequence) = BatchSequence(q, 0);
    pairs *= q.batch;
  }
  const Seq& s = t->sequence;
  const int row_tiles = (s.q_len + S::kRows - 1) / S::kRows;
  if (tile >= row_tiles * pairs) return false;
  const int section_pairs = min(max(p.section_keys / max(s.k_len, 1), 1) * q.group, pairs);
  const int section_tiles = section_pairs * row_tiles;
  const int section = tile / section_tiles;
  const int in_section = tile - section * section_tiles;
  const int width = min(section_pairs, pairs - section * section_pairs);
  const int rank = in_section / width;
  const int pair = section * section_pairs + in_section - rank * width;
  t->row = (q.causal ? row_tiles - 1 - rank : rank) * S::kRows;
  t->head = pair % q.heads;
  if (!S::kGeneral || q.q_starts == nullptr) t->sequence.index = pair / q.heads;
  SetKeyBounds(q, &t->sequence);

  const int last = min(t->row + S::kRows, s.q_len) - 1;
  const int first_key = S::kGeneral ? FirstKey(q, s, t->row) : 0;
  const int last_key = LastKey(q, s, last);
  t->begin = first_key / S::kCols;
  t->left = S::kGeneral ? (FirstKey(q, s, last) + S::kCols - 1) / S::kCols : 0;
  t->right = max(LastKey(q, s, t->row) + 1, 0) / S::kCols;
  t->end = last_key / S::kCols + 1;
  if (last_key < first_key) t->begin = t->end = 0;
  return true;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_FWD_TILES_CUH_
