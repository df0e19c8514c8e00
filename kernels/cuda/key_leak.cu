// What of the key gradient should cancel: see key_leak.h.
//
// Work      a cluster of blocks per sequence and key head; a group of lanes holds a row,
//           8 x 16 bytes or less of it a lane, and a block's groups take rows in turn.
// Memory    reads dK once.
// Numerics  double as on the CPU, since what is left of the vector sum is a thousandth of
//           what went in and less; each sequence's two numbers are rounded to fp32 and
//           added to the head's in no fixed order.
// Limits    head_dim 256, compute capability 8.0, 2^31 - 1 blocks.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends.h"
#include "cuda/cluster.cuh"
#include "cuda/launch.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kDimMax = 256;

struct LeakKernelParams {
  KeyLeakParams p;
  int lanes;    // of a row, a power of two
  int cluster;  // blocks
};

template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) Vector {
  Element at[kWidth];
};

// Vectors of a lane, so that 32 lanes hold kDimMax channels.
template <int kWidth>
inline constexpr int kVectors = kDimMax / (32 * kWidth) > 1 ? kDimMax / (32 * kWidth) : 1;

// Grid: [batch * kv_heads * cluster].  Block: kThreads.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads) KeyLeakKernel(const LeakKernelParams kernel) {
  constexpr int kHeld = kVectors<kWidth>;
  __shared__ double sums[kWarps][kDimMax], norms[kWarps];
  const KeyLeakParams& p = kernel.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;  // All blocks alike.
  const int rank = blockIdx.x % kernel.cluster;
  const int64_t unit = blockIdx.x / kernel.cluster;
  const int64_t head = unit % p.kv_heads, batch = unit / p.kv_heads;
  const int lanes = kernel.lanes, lane = threadIdx.x % lanes;
  const auto* const d_k =
      static_cast<const Element*>(p.d_k.data) + batch * p.d_k.batch_stride + head * p.d_k.head_stride;

  // 1. This thread's channels of its rows.  A group of lanes is in one warp and shares `row`;
  //    all groups go on as long as one of the warp has a row, for the shuffles.
  double sum[kHeld][kWidth] = {};
  double norm = 0;
  const int rows = kThreads / lanes;  // of the block at a time
  const int64_t stride = int64_t{rows} * kernel.cluster;
  const int64_t in_stride = rank * rows + threadIdx.x / lanes;
  for (int64_t first = 0; first < p.k_len; first += stride) {
    const int64_t row = first + in_stride;
    double squares = 0;
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      const int channel = (held * lanes + lane) * kWidth;
      Vector<Element, kWidth> x = {};
      if (row < p.k_len && channel < p.head_dim) {
        x = *reinterpret_cast<const Vector<Element, kWidth>*>(d_k + row * p.d_k.token_stride + channel);
      }
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const double value = static_cast<float>(x.at[c]);
        squares = fma(value, value, squares);
        sum[held][c] += value;
      }
    }
    for (int offset = 1; offset < lanes; offset *= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    if (lane == 0) norm += sqrt(squares);
  }

  // 2. Over the groups of a warp.
  for (int offset = lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        sum[held][c] += __shfl_xor_sync(0xffffffffu, sum[held][c], offset);
      }
    }
    norm += __shfl_xor_sync(0xffffffffu, norm, offset);
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 < lanes) {
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const int channel = (held * lanes + lane) * kWidth + c;
        if (channel < kDimMax) sums[warp][channel] = sum[held][c];
      }
    }
  }
  if (threadIdx.x % 32 == 0) norms[warp] = norm;
  SyncCluster(kernel.cluster);

  // 3. Over the warps and blocks; then the length of the sum.
  if (rank == 0) {
    double square = 0;
    if (threadIdx.x < p.head_dim) {
      double total = 0;
      for (int block = 0; block < kernel.cluster; ++block) {
        const double* of_block = OfBlock(&sums[0][threadIdx.x], block, kernel.cluster);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += of_block[w * kDimMax];
      }
      square = total * total;
    }
    double gradient = 0;
    if (threadIdx.x == 0) {
      for (int block = 0; block < kernel.cluster; ++block) {
        const double* of_block = OfBlock(&norms[0], block, kernel.cluster);
        for (int w = 0; w < kWarps; ++w) gradient += of_block[w];
      }
    }
    __syncthreads();  // This block's sums have been read.
    for (int offset = 16; offset > 0; offset /= 2) {
      square += __shfl_xor_sync(0xffffffffu, square, offset);
    }
    if (threadIdx.x % 32 == 0) sums[0][warp] = square;
    __syncthreads();
    if (threadIdx.x == 0) {
      double squares = 0;
      for (int w = 0; w < kWarps; ++w) squares += sums[0][w];
      atomicAdd(p.leak_sum + head, static_cast<float>(sqrt(squares)));
      atomicAdd(p.gradient_sum + head, static_cast<float>(gradient));
    }
  }
  SyncCluster(kernel.cluster);  // No block ends while another reads its sums.
}

template <class Element, int kWidth>
Status Launch(const KeyLeakParams& p, const Gpu& gpu, void* stream) {
  LeakKernelParams kernel = {};
  kernel.p = p;
  const int64_t vectors = (p.head_dim + kWidth - 1) / kWidth;
  kernel.lanes = 1;
  while (kernel.lanes < 32 && kernel.lanes < vectors) kernel.lanes *= 2;
  Grid grid;
  grid.units = p.batch * p.kv_heads;
  grid.threads = kThreads;
  // Eight rows a thread pay for the exchange.
  grid.cluster = kernel.cluster = ClusterSize(gpu, grid.units, p.k_len * kernel.lanes / (8 * kThreads));
  if (grid.units > INT32_MAX / grid.cluster) {
    return Fail(Status::kUnsupported, "batch is %lld, but at most %lld is built for these heads",
                static_cast<long long>(p.batch), static_cast<long long>(INT32_MAX / grid.cluster / p.kv_heads));
  }
  return LaunchClusters(KeyLeakKernel<Element, kWidth>, kernel, grid, stream, "the key-gradient leak");
}

template <class Element>
Status LaunchOf(const KeyLeakParams& p, const Gpu& gpu, void* stream) {
  return IsVectorized(p.dtype, p.d_k, p.batch, p.kv_heads, p.k_len, p.head_dim)
             ? Launch<Element, kVectorBytes / sizeof(Element)>(p, gpu, stream)
             : Launch<Element, 1>(p, gpu, stream);
}

}  // namespace

Status KeyLeak(const KeyLeakParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  if (p.head_dim > kDimMax) {
    return Fail(Status::kUnsupported, "head_dim is %lld, but 1..%d is supported on a GPU",
                static_cast<long long>(p.head_dim), kDimMax);
  }
  if (p.batch == 0 || p.k_len == 0) return Status::kOk;
  switch (p.dtype) {
    case DType::kBFloat16:
      return LaunchOf<__nv_bfloat16>(p, gpu, stream);
    case DType::kFloat16:
      return LaunchOf<__half>(p, gpu, stream);
    case DType::kFloat32:
      break;
  }
  return LaunchOf<float>(p, gpu, stream);
}

}  // namespace bellwether::kernels::cuda
