// attention_bwd_shares.cuh: the sums of a tile's dV and dK where several CTAs
// share its steps.
//
// Work: each CTA leaves its part as its registers have it, a part of zeros if
// it had no step.  The last to do so adds the parts, in the order of the
// shares, and goes on as a CTA alone would.  None waits for another.
//
// Memory: 8 bytes an element of K for each share, written and read once.
//
// Numerics: sums in fp32 in an order that is always the same.  dV and dK repeat
// bit for bit.
//
// A shape S describes how a CTA holds its keys' dV or dK in 256 threads, of dK at
// least as many words as of dV; its kSplits CTAs have a tile together.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SHARES_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SHARES_CUH_

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/key_mean.cuh"

namespace bellwether::kernels::cuda {

// By all threads of the Prepare kernel.
__device__ __forceinline__ void ClearShareCounts(const AttentionBwdParams& p) {
  if (p.shares == 1) return;
  const int64_t block = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t threads = int64_t{gridDim.z} * gridDim.y * gridDim.x * blockDim.x;
  for (int64_t i = block * blockDim.x + threadIdx.x; i < int64_t{p.seq.kv_heads} * p.chunks * kShareCounts;
       i += threads) {
    p.share_counts[i] = 0;
  }
}

// Adds up what the CTAs of a tile have of dV and dK: by the 256 threads that hold them, of which
// `thread` is one, in CTA `split` of those that have the tile together.  Returns whether this CTA
// has the sums, in dv and dk.  `sync` is a barrier of these threads, `arrived` a word of theirs.
template <class S, int kValues, int kCount, class Tile, class Sync>
__device__ __forceinline__ bool AddShares(const AttentionBwdParams& p, const Tile& t, int split, int thread,
                                          int* arrived, const Sync& sync, float (&dv)[kValues], float (&dk)[kCount]) {
  constexpr int kThreads = 256, kShareFloats = kThreads * (kValues + kCount);
  static_assert(S::kSplits * kShareFloats <= 2 * kMeanKeys * S::kHeadDim && S::kSplits <= kShareCounts);
  static_assert(kValues <= kCount);
  const int64_t tile = int64_t{t.kv_head} * p.chunks + FirstChunk(p.seq, t.sequence.index) + t.key / kMeanKeys;
  float* const sums = p.share_sums + (tile * S::kSplits + split) * p.shares * kShareFloats + thread * 4;
  const auto word = [](float* share, int which, int i) {
    return reinterpret_cast<float4*>(share + (which * kValues + i) * kThreads);
  };
  float* const mine = sums + int64_t{t.share} * kShareFloats;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if (i < kValues) *word(mine, 0, i) = make_float4(dv[i], dv[i + 1], dv[i + 2], dv[i + 3]);
    *word(mine, 1, i) = make_float4(dk[i], dk[i + 1], dk[i + 2], dk[i + 3]);
  }
  __threadfence();
  sync();
  if (thread == 0) {
    *arrived = atomicAdd(p.share_counts + tile * kShareCounts + split, 1);
    __threadfence();
  }
  sync();
  if (*arrived != p.shares - 1) return false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dk[i] = 0.f;
    if (i < kValues) dv[i] = 0.f;
  }
  float* from = sums;
#pragma unroll 1
  for (int share = 0; share < p.shares; ++share, from += kShareFloats) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = i < kValues ? __ldcg(word(from, 0, i)) : make_float4(0.f, 0.f, 0.f, 0.f);
      const float4 k = __ldcg(word(from, 1, i));
      if (i < kValues) {
        dv[i] += v.x;
        dv[i + 1] += v.y;
        dv[i + 2] += v.z;
        dv[i + 3] += v.w;
      }
      dk[i] += k.x;
      dk[i + 1] += k.y;
      dk[i + 2] += k.z;
      dk[i + 3] += k.w;
    }
  }
  return true;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_SHARES_CUH_
