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

#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda {

struct Sequence {
  int index;           // in the batch
  int q_start, q_len;  // tokens; the start is 0 in a batch
  int k_start, k_len;
};

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

// Row T may see the keys [FirstKey, LastKey].
__device__ __forceinline__ int LastKey(const SequenceParams& p, const Sequence& s, int row) {
  return p.causal ? min(s.k_len - 1, row + s.k_len - s.q_len) : s.k_len - 1;
}
__device__ __forceinline__ int FirstKey(const SequenceParams& p, const Sequence& s, int row) {
  return p.window > 0 ? max(0, row + s.k_len - s.q_len - p.window + 1) : 0;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_SEQUENCES_CUH_
