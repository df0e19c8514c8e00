// attention_bwd_parts.cuh: what a consumer of the backward does in a step: its
// products, and handing on dS and dQ.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARTS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARTS_CUH_

#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace bellwether::kernels::cuda::sm90 {

// What comes behind it in the program waits for all of x: ptxas moves no wait for a product above.  `spare`: a word of
// shared memory.
template <int kCount>
__device__ __forceinline__ void AwaitValues(const float (&x)[kCount], uint32_t spare) {
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) all |= __float_as_uint(x[i]) | __float_as_uint(x[i + 1]);
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0xffffffff;\n@p st.shared.b32 [%1], %0;\n}" ::"r"(all), "r"(spare)
               : "memory");
}

// Where the operands of a warpgroup's products lie.
struct BwdOperands {
  uint64_t k_rows, v_rows, k_half, ds_half, q_tiles, d_o_tiles;
};

// D[64 keys, kRows] = A[64 keys, head_dim] B[kRows, head_dim]^T.
template <class S>
__device__ __forceinline__ void IssueInner(float (&d)[S::kRows / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kChannels / 16; ++i) {
    Wgmma<typename S::T, S::kRows, false, false>::Ss(d, a + (i / 4) * (S::kCols * 8) + (i % 4) * 2,
                                                     b + (i / 4) * (S::kRows * 8) + (i % 4) * 2, i > 0);
  }
}

// D[64 keys, head_dim] += A[64 keys, kRows] B[kRows, head_dim].
template <class S>
__device__ __forceinline__ void IssueOuter(float (&d)[S::kChannels / 2], const uint32_t (&a)[S::kRows / 4],
                                           uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kRows / 16; ++i) {
    Wgmma<typename S::T, S::kChannels, false, true>::Rs(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                                                        b + i * 128, 1);
  }
}

// dQ[64, 64] = dS[64 queries, 128 keys] K[128 keys, 64]; dS lies as two tiles of 64 keys.  Columns of ones that all
// products share are nearer to K of each one that follows.
template <class S>
__device__ __forceinline__ void IssueQueries(float (&d)[S::kQueries / 2], uint64_t ds, uint64_t k) {
#pragma unroll
  for (int i = 0; i < S::kCols / 16; ++i) {
    const uint64_t nearer = S::kOnesOfProduct ? static_cast<uint64_t>(i * 128) << 16 : 0;
    Wgmma<typename S::T, S::kQueries, false, true>::Ss(d, ds + (i / 4) * (S::kRows * 8) + (i % 4) * 2,
                                                       k + i * 128 - nearer, i > 0);
  }
}

// Leaves a warpgroup's dS at `to`.
template <class S>
__device__ __forceinline__ void StoreScores(uint32_t to, const uint32_t (&ds)[S::kRows / 4]) {
  const int again = ThreadIndexAgain() % 128, lane = again % 32;
  const int row = lane / 16 * 8 + lane % 8, chunk = again / 32 * 2 + lane / 8 % 2;
  to += row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
  for (int i = 0; i < S::kRows / 4; i += 4) {
    StoreMatricesTransposed(to + i / 4 * (16 * 128), ds[i], ds[i + 1], ds[i + 2], ds[i + 3]);
  }
  ProxyFence();
}

// Leaves a warpgroup's dQ of one step, and rowsum(dS), in shared memory, in the
// accumulators' order, which is that of the sums.  `parity` is the step's.
template <class S>
__device__ __forceinline__ void StoreQueries(uint32_t to, uint32_t sums, uint32_t empty, uint32_t parity,
                                             const float (&dq)[S::kQueries / 2]) {
  const int thread = ThreadIndexAgain() - 128, warpgroup = thread / 128, lane = thread % 32;
  BarrierWait(empty, parity ^ 1);
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    StoreShared4(to + (i / 4 * S::kQueryThreads + thread) * 16, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
  }
  if constexpr (S::kRowSums) {  // at head_dim 128 both warpgroups have the same queries
    const int first = (S::kHalves == 1 ? warpgroup * 64 : 0) + thread % 128 / 32 * 16 + lane / 4;
    if (lane % 4 == 0 && (S::kHalves == 1 || warpgroup == 0)) {
      StoreShared(sums + first * 4, __float_as_uint(dq[32]));
      StoreShared(sums + (first + 8) * 4, __float_as_uint(dq[34]));
    }
  }
  ProxyFence();
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PARTS_CUH_
