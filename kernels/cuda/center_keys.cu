// Keys minus their mean: see center_keys.h.
//
// Work      a cluster of blocks per sequence, key head and slab of channels: 8 x 16 bytes
//           of a row, or 32 channels where rows are not aligned.  Its blocks take tiles
//           of tokens in turn and exchange their sums through shared memory.  Before
//           Hopper a cluster is one block.
// Memory    reads K once and writes it once while a cluster holds its sequence in
//           registers: 2,048 tokens.  Of longer sequences the rest is read again, last
//           tile first, and up to about 8,000 tokens comes from the caches.  Every block
//           counts the visible tokens of its sequence.
// Numerics  fp32: a thread's rows of a tile, then tiles, lanes, warps and blocks, always in
//           one order, so the result repeats bit for bit.  |mean - exact| <=
//           (24 + tiles of a block) 2^-24 mean|k|; k - mean is rounded to fp32 and then
//           to the type of k.
// Limits    2^31 - 1 blocks; compute capability 8.0.

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backends.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeldRows = 8;                 // of a thread, in registers
constexpr int kBlocksPerMultiprocessor = 3;  // what their registers leave room for
constexpr int kClusterMax = 8;
constexpr int kVectorBytes = 16;

struct Strides {
  int64_t batch, head, token;  // in elements
};

struct KernelParams {
  const void* k;
  void* out;  // may be k
  Strides k_stride, out_stride;
  const int32_t* cu_seqlens;  // or null
  int k_len, kv_heads, head_dim;
  int slabs;    // of a head
  int cluster;  // blocks
  ProbeVisible visible;
};

// One thread's part of a row.
template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) Vector {
  Element at[kWidth];
};

template <int kWidth>
struct Slab {
  static constexpr int kLanes = kWidth > 1 ? 8 : 32;
  static constexpr int kChannels = kLanes * kWidth;
  static constexpr int kRows = kThreads / kLanes;
  static constexpr int kTile = kRows * kHeldRows;  // tokens
};

// Row i of a tile is token `first` + i * kRows; 0 where there is none.
template <class Element, int kWidth>
__device__ __forceinline__ void LoadTile(const Element* k, int64_t token_stride, int64_t first, int64_t end,
                                         Vector<Element, kWidth> (&tile)[kHeldRows]) {
#pragma unroll
  for (int i = 0; i < kHeldRows; ++i) {
    const int64_t token = first + i * Slab<kWidth>::kRows;
    tile[i] = {};
    if (token < end) tile[i] = *reinterpret_cast<const Vector<Element, kWidth>*>(k + token * token_stride);
  }
}

// Keeps the compiler from holding the converted tile instead, in twice the registers.
template <class T, int kCount>
__device__ __forceinline__ void Forget(T (&tile)[kCount]) {
  if constexpr (sizeof(T) == kVectorBytes) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint4 bits;
      memcpy(&bits, &tile[i], sizeof(bits));
      asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
      memcpy(&tile[i], &bits, sizeof(bits));
    }
  }
}

// The sum of *part over the blocks of a cluster.  All threads call it; afterwards
// LeaveCluster(), before which no block may end.
__device__ __forceinline__ float SumOverCluster(float* part, int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    const cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    float sum = 0.f;
    for (int rank = 0; rank < blocks; ++rank) sum += *cluster.map_shared_rank(part, rank);
    cluster.barrier_arrive();
    return sum;
  }
#endif
  __syncthreads();
  return *part;
}

__device__ __forceinline__ void LeaveCluster(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) cg::this_cluster().barrier_wait();
#endif
}

// Grid: [sequences * kv_heads * slabs * cluster].  Block: kThreads.  kVisible: some tokens
// may be no part of the mean.
template <class Element, int kWidth, bool kVisible>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor - kVisible)
    CenterKeysKernel(const __grid_constant__ KernelParams p) {
  using S = Slab<kWidth>;
  __shared__ float warp_sums[kWarps][S::kChannels], block_sums[S::kChannels], means[S::kChannels];
  __shared__ int visible_tokens;
  const int rank = blockIdx.x % p.cluster, unit = blockIdx.x / p.cluster;
  const int head = unit / p.slabs % p.kv_heads, sequence = unit / p.slabs / p.kv_heads;
  const bool packed = p.cu_seqlens != nullptr;
  const int64_t begin = packed ? max(p.cu_seqlens[sequence], 0) : 0;
  const int64_t end = packed ? min(p.cu_seqlens[sequence + 1], p.k_len) : p.k_len;
  if (begin >= end) return;  // The whole cluster does.

  const int lane = threadIdx.x % S::kLanes, row = threadIdx.x / S::kLanes;
  const int channel = unit % p.slabs * S::kChannels + lane * kWidth;
  const int64_t batch = packed ? 0 : sequence;
  const auto* const k = static_cast<const Element*>(p.k) + batch * p.k_stride.batch + head * p.k_stride.head + channel;
  auto* const out = static_cast<Element*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head + channel;
  const auto is_visible = [&](int64_t token) {
    const ProbeVisible& v = p.visible;
    return v.data[batch * v.batch_stride + head * v.head_stride + token * v.key_stride] != 0;
  };
  const int64_t my_end = channel < p.head_dim ? end : begin;  // Lanes beyond the head only take part.

  // 1. Sums over this thread's tokens; the last tile stays.
  const int64_t first = begin + rank * S::kTile + row, stride = int64_t{p.cluster} * S::kTile;
  Vector<Element, kWidth> tile[kHeldRows];
  float sum[kWidth] = {};
  bool counts[kHeldRows];  // of the tile's tokens, whether they are visible
  const auto find_visible = [&](int64_t from) {
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i) {
      const int64_t token = from + i * S::kRows;
      counts[i] = !kVisible || (token < my_end && is_visible(token));
    }
  };
  int64_t at = first;
  for (;; at += stride) {
    LoadTile<Element, kWidth>(k, p.k_stride.token, at, my_end, tile);
    find_visible(at);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      float of_tile = 0.f;
#pragma unroll
      for (int i = 0; i < kHeldRows; ++i) of_tile += counts[i] ? static_cast<float>(tile[i].at[c]) : 0.f;
      sum[c] += of_tile;
    }
    if (at + stride >= my_end) break;
  }
  if constexpr (kVisible) {
    if (threadIdx.x == 0) visible_tokens = 0;
    __syncthreads();
    int mine = 0;
    for (int64_t token = begin + threadIdx.x; token < end; token += kThreads) mine += is_visible(token);
    if (mine > 0) atomicAdd(&visible_tokens, mine);
  }

  Forget(tile);

  // 2. Over the rows of a warp, the warps, the blocks.
#pragma unroll
  for (int c = 0; c < kWidth; ++c) {
#pragma unroll
    for (int offset = S::kLanes; offset < 32; offset *= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], offset);
    if (threadIdx.x % 32 < S::kLanes) warp_sums[threadIdx.x / 32][lane * kWidth + c] = sum[c];
  }
  __syncthreads();
  const int mine = threadIdx.x % S::kChannels;
  if (threadIdx.x < S::kChannels) {
    float of_block = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) of_block += warp_sums[warp][mine];
    block_sums[mine] = of_block;
  }
  const float total = SumOverCluster(&block_sums[mine], p.cluster);
  if (threadIdx.x < S::kChannels) {
    means[mine] = total / static_cast<float>(kVisible ? max(visible_tokens, 1) : end - begin);
  }
  __syncthreads();
  float mean[kWidth];
#pragma unroll
  for (int c = 0; c < kWidth; ++c) mean[c] = means[lane * kWidth + c];

  // 3. Differences, last tile first.
  for (;; at -= stride) {
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i) {
      const int64_t token = at + i * S::kRows;
      Vector<Element, kWidth> centred;
#pragma unroll
      for (int c = 0; c < kWidth; ++c)
        centred.at[c] = counts[i] ? static_cast<Element>(static_cast<float>(tile[i].at[c]) - mean[c]) : tile[i].at[c];
      if (token < my_end) *reinterpret_cast<Vector<Element, kWidth>*>(out + token * p.out_stride.token) = centred;
    }
    if (at == first) break;
    LoadTile<Element, kWidth>(k, p.k_stride.token, at - stride, my_end, tile);
    find_visible(at - stride);
  }
  LeaveCluster(p.cluster);
}

struct Gpu {
  int major = 0, minor = 0;
};

Status FindGpu(Gpu* gpu) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&gpu->major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&gpu->minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Fail(Status::kUnavailable, "backend is 1 (CUDA), but there is no GPU: %s", cudaGetErrorString(error));
  }
  if (gpu->major < 8) {
    return Fail(Status::kUnsupported, "the GPU has compute capability %d.%d, but must have 8.0 or later", gpu->major,
                gpu->minor);
  }
  return Status::kOk;
}

// Whether rows are whole vectors of 16 bytes that lie on multiples of 16 bytes.
bool IsVectorized(const CenterKeysParams& p, const void* data, const Strides& stride) {
  const int64_t width = kVectorBytes / SizeOf(p.dtype);
  const auto whole = [&](int64_t extent, int64_t elements) { return extent <= 1 || elements % width == 0; };
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 && p.head_dim % width == 0 &&
         whole(p.batch, stride.batch) && whole(p.kv_heads, stride.head) && whole(p.k_len, stride.token);
}

// The fewest blocks whose registers hold a sequence of this length.
int ClusterSize(const Gpu& gpu, int64_t tokens, int tile) {
  int blocks = 1;
  while (gpu.major >= 9 && blocks < kClusterMax && int64_t{blocks} * tile < tokens) blocks *= 2;
  return blocks;
}

template <class Element, int kWidth>
Status Launch(const CenterKeysParams& p, const Gpu& gpu, KernelParams kernel, void* stream) {
  using S = Slab<kWidth>;
  const int64_t sequences = p.cu_seqlens != nullptr ? p.sequences : p.batch;
  // Packed lengths are known on the GPU only: twice the average serves most of them.
  const int64_t tokens = std::min(p.k_len, p.cu_seqlens != nullptr ? 2 * p.k_len / sequences + 1 : p.k_len);
  kernel.slabs = static_cast<int>((p.head_dim + S::kChannels - 1) / S::kChannels);
  kernel.cluster = ClusterSize(gpu, tokens, S::kTile);
  const int64_t units = p.kv_heads * kernel.slabs, units_max = INT32_MAX / kernel.cluster;
  if (sequences > units_max / units) {
    return Fail(Status::kUnsupported, "batch or sequences is %lld, but at most %lld is built for these heads",
                static_cast<long long>(sequences), static_cast<long long>(units_max / units));
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(kernel.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(sequences * units * kernel.cluster));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = kernel.cluster > 1 ? 1 : 0;
  const auto run = kernel.visible.data != nullptr ? CenterKeysKernel<Element, kWidth, true>
                                                  : CenterKeysKernel<Element, kWidth, false>;
  const cudaError_t error = cudaLaunchKernelEx(&config, run, kernel);
  if (error == cudaSuccess) return Status::kOk;
  (void)cudaGetLastError();
  return Fail(Status::kDeviceError, "the centring kernel did not launch: %s", cudaGetErrorString(error));
}

template <class Element>
Status LaunchOf(const CenterKeysParams& p, const Gpu& gpu, const KernelParams& kernel, void* stream) {
  constexpr int kWidth = kVectorBytes / sizeof(Element);
  const bool vectorized = IsVectorized(p, p.k.data, kernel.k_stride) && IsVectorized(p, p.out, kernel.out_stride);
  return vectorized ? Launch<Element, kWidth>(p, gpu, kernel, stream) : Launch<Element, 1>(p, gpu, kernel, stream);
}

}  // namespace

bool IsAvailable() {
  Gpu gpu;
  return FindGpu(&gpu) == Status::kOk;
}

Status CenterKeys(const CenterKeysParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  if (p.batch == 0 || p.k_len == 0) return Status::kOk;
  KernelParams kernel = {};
  kernel.k = p.k.data;
  kernel.out = p.out;
  kernel.k_stride = {p.k.batch_stride, p.k.head_stride, p.k.token_stride};
  kernel.out_stride = {p.out_batch_stride, p.out_head_stride, p.out_token_stride};
  kernel.cu_seqlens = p.cu_seqlens;
  kernel.visible = p.visible;
  kernel.k_len = static_cast<int>(p.k_len);
  kernel.kv_heads = static_cast<int>(p.kv_heads);
  kernel.head_dim = static_cast<int>(p.head_dim);
  switch (p.dtype) {
    case DType::kBFloat16:
      return LaunchOf<__nv_bfloat16>(p, gpu, kernel, stream);
    case DType::kFloat16:
      return LaunchOf<__half>(p, gpu, kernel, stream);
    case DType::kFloat32:
      break;
  }
  return LaunchOf<float>(p, gpu, kernel, stream);
}

}  // namespace bellwether::kernels::cuda
