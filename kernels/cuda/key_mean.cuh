// key_mean.cuh: the mean over the keys of a sequence, of K and of dK; with S::kMasked over
// those of them that are visible.
//
// Work      a block sums kMeanKeys keys, unless the main kernel did, which has them at
//           hand; another adds those sums in an order of its own, always the same: the
//           mean repeats bit for bit.
// Memory    the tensor once; subtracting reads and writes it once more.
// Numerics  sums in fp32.

#ifndef BELLWETHER_KERNELS_CUDA_KEY_MEAN_CUH_
#define BELLWETHER_KERNELS_CUDA_KEY_MEAN_CUH_

#include "cuda/attention_bwd_visible.cuh"
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

template <class S>
__device__ __forceinline__ bool IsVisible(const AttentionBwdParams& p, const Sequence& s, int kv_head, int key) {
  if constexpr (S::kMasked) return VisibleAt(p, s.index, kv_head)[key] != 0;
  return true;
}

// Where the sums of a chunk lie.
template <class S>
__device__ __forceinline__ int64_t SumsAt(const AttentionBwdParams& p, int kv_head, int chunk) {
  return (int64_t{kv_head} * p.chunks + chunk) * S::kHeadDim;
}

// Grid: [chunks, kv_heads].
template <class S>
__global__ void __launch_bounds__(kMeanThreads)
    SumKeysKernel(const __grid_constant__ AttentionBwdParams p, void* keys, Strides stride, float* key_sums) {
  __shared__ float sums[kMeanRows<S>][kMeanLanes<S> * 8];
  const KeyChunk chunk = LocateChunk(p.seq, blockIdx.x);
  const int channel = threadIdx.x % kMeanLanes<S> * 8, row = threadIdx.x / kMeanLanes<S>;
  float sum[8] = {};
  if (channel < p.seq.head_dim) {
    for (int key = chunk.begin + row; key < chunk.end; key += kMeanRows<S>) {
      if (!IsVisible<S>(p, chunk.sequence, blockIdx.y, key)) continue;
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
    key_sums[SumsAt<S>(p, blockIdx.y, blockIdx.x) + threadIdx.x] = total;
  }
}

inline constexpr int kMeanGroups = 4;  // of threads, each with its chunks

// Both means.  Grid: [sequences, kv_heads, 2].  Block: [S::kHeadDim, kMeanGroups].
template <class S>
__global__ void __launch_bounds__(S::kHeadDim* kMeanGroups)
    MeanKeysKernel(const __grid_constant__ AttentionBwdParams p) {
  __shared__ float totals[kMeanGroups][S::kHeadDim];
  const Sequence s = p.seq.k_starts == nullptr ? BatchSequence(p.seq, blockIdx.x)
                                               : Sequence{static_cast<int>(blockIdx.x), 0, 0, 0,
                                                          p.seq.k_starts[blockIdx.x + 1] - p.seq.k_starts[blockIdx.x]};
  const int first = FirstChunk(p.seq, s.index);
  const float* const sums =
      (blockIdx.z == 0 ? p.key_sums : p.d_key_sums) + SumsAt<S>(p, blockIdx.y, first) + threadIdx.x;
  float total = 0.f;
#pragma unroll 8
  for (int i = threadIdx.y; i < ChunksOf(s.k_len); i += kMeanGroups) total += sums[int64_t{i} * S::kHeadDim];
  totals[threadIdx.y][threadIdx.x] = total;
  int keys = s.k_len;
  if constexpr (S::kMasked) {
    __shared__ int visible;
    const int thread = threadIdx.y * S::kHeadDim + threadIdx.x;
    if (thread == 0) visible = 0;
    __syncthreads();
    int mine = 0;
    for (int key = thread; key < s.k_len; key += S::kHeadDim * kMeanGroups) mine += IsVisible<S>(p, s, blockIdx.y, key);
    if (mine > 0) atomicAdd(&visible, mine);
    __syncthreads();
    keys = visible;
  } else {
    __syncthreads();
  }
  if (threadIdx.y != 0) return;
  for (int i = 1; i < kMeanGroups; ++i) total += totals[i][threadIdx.x];
  float* const mean = blockIdx.z == 0 ? p.key_mean : p.d_key_mean;
  mean[(int64_t{blockIdx.y} * p.seq.batch + s.index) * S::kHeadDim + threadIdx.x] = keys > 0 ? total / keys : 0.f;
}

// Of the pairs of sequence and kv head from `first_pair` on, of whose first sequence
// `first_chunk` is the first.  Grid: [chunks from there on, kv_heads].
template <class S>
__global__ void __launch_bounds__(kMeanThreads)
    SubtractMeanKernel(const __grid_constant__ AttentionBwdParams p, void* keys, Strides stride, int first_pair,
                       int first_chunk) {
  const KeyChunk chunk = LocateChunk(p.seq, first_chunk + blockIdx.x);
  if (chunk.sequence.index * p.seq.kv_heads + static_cast<int>(blockIdx.y) < first_pair) return;
  const int channel = threadIdx.x % kMeanLanes<S> * 8, row = threadIdx.x / kMeanLanes<S>;
  if (channel >= p.seq.head_dim) return;
  const float* const mean =
      p.d_key_mean + (int64_t{blockIdx.y} * p.seq.batch + chunk.sequence.index) * S::kHeadDim + channel;
  const auto at = [&](int key) {
    return reinterpret_cast<uint4*>(KeyAt(keys, stride, chunk.sequence, blockIdx.y, key, channel));
  };
  constexpr int kAtOnce = 4;  // loads under way
  for (int first = chunk.begin + row; first < chunk.end; first += kAtOnce * kMeanRows<S>) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int key = first + j * kMeanRows<S>;
      if (key < chunk.end && IsVisible<S>(p, chunk.sequence, blockIdx.y, key)) x[j] = *at(key);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int key = first + j * kMeanRows<S>;
      if (key >= chunk.end) break;
      if (!IsVisible<S>(p, chunk.sequence, blockIdx.y, key)) continue;
      uint32_t words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = UnpackPair<typename S::T>(words[i]);
        words[i] = PackPair<typename S::T>(pair.x - mean[2 * i], pair.y - mean[2 * i + 1]);
      }
      *at(key) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <class S>
void LaunchSumKeys(const AttentionBwdParams& p, const void* keys, const Strides& stride, float* sums,
                   cudaStream_t stream) {
  SumKeysKernel<S>
      <<<dim3(p.chunks, p.seq.kv_heads), kMeanThreads, 0, stream>>>(p, const_cast<void*>(keys), stride, sums);
}

// Behind the main kernel: both means, and dK minus its own, of which the end still lies in L2.  If
// the pairs were launched in parts, only of the last p.launch_pairs.
template <class S>
void LaunchSubtractMean(const AttentionBwdParams& p, cudaStream_t stream) {
  MeanKeysKernel<S><<<dim3(p.seq.batch, p.seq.kv_heads, 2), dim3(S::kHeadDim, kMeanGroups), 0, stream>>>(p);
  const int first_pair = p.launch_pairs > 0 ? p.seq.batch * p.seq.kv_heads - p.launch_pairs : 0;
  const int first_chunk = first_pair / p.seq.kv_heads * (p.chunks / p.seq.batch);
  SubtractMeanKernel<S><<<dim3(p.chunks - first_chunk, p.seq.kv_heads), kMeanThreads, 0, stream>>>(
      p, p.dk, p.dk_stride, first_pair, first_chunk);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_KEY_MEAN_CUH_
