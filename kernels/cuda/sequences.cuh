// sequences.cuh: where a tile of tokens lies, in a batch or packed.
//
// In units of `unit` tokens the tiles of packed sequence s are numbered from
// starts[s] / unit + s on.  That leaves room for every tile of the sequences
// before it and wastes at most one number each.  So tile counts need not be
// summed.

#ifndef BELLWETHER_KERNELS_CUDA_SEQUENCES_CUH_
#define BELLWETHER_KERNELS_CUDA_SEQUENCES_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda {

struct Sequence {
  int index;           // in the batch
  int q_start, q_len;  // tokens; the start is 0 in a batch
  int k_start, k_len;
};

// The same where some keys may be padding: those outside [key_begin, key_end).
struct MaskedSequence : Sequence {
  int key_begin, key_end;
};

template <bool kMasked>
using SequenceOf = std::conditional_t<kMasked, MaskedSequence, Sequence>;

__device__ __forceinline__ Sequence BatchSequence(const SequenceParams& p, int index) {
  return {index, 0, p.q_len, 0, p.k_len};
}

__device__ __forceinline__ int FirstTile(const int32_t* starts, int sequence, int unit) {
  return starts[sequence] / unit + sequence;
}

// The packed sequence that owns this tile number, which is 0 or more.
__device__ __forceinline__ Sequence PackedSequence(const SequenceParams& p, const int32_t* starts, int unit, int tile) {
  int low = 0, high = p.batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (FirstTile(starts, middle, unit) <= tile ? low : high) = middle;
  }
  const int q = p.q_starts[low], k = p.k_starts[low];
  return {low, q, p.q_starts[low + 1] - q, k, p.k_starts[low + 1] - k};
}

// Once the rest of a sequence is known.
__device__ __forceinline__ void SetKeyBounds(const SequenceParams&, Sequence*) {}
__device__ __forceinline__ void SetKeyBounds(const SequenceParams& p, MaskedSequence* s) {
  s->key_begin = 0;
  s->key_end = s->k_len;
  if (p.key_bounds == nullptr) return;
  s->key_end = min(max(p.key_bounds[2 * s->index + 1], 0), s->k_len);
  s->key_begin = min(max(p.key_bounds[2 * s->index], 0), s->key_end);
}

__device__ __forceinline__ int KeyBegin(const Sequence&) { return 0; }
__device__ __forceinline__ int KeyBegin(const MaskedSequence& s) { return s.key_begin; }
// The first of the keys from `key` on that is none of those before the bounds.
__device__ __forceinline__ int FirstKeyFrom(const Sequence&, int key) { return key; }
__device__ __forceinline__ int FirstKeyFrom(const MaskedSequence& s, int key) { return max(key, s.key_begin); }
__device__ __forceinline__ int KeyEnd(const Sequence& s) { return s.k_len; }
__device__ __forceinline__ int KeyEnd(const MaskedSequence& s) { return s.key_end; }

// Row T may see the keys [FirstKey, LastKey], as far as a mask's tensor shows them.
template <class Seq>
__device__ __forceinline__ int LastKey(const SequenceParams& p, const Seq& s, int row) {
  return p.causal ? min(KeyEnd(s) - 1, row + s.k_len - s.q_len) : KeyEnd(s) - 1;
}
template <class Seq>
__device__ __forceinline__ int FirstKey(const SequenceParams& p, const Seq& s, int row) {
  return p.window > 0 ? max(KeyBegin(s), row + s.k_len - s.q_len - p.window + 1) : KeyBegin(s);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_SEQUENCES_CUH_
