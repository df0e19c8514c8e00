// attention_bwd_rows.cuh: what the backward does once a query row, before and
// after its main kernel.
//
// A shape S describes how a CTA of the main kernel holds the dQ of a step.  It
// has kRows queries and kOutputs of kHeadDim channels (kSplits CTAs share the
// channels) in kQueryThreads threads.  Their warps have kQueryTiles tiles of 16
// queries and kQueryColumns channels each.  QueryRow() is a thread's first
// query, QueryColumn() its warp's first channel.  Keys has what key_mean.cuh
// asks of a shape, alike for those that share its kernels.  kSumsKeys: the main
// kernel leaves the sums of K and of dK for it.  kShares: p.shares may be more
// than 1.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_ROWS_CUH_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_ROWS_CUH_

#include "bellwether/kernels/probe.h"
#include "cuda/accumulator_sums.cuh"
#include "cuda/attention_bwd_shares.cuh"
#include "cuda/attention_bwd_sinks.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_bwd_visible.cuh"
#include "cuda/key_mean.cuh"
#include "cuda/launch_order.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda {

// Adds the rows of a block to the statistics of delta.  All threads
// call it, `padded` is the row of thread 0, `rows` of them have one.
__device__ __forceinline__ void AddDeltaStats(const AttentionBwdParams& p, const Sequence& seq, int row, int64_t padded,
                                              int head, int rows) {
  __shared__ float sums[4];
  if (threadIdx.x < 4) sums[threadIdx.x] = 0.f;
  __syncthreads();
  float e = 0.f, delta = 0.f;
  if (threadIdx.x < rows) {
    const float lse =
        p.lse[seq.index * p.lse_batch_stride + head * p.lse_head_stride + seq.q_start + row + threadIdx.x];
    if (lse > -INFINITY) {  // neither without keys nor with a NaN among its scores
      e = p.errors != nullptr ? p.errors[padded + threadIdx.x] : -p.ds_sum[padded + threadIdx.x];
      delta = p.delta[padded + threadIdx.x] - e;
    }
  }
  float terms[4] = {e, e * e, fabsf(delta), fabsf(e)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int j = 1; j < 32; j *= 2) terms[i] += __shfl_xor_sync(0xffffffffu, terms[i], j);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[i], terms[i]);
  }
  __syncthreads();
  static_assert(kProbeDeltaBiasSumsq == kProbeDeltaBiasSum + 1 && kProbeDeltaAbsSum == kProbeDeltaBiasSum + 2 &&
                kProbeDeltaErrorAbsSum == kProbeDeltaBiasSum + 3);
  if (threadIdx.x < 4) {
    atomicAdd(p.stats.At(kProbeDeltaBiasSum + threadIdx.x, head), sums[threadIdx.x]);
  }
}

// Threads of a row, 8 channels each: a power of two.
template <class S>
inline constexpr int kRowLanes = S::kHeadDim <= 64    ? 8
                                 : S::kHeadDim <= 128 ? 16
                                                      : 32;

// delta, L in log2 units (or the anchor and 1 / lt), and cleared sums of a row, also of padding.  By the
// kRowLanes<S> threads that have the row, each from `channel` on.
template <class S>
__device__ __forceinline__ void PrepareRow(const AttentionBwdParams& p, const Sequence& seq, int head, int row,
                                           int channel) {
  using T = typename S::T;
  const int64_t padded = RowBase(p, seq, head) + row;
  const bool inside = row < seq.q_len;
  const int64_t lse_at = seq.index * p.lse_batch_stride + head * p.lse_head_stride + seq.q_start + row;
  const float lse = inside ? p.lse[lse_at] * kLog2E : -INFINITY;
  const auto read = [&](const void* base, const Strides& stride) {
    return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + seq.index * stride.batch +
                                           head * stride.head + (seq.q_start + row) * stride.token + channel);
  };
  float delta = 0.f;
  if (inside && channel < p.seq.v_dim) {
    const uint4 o = read(p.o, p.o_stride), d_o = read(p.d_o, p.d_o_stride);
    const uint4 lo = p.o_lo != nullptr ? read(p.o_lo, p.o_lo_stride) : make_uint4(0, 0, 0, 0);
    const uint32_t os[4] = {o.x, o.y, o.z, o.w}, gs[4] = {d_o.x, d_o.y, d_o.z, d_o.w},
                   los[4] = {lo.x, lo.y, lo.z, lo.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = UnpackPair<T>(os[i]), g = UnpackPair<T>(gs[i]), b = UnpackPair<__nv_bfloat16>(los[i]);
      delta += g.x * (a.x + b.x) + g.y * (a.y + b.y);
    }
  }
#pragma unroll
  for (int i = 1; i < kRowLanes<S>; i *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, i);
  if (channel == 0) {
    const bool exists = lse > -INFINITY || lse != lse;  // NaN goes on
    p.delta[padded] = delta;
    p.lse_log2[padded] = !exists ? INFINITY : p.rounded ? p.anchor[lse_at] : lse;
    if (p.rounded) p.inverse[padded] = exists ? 1.f / p.rounded_sum[lse_at] : 0.f;
    if (p.ds_sum != nullptr) p.ds_sum[padded] = 0.f;
    if (p.errors != nullptr) p.errors[padded] = 0.f;
    if (p.turns != nullptr && padded % S::kRows < kTurnsOfStep) {
      p.turns[padded / S::kRows * kTurnsOfStep + padded % S::kRows] = 0;
    }
  }
  if (channel >= S::kHeadDim) return;
  float4* const sum = reinterpret_cast<float4*>(p.dq_sum + padded * S::kHeadDim + channel);
  sum[0] = sum[1] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// All rows of a head, or of the first p.ahead pairs.  Grid: [padded rows / rows, heads, batch], or
// [padded rows / rows, p.ahead].  Block: 256, 8 channels a thread.
template <class S>
__global__ void __launch_bounds__(256) PrepareBwdKernel(const __grid_constant__ AttentionBwdParams p) {
  constexpr int kLanes = kRowLanes<S>, kRowsPerBlock = 256 / kLanes;
  LetNextLaunchStart();
  if constexpr (S::kShares) ClearShareCounts(p);
  if (p.ahead > 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    for (int i = threadIdx.x; i < 2 * p.seq.batch * p.seq.heads; i += 256) p.pair_counts[i] = 0;
  }
  const BlockHead of = LocateBlockHead(p);
  const PaddedRow at = LocatePaddedRow(p.seq, blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes, of.sequence);
  PrepareRow<S>(p, at.sequence, of.head, at.row, threadIdx.x % kLanes * 8);
}

// dQ = scale * (sum - rowsum(dS) kbar).  Grid: [padded rows / kRows * kSplits, heads,
// batch].  Block: kQueryThreads.
template <class S>
__global__ void __launch_bounds__(S::kQueryThreads) FinishBwdKernel(const __grid_constant__ AttentionBwdParams p) {
  constexpr int kColumns = S::kQueryColumns, kWords = kColumns / 2;  // of a row tile
  const int thread = threadIdx.x, lane = thread % 32, split = blockIdx.x % S::kSplits;
  AwaitLaunchBefore();
  const BlockHead of = LocateBlockHead(p);
  const int head = of.head;
  const PaddedRow tile = LocatePaddedRow(p.seq, blockIdx.x / S::kSplits * S::kRows, of.sequence);
  const Sequence& seq = tile.sequence;
  if (tile.row >= seq.q_len) return;
  const int64_t padded = RowBase(p, seq, head) + tile.row;
  static_assert(kStatsBlockRows % S::kRows == 0);
  if (split == 0 && p.stats.Count(seq.index, tile.row)) {
    AddDeltaStats(p, seq, tile.row, padded, head, min(S::kRows, seq.q_len - tile.row));
  }
  const int column = split * S::kOutputs + S::QueryColumn(thread);
  float sums[S::kQueryTiles * kWords];
  LoadSums<S::kQueryThreads>(p.dq_sum + padded * S::kHeadDim + split * S::kRows * S::kOutputs, thread, sums);
#pragma unroll
  for (int tile16 = 0; tile16 < S::kQueryTiles; ++tile16) {
    const int row = S::QueryRow(thread) + 16 * tile16;
    float* const x = sums + tile16 * kWords;
    if (p.center) {
      const float ds_sum[2] = {p.ds_sum[padded + row], p.ds_sum[padded + row + 8]};
      const float* const mean =
          p.key_mean + (int64_t{head / p.seq.group} * p.seq.batch + seq.index) * S::kHeadDim + column + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const float2 k = *reinterpret_cast<const float2*>(mean + i * 2);
        x[i] -= ds_sum[0] * k.x;
        x[i + 1] -= ds_sum[0] * k.y;
        x[i + 2] -= ds_sum[1] * k.x;
        x[i + 3] -= ds_sum[1] * k.y;
      }
    }
    constexpr int kStored = kStoredColumns<kColumns>;
    uint32_t words[kStored / 4] = {};
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {
      words[i] = PackPair<typename S::T>(x[2 * i] * p.scale, x[2 * i + 1] * p.scale);
    }
    const auto place = [&](int at) -> uint16_t* {
      if (tile.row + at >= seq.q_len) return nullptr;
      return static_cast<uint16_t*>(p.dq) + seq.index * p.dq_stride.batch + head * p.dq_stride.head +
             (seq.q_start + tile.row + at) * p.dq_stride.token + column;
    };
    StoreRows<kStored>(words, place(row), place(row + 8), min(p.seq.head_dim - column, kColumns), lane);
  }
}

// `launch_main` launches the main kernel between the others.
template <class S, class Keys, class LaunchMain>
void LaunchBwdAround(const AttentionBwdParams& p, cudaStream_t stream, const LaunchMain& launch_main) {
  const unsigned heads = p.ahead > 0 ? p.ahead : p.seq.heads;
  const unsigned batch = p.seq.q_starts != nullptr || p.ahead > 0 ? 1 : p.seq.batch;
  const auto blocks = [&](int64_t count) { return dim3(static_cast<unsigned>(count), heads, batch); };
  PrepareBwdKernel<S><<<blocks(p.rows_per_head / (256 / kRowLanes<S>)), 256, 0, stream>>>(p);
  if constexpr (Keys::kMasked) {
    if (p.d_sinks != nullptr) SumSinksKernel<kSumSinksThreads><<<p.seq.heads, kSumSinksThreads, 0, stream>>>(p);
    if (p.center) LaunchFindVisible<Keys>(p, stream);
  }
  if constexpr (!S::kSumsKeys) {
    if (p.center) LaunchSumKeys<Keys>(p, p.k, p.k_stride, p.key_sums, stream);
  }
  launch_main();
  if (p.center) {
    if constexpr (!S::kSumsKeys) LaunchSumKeys<Keys>(p, p.dk, p.dk_stride, p.d_key_sums, stream);
    LaunchSubtractMean<Keys>(p, stream);
  }
  AttentionBwdParams last = p;  // if rows are prepared ahead, of the last pairs
  last.block_pair = p.seq.batch * p.seq.heads - p.ahead;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks(p.rows_per_head / S::kRows * S::kSplits);
  config.blockDim = dim3(S::kQueryThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = p.overlaps ? 1 : 0;
  (void)cudaLaunchKernelEx(&config, FinishBwdKernel<S>, last);  // cudaGetLastError() has the error.
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_BWD_ROWS_CUH_
