// probe_keys.cuh: how long the keys of a sequence are and how much they point the same way,
// from the tiles that the probe has in shared memory anyway.
//
// 16-bit keys go through the tensor cores, which truncate what they add: at most 16 products
// of a channel pass before their sum is added in fp32, and a tile's in double.

#ifndef BELLWETHER_KERNELS_CUDA_PROBE_KEYS_CUH_
#define BELLWETHER_KERNELS_CUDA_PROBE_KEYS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "bellwether/kernels/probe.h"
#include "cuda/block_sum.cuh"
#include "cuda/cluster.cuh"
#include "cuda/mma.cuh"
#include "cuda/probe_tiles.cuh"

namespace bellwether::kernels::cuda {

inline constexpr int kDimMax = 256;

// What a thread knows of the keys that its block has seen.
template <bool kTensorCores>
struct KeySums {
  // Of its channels.  Tensor cores: 2 (lane % 4) and the next one of every eighth block of
  // eight, lanes 4 apart alike; else channel threadIdx.x, in [0][0].
  double channel[kTensorCores ? kDimMax / (8 * (kTileThreads / 32)) : 1][2] = {};
  double norms = 0;  // of its keys
};

// low, high: what 16 keys and the first or last eight of them multiply to, as mma leaves it; adds the
// roots of the diagonal.
__device__ __forceinline__ void AddNorms(const float (&low)[4], const float (&high)[4], double* norms) {
  const int lane = threadIdx.x % 32;
  if (lane / 8 != lane % 4) return;
  const bool odd = lane / 4 % 2 != 0;
  *norms += static_cast<double>(sqrtf(odd ? low[1] : low[0]));
  *norms += static_cast<double>(sqrtf(odd ? high[3] : high[2]));
}

// A tile of keys.  Norms are left to MultiplyWithNorms() where a warp's keys are its own.
template <class Element, class Shape>
__device__ __forceinline__ void AddKeys(const unsigned char* keys, int pitch, int dim,
                                        KeySums<Shape::kTensorCores>& sums) {
  if constexpr (Shape::kTensorCores) {
    constexpr int kWarps = kTileThreads / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int padded = pitch - kVectorBytes;  // bytes of a row's channels
    // 1. Channels: a product with ones, keys being what is summed over.
    constexpr unsigned kOnes = std::is_same_v<Element, __half> ? 0x3c003c00u : 0x3f803f80u;
    const unsigned ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
    for (int turn = 0; turn < kDimMax / (8 * kWarps); ++turn) {
      const int at = (turn * kWarps + warp) * kVectorBytes;
      if (at >= padded) break;
      float of_tile[2] = {};
#pragma unroll
      for (int first = 0; first < Shape::kKeys; first += 32) {
        unsigned b[4];
        LoadTransposed(keys + (first + lane) * pitch + at, b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum[4] = {};
          MultiplyAdd<Element>(ones, b[2 * half], b[2 * half + 1], sum);
          of_tile[0] += sum[0];
          of_tile[1] += sum[1];
        }
      }
      sums.channel[turn][0] += static_cast<double>(of_tile[0]);
      sums.channel[turn][1] += static_cast<double>(of_tile[1]);
    }
    // 2. Norms: the diagonal of 16 keys' products with each other.
    if constexpr (!Shape::kOwnKeys) {
      for (int first = warp * 16; first < Shape::kKeys; first += kWarps * 16) {
        const unsigned char* const at = keys + (first + lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * kVectorBytes;
        float low[4] = {}, high[4] = {};
        for (int step = 0; step < padded; step += 2 * kVectorBytes) {
          unsigned a[4];
          LoadMatrices(at + step, a);
          MultiplyAdd<Element>(a, a[0], a[2], low);
          MultiplyAdd<Element>(a, a[1], a[3], high);
        }
        AddNorms(low, high, &sums.norms);
      }
    }
  } else {
    constexpr int kShare = kTileThreads / Shape::kKeys;  // threads of a key
    float squares = 0;
    const auto* const key = reinterpret_cast<const Element*>(keys + threadIdx.x / kShare * pitch);
    for (int c = threadIdx.x % kShare; c < dim; c += kShare) {
      const float x = static_cast<float>(key[c]);
      squares = fmaf(x, x, squares);
    }
#pragma unroll
    for (int offset = 1; offset < kShare; offset *= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    if (threadIdx.x % kShare == 0) sums.norms += static_cast<double>(sqrtf(squares));
    if (threadIdx.x >= dim) return;
    float sum = 0;
    for (int j = 0; j < Shape::kKeys; ++j) {
      sum += static_cast<float>(reinterpret_cast<const Element*>(keys + j * pitch)[threadIdx.x]);
    }
    sums.channel[0][0] += static_cast<double>(sum);
  }
}

// channels [kDimMax + 1]: the block's sums, and behind them that of the norms.
template <bool kTensorCores>
__device__ __forceinline__ void StoreKeys(const KeySums<kTensorCores>& sums, double* channels, double* scratch) {
  if constexpr (kTensorCores) {
    constexpr int kWarps = kTileThreads / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int turn = 0; turn < kDimMax / (8 * kWarps); ++turn) {
      double* const at = channels + (turn * kWarps + warp) * 8 + 2 * (lane % 4);
      if (lane >= 4) continue;
      at[0] = sums.channel[turn][0];
      at[1] = sums.channel[turn][1];
    }
  } else {
    channels[threadIdx.x] = sums.channel[0][0];
  }
  const double norms = SumOverBlock(sums.norms, scratch);
  if (threadIdx.x == 0) channels[kDimMax] = norms;
}

// |mean_j k_j| / mean_j |k_j| of the sequence, from the cluster's sums.
__device__ __forceinline__ void AddCoherence(const ProbeParams& p, int cluster, int64_t kv_head, double* channels,
                                             double* scratch) {
  double channel = 0, norms = 0;
  for (int block = 0; block < cluster; ++block) {
    const double* const of_block = OfBlock(channels, block, cluster);
    if (threadIdx.x < p.head_dim) channel += of_block[threadIdx.x];
    norms += of_block[kDimMax];
  }
  const double square = SumOverBlock(channel * channel, scratch);
  if (threadIdx.x != 0) return;
  const double coherence = isfinite(norms) ? (norms == 0 ? 0. : sqrt(square) / norms) : NAN;
  float* const out = p.kv_out + kv_head;
  atomicAdd(out + kProbeKvSequences * p.kv_stat_stride, 1.f);
  atomicAdd(out + kProbeKvKeyCoherenceSum * p.kv_stat_stride, static_cast<float>(coherence));
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_PROBE_KEYS_CUH_
