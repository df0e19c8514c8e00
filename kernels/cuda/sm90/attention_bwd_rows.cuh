// attention_bwd_rows.cuh: what the backward does once a query row, before and after
// its main kernel.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_ROWS_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_ROWS_CUH_

#include "bellwether/kernels/probe.h"
#include "cuda/sm90/attention_bwd_tiles.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// Adds the rows of a block to the statistics of delta; e = -rowsum(dS).  All threads
// call it, `padded` is the row of thread 0, `rows` of them have one.
__device__ __forceinline__ void AddDeltaStats(const BwdParams& p, const Sequence& seq, int row, int64_t padded,
                                              int head, int rows) {
  __shared__ float sums[4];
  if (threadIdx.x < 4) sums[threadIdx.x] = 0.f;
  __syncthreads();
  float e = 0.f, delta = 0.f;
  if (threadIdx.x < rows) {
    const float lse =
        p.lse[seq.index * p.lse_batch_stride + head * p.lse_head_stride + seq.q_start + row + threadIdx.x];
    if (lse > -INFINITY) {  // neither without keys nor with a NaN among its scores
      e = -p.ds_sum[padded + threadIdx.x];
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
    atomicAdd(p.stats + (kProbeDeltaBiasSum + threadIdx.x) * p.stat_stride + head, sums[threadIdx.x]);
  }
}

// delta, L in log2 units (or the anchor and 1 / lt), and cleared sums, also of the
// padding rows.  Grid: [padded rows / rows, heads, batch].  Block: 256, 8 channels a
// thread.
template <class S>
__global__ void __launch_bounds__(256) PrepareBwdKernel(const __grid_constant__ BwdParams p) {
  using T = typename S::T;
  constexpr int kLanes = S::kHeadDim / 8, kRowsPerBlock = 256 / kLanes;
  const int head = blockIdx.y, channel = threadIdx.x % kLanes * 8;
  const PaddedRow at = LocatePaddedRow(p.seq, blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes);
  const Sequence& seq = at.sequence;
  const int64_t padded = RowBase(p, seq, head) + at.row;
  const bool inside = at.row < seq.q_len;
  const int64_t lse_at = seq.index * p.lse_batch_stride + head * p.lse_head_stride + seq.q_start + at.row;
  const float lse = inside ? p.lse[lse_at] * kLog2E : -INFINITY;
  const auto read = [&](const void* base, const Strides& stride) {
    return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + seq.index * stride.batch +
                                           head * stride.head + (seq.q_start + at.row) * stride.token + channel);
  };
  float delta = 0.f;
  if (inside && channel < p.seq.head_dim) {
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
  for (int i = 1; i < kLanes; i *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, i);
  if (channel == 0) {
    const bool exists = lse > -INFINITY || lse != lse;  // NaN goes on
    p.delta[padded] = delta;
    p.lse_log2[padded] = !exists ? INFINITY : p.rounded ? p.anchor[lse_at] : lse;
    if (p.rounded) p.inverse[padded] = exists ? 1.f / p.rounded_sum[lse_at] : 0.f;
    if (p.ds_sum != nullptr) p.ds_sum[padded] = 0.f;
    if (p.turns != nullptr && padded % S::kRows < 8) {
      p.turns[padded / S::kRows * 8 + padded % S::kRows] = 0;
    }
  }
  float4* const sum = reinterpret_cast<float4*>(p.dq_sum + padded * S::kHeadDim + channel);
  sum[0] = sum[1] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// dQ = scale * (sum - rowsum(dS) kbar).  Grid: [padded rows / kRows, heads, batch].
// Block: 256, threads as the two consumer warpgroups.
template <class S>
__global__ void __launch_bounds__(256) FinishBwdKernel(const __grid_constant__ BwdParams p) {
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const int head = blockIdx.y;
  const PaddedRow tile = LocatePaddedRow(p.seq, blockIdx.x * S::kRows);
  const Sequence& seq = tile.sequence;
  if (tile.row >= seq.q_len) return;
  const int64_t padded = RowBase(p, seq, head) + tile.row;
  const int row = (S::kHalves == 1 ? warpgroup * 64 : 0) + thread / 32 * 16 + lane / 4;
  const int column = S::kHalves == 2 ? warpgroup * 64 : 0;
  const float* const sum = p.dq_sum + padded * S::kHeadDim + warpgroup * 4096 + thread * 4;
  const float* mean = nullptr;
  float ds_sum[2] = {0.f, 0.f};
  if (p.stats != nullptr) {
    AddDeltaStats(p, seq, tile.row, padded, head, min(S::kRows, seq.q_len - tile.row));
  }
  if (p.center) {
    const int kv_head = head / p.seq.group;
    mean = p.key_mean + (int64_t{kv_head} * p.seq.batch + seq.index) * S::kHeadDim + column;
    ds_sum[0] = p.ds_sum[padded + row];
    ds_sum[1] = p.ds_sum[padded + row + 8];
  }
  uint32_t words[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float4 x = *reinterpret_cast<const float4*>(sum + i * 512);
    if (mean != nullptr) {
      const float2 k = *reinterpret_cast<const float2*>(mean + i * 8 + lane % 4 * 2);
      x.x -= ds_sum[0] * k.x;
      x.y -= ds_sum[0] * k.y;
      x.z -= ds_sum[1] * k.x;
      x.w -= ds_sum[1] * k.y;
    }
    words[2 * i] = PackPair<typename S::T>(x.x * p.scale, x.y * p.scale);
    words[2 * i + 1] = PackPair<typename S::T>(x.z * p.scale, x.w * p.scale);
  }
  const auto place = [&](int at) -> uint16_t* {
    if (tile.row + at >= seq.q_len) return nullptr;
    return static_cast<uint16_t*>(p.dq) + seq.index * p.dq_stride.batch + head * p.dq_stride.head +
           (seq.q_start + tile.row + at) * p.dq_stride.token + column;
  };
  StoreRows<64>(words, place(row), place(row + 8), p.seq.head_dim - column, lane);
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_ROWS_CUH_
