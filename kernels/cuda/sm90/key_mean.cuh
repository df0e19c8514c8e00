// key_mean.cuh: the mean over the keys of a sequence, of K or of dK.
//
// Work      a block sums kMeanKeys keys, another adds those sums in order: the
//           mean repeats bit for bit.
// Memory    the tensor once; subtracting reads and writes it once more.
// Numerics  sums in fp32.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_KEY_MEAN_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_KEY_MEAN_CUH_

#include "cuda/sm90/attention_bwd_tiles.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

inline constexpr int kMeanThreads = 256;
inline constexpr int kMeanLanes = 16;  // 8 channels each, so 128 at most
inline constexpr int kMeanRows = kMeanThreads / kMeanLanes;

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
template <class T>
__global__ void __launch_bounds__(kMeanThreads)
    SumKeysKernel(const __grid_constant__ BwdParams p, void* keys, Strides stride, int padded_dim) {
  __shared__ float sums[kMeanRows][kMeanLanes * 8];
  const KeyChunk chunk = LocateChunk(p.seq, blockIdx.x);
  const int channel = threadIdx.x % kMeanLanes * 8, row = threadIdx.x / kMeanLanes;
  float sum[8] = {};
  if (channel < p.seq.head_dim) {
    for (int key = chunk.begin + row; key < chunk.end; key += kMeanRows) {
      const uint4 x = *reinterpret_cast<const uint4*>(KeyAt(keys, stride, chunk.sequence, blockIdx.y, key, channel));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = UnpackPair<T>(words[i]);
        sum[2 * i] += pair.x;
        sum[2 * i + 1] += pair.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[row][channel + i] = sum[i];
  __syncthreads();
  if (threadIdx.x < padded_dim) {
    float total = 0.f;
    for (int i = 0; i < kMeanRows; ++i) total += sums[i][threadIdx.x];
    p.key_sums[(int64_t{blockIdx.y} * p.chunks + blockIdx.x) * padded_dim + threadIdx.x] = total;
  }
}

// Grid: [sequences, kv_heads].  Block: padded_dim.
static __global__ void MeanKeysKernel(const __grid_constant__ BwdParams p) {
  const Sequence s = p.seq.k_starts == nullptr ? BatchSequence(p.seq, blockIdx.x)
                                               : Sequence{static_cast<int>(blockIdx.x), 0, 0, 0,
                                                          p.seq.k_starts[blockIdx.x + 1] - p.seq.k_starts[blockIdx.x]};
  const int first = FirstChunk(p.seq, s.index), dim = blockDim.x;
  float total = 0.f;
  for (int i = 0; i < ChunksOf(s.k_len); ++i) {
    total += p.key_sums[(int64_t{blockIdx.y} * p.chunks + first + i) * dim + threadIdx.x];
  }
  p.key_mean[(int64_t{blockIdx.y} * p.seq.batch + s.index) * dim + threadIdx.x] = s.k_len > 0 ? total / s.k_len : 0.f;
}

// Grid: [chunks, kv_heads].
template <class T>
__global__ void __launch_bounds__(kMeanThreads)
    SubtractMeanKernel(const __grid_constant__ BwdParams p, void* keys, Strides stride, int padded_dim) {
  const KeyChunk chunk = LocateChunk(p.seq, blockIdx.x);
  const int channel = threadIdx.x % kMeanLanes * 8, row = threadIdx.x / kMeanLanes;
  if (channel >= p.seq.head_dim) return;
  const float* const mean =
      p.key_mean + (int64_t{blockIdx.y} * p.seq.batch + chunk.sequence.index) * padded_dim + channel;
  for (int key = chunk.begin + row; key < chunk.end; key += kMeanRows) {
    uint4* const at = reinterpret_cast<uint4*>(KeyAt(keys, stride, chunk.sequence, blockIdx.y, key, channel));
    const uint4 x = *at;
    uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = UnpackPair<T>(words[i]);
      words[i] = PackPair<T>(pair.x - mean[2 * i], pair.y - mean[2 * i + 1]);
    }
    *at = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

inline int PaddedDim(const BwdParams& p) { return p.seq.head_dim <= 64 ? 64 : 128; }

template <class T>
void LaunchKeyMean(const BwdParams& p, const void* keys, const Strides& stride, cudaStream_t stream) {
  SumKeysKernel<T>
      <<<dim3(p.chunks, p.seq.kv_heads), kMeanThreads, 0, stream>>>(p, const_cast<void*>(keys), stride, PaddedDim(p));
  MeanKeysKernel<<<dim3(p.seq.batch, p.seq.kv_heads), PaddedDim(p), 0, stream>>>(p);
}

template <class T>
void LaunchSubtractMean(const BwdParams& p, void* keys, const Strides& stride, cudaStream_t stream) {
  LaunchKeyMean<T>(p, keys, stride, stream);
  SubtractMeanKernel<T><<<dim3(p.chunks, p.seq.kv_heads), kMeanThreads, 0, stream>>>(p, keys, stride, PaddedDim(p));
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_KEY_MEAN_CUH_
