// attention_bwd_visible.cuh: the keys that centring is about: those within their bounds,
// and with a mask's tensor those of them that a row of the key head's queries sees.
//
// Work      a block per 32 keys, a thread per key and row; it ends once all keys are seen.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_VISIBLE_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_VISIBLE_CUH_

#include "cuda/attention_params.h"
#include "cuda/probe_mask.cuh"
#include "cuda/sequences.cuh"

namespace bellwether::kernels::cuda {

__device__ __forceinline__ uint8_t* VisibleAt(const AttentionBwdParams& p, int sequence, int kv_head) {
  return p.visible + (int64_t{sequence} * p.seq.kv_heads + kv_head) * p.seq.k_len;
}

// Grid: [tiles of kKeys keys, kv_heads, batch].  Block: [kKeys, kRows].
template <int kKeys, int kRows>
__global__ void __launch_bounds__(kKeys* kRows) FindVisibleKernel(const __grid_constant__ AttentionBwdParams p) {
  constexpr int kAtOnce = 8;  // rows between two looks at what is found
  __shared__ int found[kKeys];
  MaskedSequence seq;
  static_cast<Sequence&>(seq) = BatchSequence(p.seq, blockIdx.z);
  SetKeyBounds(p.seq, &seq);
  const int first_key = blockIdx.x * kKeys, key = first_key + threadIdx.x;
  const ProbeMask& mask = p.mask.tensor;
  const bool inside = key >= seq.key_begin && key < seq.key_end;
  if (threadIdx.y == 0) found[threadIdx.x] = inside && mask.data == nullptr;
  __syncthreads();
  const int shift = seq.k_len - seq.q_len;
  const auto first_row = [&](int of) { return p.seq.causal ? max(of - shift, 0) : 0; };
  const auto end_row = [&](int of) {
    return p.seq.window > 0 ? min(max(of - shift + p.seq.window, 0), seq.q_len) : seq.q_len;
  };
  const int begin = first_row(key), end = inside && mask.data != nullptr ? end_row(key) : 0;
  const int last = end_row(min(first_key + kKeys, seq.k_len) - 1);
  const int heads = mask.head_stride == 0 ? 1 : p.seq.group;
  for (int head = 0; head < heads && mask.data != nullptr; ++head) {
    const int64_t at = MaskRowAt(mask, seq.index, blockIdx.y * p.seq.group + head, 0) + key * mask.key_stride;
    for (int first = first_row(first_key); first < last; first += kAtOnce * kRows) {
      __syncthreads();
      if (__syncthreads_and(!inside || found[threadIdx.x] != 0)) break;
      bool seen = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kRows + threadIdx.y;
        if (row >= begin && row < end) seen = seen || BiasAt(mask, at + row * mask.row_stride) != -INFINITY;
      }
      if (seen) atomicOr(&found[threadIdx.x], 1);
    }
  }
  __syncthreads();
  if (threadIdx.y == 0 && key < seq.k_len) {
    VisibleAt(p, seq.index, blockIdx.y)[key] = static_cast<uint8_t>(found[threadIdx.x]);
  }
}

template <class S>
void LaunchFindVisible(const AttentionBwdParams& p, cudaStream_t stream) {
  constexpr int kKeys = 32, kRows = 16;
  const dim3 grid((p.seq.k_len + kKeys - 1) / kKeys, p.seq.kv_heads, p.seq.batch);
  FindVisibleKernel<kKeys, kRows><<<grid, dim3(kKeys, kRows), 0, stream>>>(p);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_VISIBLE_CUH_
