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

// Sums of a block: a channel each, and behind them the norms' and how many keys of V there are.
template <class Shape>
inline constexpr int kKeySums = Shape::kDimMax + 2;

// What a thread knows of the keys that its block has seen.
template <class Shape>
struct KeySums {
  // Of its channels.  Tensor cores: 2 (lane % 4) and the next one of every eighth block of
  // eight, lanes 4 apart alike; else channels threadIdx.x + i kTileThreads, in [i][0].
  static constexpr int kTurns =
      Shape::kTensorCores ? Shape::kDimMax / (8 * Shape::kWarps) : (Shape::kDimMax + kTileThreads - 1) / kTileThreads;
  double channel[kTurns][2] = {};
  double norms = 0;  // of its keys
  int in_v = 0;      // of its keys
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
__device__ __forceinline__ void AddKeys(const unsigned char* keys, int pitch, int dim, KeySums<Shape>& sums) {
  if constexpr (Shape::kTensorCores) {
    constexpr int kWarps = Shape::kWarps;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int padded = pitch - kVectorBytes;  // bytes of a row's channels
    // 1. Channels: a product with ones, keys being what is summed over.
    constexpr unsigned kOnes = std::is_same_v<Element, __half> ? 0x3c003c00u : 0x3f803f80u;
    const unsigned ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
    for (int turn = 0; turn < KeySums<Shape>::kTurns; ++turn) {
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
#pragma unroll
    for (int turn = 0; turn < KeySums<Shape>::kTurns; ++turn) {
      const int channel = threadIdx.x + turn * kTileThreads;
      if (channel >= dim) return;
      float sum = 0;
      for (int j = 0; j < Shape::kKeys; ++j) {
        sum += static_cast<float>(reinterpret_cast<const Element*>(keys + j * pitch)[channel]);
      }
      sums.channel[turn][0] += static_cast<double>(sum);
    }
  }
}

// sums_of_block [kKeySums].
template <class Shape>
__device__ __forceinline__ void StoreKeys(const KeySums<Shape>& sums, double* sums_of_block, double* scratch) {
  if constexpr (Shape::kTensorCores) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int turn = 0; turn < KeySums<Shape>::kTurns; ++turn) {
      double* const at = sums_of_block + (turn * Shape::kWarps + warp) * 8 + 2 * (lane % 4);
      if (lane >= 4) continue;
      at[0] = sums.channel[turn][0];
      at[1] = sums.channel[turn][1];
    }
  } else {
#pragma unroll
    for (int turn = 0; turn < KeySums<Shape>::kTurns; ++turn) {
      const int channel = threadIdx.x + turn * kTileThreads;
      if (channel < Shape::kDimMax) sums_of_block[channel] = sums.channel[turn][0];
    }
  }
  const double norms = SumOverBlock(sums.norms, scratch);
  const double in_v = SumOverBlock(sums.in_v, scratch);
  if (threadIdx.x != 0) return;
  sums_of_block[Shape::kDimMax] = norms;
  sums_of_block[Shape::kDimMax + 1] = in_v;
}

// |mean_j k_j| / mean_j |k_j| of the sequence, from the cluster's sums.
template <class Shape>
__device__ __forceinline__ void AddCoherence(const ProbeParams& p, int cluster, int64_t kv_head, double* sums_of_block,
                                             double* scratch) {
  double squares = 0, norms = 0, in_v = 0;
  for (int channel = threadIdx.x; channel < p.head_dim; channel += kTileThreads) {
    double sum = 0;
    for (int block = 0; block < cluster; ++block) sum += OfBlock(sums_of_block, block, cluster)[channel];
    squares += sum * sum;
  }
  for (int block = 0; block < cluster; ++block) {
    const double* const of_block = OfBlock(sums_of_block, block, cluster);
    norms += of_block[Shape::kDimMax];
    in_v += of_block[Shape::kDimMax + 1];
  }
  const double square = SumOverBlock(squares, scratch);
  if (threadIdx.x != 0 || in_v == 0) return;
  const double coherence = isfinite(norms) ? (norms == 0 ? 0. : sqrt(square) / norms) : NAN;
  float* const out = p.kv_out + kv_head;
  atomicAdd(out + kProbeKvSequences * p.kv_stat_stride, 1.f);
  atomicAdd(out + kProbeKvKeyCoherenceSum * p.kv_stat_stride, static_cast<float>(coherence));
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_PROBE_KEYS_CUH_
