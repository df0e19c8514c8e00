// key_mean.cuh: the mean over the keys of a sequence, of K or of dK.
//
// Work      a block sums kMeanKeys keys, another adds those sums in order: the
//           mean repeats bit for bit.
// Memory    the tensor once; subtracting reads and writes it once more.
// Numerics  sums in fp32.

#ifndef BELLWETHER_KERNELS_CUDA_KEY_MEAN_CUH_
#define BELLWETHER_KERNELS_CUDA_KEY_MEAN_CUH_

#include "cuda/sequences.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda {

inline constexpr int kMeanThreads = 256;
template <class S>  // 8 channels each
inline constexpr int kMeanLanes = S::kHeadDim <= 128 ? 16 : 32;
template <class S>
inline constexpr int kMeanRows = kMeanThreads / kMeanLanes<S>;

// The keys of a block: `chunk` counts through the sequences.
struct KeyChunk {
  Sequence sequence;
  int begin, end;  // keys of it
};

__device__ __forceinline__ int ChunksOf(int keys) { return (keys + kMeanKeys - 1) / kMeanKeys; }

__device__ __forceinline__ int FirstChunk(const SequenceParams& p, int sequence) {
  return p.k_starts != nullptr ? FirstTile(p.k_starts, sequence, kMeanKeys) : sequence * ChunksOf(p.k_len);
}

__device__ __forceinline__ KeyChunk LocateChunk(const SequenceParams& p, int chunk) {
  const Sequence s = p.k_starts != nullptr ? PackedSequence(p, p.k_starts, kMeanKeys, chunk)
                                           : BatchSequence(p, chunk / ChunksOf(p.k_len));
  const int begin = (chunk - FirstChunk(p, s.index)) * kMeanKeys;
  return {s, begin, min(begin + kMeanKeys, s.k_len)};
}

__device__ __forceinline__ uint16_t* KeyAt(void* base, const Strides& stride, const Sequence& s, int kv_head, int key,
                                           int channel) {
  return static_cast<uint16_t*>(base) + s.index * stride.batch + kv_head * stride.head +
         (s.k_start + key) * stride.token + channel;
}

// Grid: [chunks, kv_heads].
template <class S>
__global__ void __launch_bounds__(kMeanThreads)
    SumKeysKernel(const __grid_constant__ AttentionBwdParams p, void* keys, Strides stride) {
  __shared__ float sums[kMeanRows<S>][kMeanLanes<S> * 8];
  const KeyChunk chunk = LocateChunk(p.seq, blockIdx.x);
  const int channel = threadIdx.x % kMeanLanes<S> * 8, row = threadIdx.x / kMeanLanes<S>;
  float sum[8] = {};
  if (channel < p.seq.head_dim) {
    for (int key = chunk.begin + row; key < chunk.end; key += kMeanRows<S>) {
      const uint4 x = *reinterpret_cast<const uint4*>(KeyAt(keys, stride, chunk.sequence, blockIdx.y, key, channel));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = UnpackPair<typename S::T>(words[i]);
        sum[2 * i] += pair.x;
        sum[2 * i + 1] += pair.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[row][channel + i] = sum[i];
  __syncthreads();
  if (threadIdx.x < S::kHeadDim) {
    float total = 0.f;
    for (int i = 0; i < kMeanRows<S>; ++i) total += sums[i][threadIdx.x];
    p.key_sums[(int64_t{blockIdx.y} * p.chunks + blockIdx.x) * S::kHeadDim + threadIdx.x] = total;
  }
}

// Grid: [sequences, kv_heads].  Block: S::kHeadDim.
template <class S>
__global__ void __launch_bounds__(S::kHeadDim) MeanKeysKernel(const __grid_constant__ AttentionBwdParams p) {
  const Sequence s = p.seq.k_starts == nullptr ? BatchSequence(p.seq, blockIdx.x)
                                               : Sequence{static_cast<int>(blockIdx.x), 0, 0, 0,
                                                          p.seq.k_starts[blockIdx.x + 1] - p.seq.k_starts[blockIdx.x]};
  const int first = FirstChunk(p.seq, s.index);
  float total = 0.f;
  for (int i = 0; i < ChunksOf(s.k_len); ++i) {
    total += p.key_sums[(int64_t{blockIdx.y} * p.chunks + first + i) * S::kHeadDim + threadIdx.x];
  }
  p.key_mean[(int64_t{blockIdx.y} * p.seq.batch + s.index) * S::kHeadDim + threadIdx.x] =
      s.k_len > 0 ? total / s.k_len : 0.f;
}

// Grid: [chunks, kv_heads].
template <class S>
__global__ void __launch_bounds__(kMeanThreads)
    SubtractMeanKernel(const __grid_constant__ AttentionBwdParams p, void* keys, Strides stride) {
  const KeyChunk chunk = LocateChunk(p.seq, blockIdx.x);
  const int channel = threadIdx.x % kMeanLanes<S> * 8, row = threadIdx.x / kMeanLanes<S>;
  if (channel >= p.seq.head_dim) return;
  const float* const mean =
      p.key_mean + (int64_t{blockIdx.y} * p.seq.batch + chunk.sequence.index) * S::kHeadDim + channel;
  for (int key = chunk.begin + row; key < chunk.end; key += kMeanRows<S>) {
    uint4* const at = reinterpret_cast<uint4*>(KeyAt(keys, stride, chunk.sequence, blockIdx.y, key, channel));
    const uint4 x = *at;
    uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = UnpackPair<typename S::T>(words[i]);
      words[i] = PackPair<typename S::T>(pair.x - mean[2 * i], pair.y - mean[2 * i + 1]);
    }
    *at = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <class S>
void LaunchKeyMean(const AttentionBwdParams& p, const void* keys, const Strides& stride, cudaStream_t stream) {
  SumKeysKernel<S><<<dim3(p.chunks, p.seq.kv_heads), kMeanThreads, 0, stream>>>(p, const_cast<void*>(keys), stride);
  MeanKeysKernel<S><<<dim3(p.seq.batch, p.seq.kv_heads), S::kHeadDim, 0, stream>>>(p);
}

template <class S>
void LaunchSubtractMean(const AttentionBwdParams& p, void* keys, const Strides& stride, cudaStream_t stream) {
  LaunchKeyMean<S>(p, keys, stride, stream);
  SubtractMeanKernel<S><<<dim3(p.chunks, p.seq.kv_heads), kMeanThreads, 0, stream>>>(p, keys, stride);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_KEY_MEAN_CUH_
