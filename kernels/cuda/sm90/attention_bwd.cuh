// Stabilized attention, backward, Hopper; see bellwether/kernels/attention.h.
//
// Work      prepare: delta = rowsum(dO * (O + O_lo)), L in log2 units, dQ sums
//           cleared.  main: one CTA per tile of 128 keys, longest first, loops
//           over the tiles of kRows queries of every query head of its group, so
//           that dK and dV are whole sums in registers.  Warpgroup 0 loads; each
//           of the other two owns 64 keys: S^T = K Q^T, dP^T = V dO^T,
//           P^T = exp2(S^T - L), dS^T = P^T (dP^T - delta), dV += P^T dO,
//           dK += dS^T Q with P^T and dS^T from registers; dS^T goes to shared
//           memory once for dQ = dS K, of which each warpgroup computes half and
//           adds it to global memory.  S^T of the next tile is issued behind dK
//           of this one.  finish: dQ * scale to the output type.
// Memory    Q, dO once per tile of keys, from L2; dQ sums: 4 bytes an element
//           added per tile of keys.
// Numerics  S, dP, P, delta, dQ, dK, dV in fp32; P and dS rounded to the input
//           type as operands.  The order in which key tiles add to dQ is not
//           fixed: dQ may differ in the last bits between launches.
// Limits    head_dim 64 or 128; strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/sm90/attention_bwd_params.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

template <class T_, int kHeadDim_>
struct BwdShape {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kCols = 128;                        // keys a CTA
  static constexpr int kRows = kHeadDim == 64 ? 128 : 64;  // queries a step
  static constexpr int kStages = 2;
  static constexpr int kThreads = 384;
  static constexpr int kHalves = kHeadDim / 64;
  static constexpr int kKvBytes = kCols * kHeadDim * 2;
  static constexpr int kQBytes = kRows * kHeadDim * 2;
  static constexpr int kRowBytes = kRows * 4;          // of L or delta
  static constexpr int kDsBytes = kCols * kRows * 2;
  // dV is issued before dS is computed where registers suffice.
  static constexpr bool kEarlyValues = kHeadDim == 128;
  static constexpr int kSharedBytes = 2 * kKvBytes + 2 * kStages * (kQBytes + kRowBytes) +
                                      2 * kDsBytes + 1024 + 256;
  static_assert(kSharedBytes <= 227 * 1024);
};

template <class S>
struct BwdShared {
  uint32_t k, v, q, d_o, ds, lse, delta, kv_full, q_full, q_empty, d_o_full, d_o_empty;

  __device__ explicit BwdShared(char* raw) {
    k = (SharedAddress(raw) + 1023u) & ~1023u;
    v = k + S::kKvBytes;
    q = v + S::kKvBytes;
    d_o = q + S::kStages * S::kQBytes;
    ds = d_o + S::kStages * S::kQBytes;
    lse = ds + 2 * S::kDsBytes;
    delta = lse + S::kStages * S::kRowBytes;
    kv_full = delta + S::kStages * S::kRowBytes;
    q_full = kv_full + 8;
    q_empty = q_full + 8 * S::kStages;
    d_o_full = q_empty + 8 * S::kStages;
    d_o_empty = d_o_full + 8 * S::kStages;
  }
};

// This CTA's keys, and the steps over (query head of the group, query tile).
struct BwdTile {
  int key, kv_head, batch, first_tile, end_tile;
};

template <class S>
__device__ __forceinline__ BwdTile LocateBwdTile(const BwdParams& p) {
  const int index = blockIdx.x;
  const int section_tiles = p.section * p.kv_tiles;
  const int section = index / section_tiles;
  const int first = section * p.section;
  const int in_section = index - section * section_tiles;
  const int pairs = min(p.section, p.batch * p.kv_heads - first);
  const int rank = in_section / pairs;
  const int pair = first + in_section - rank * pairs;
  BwdTile t;
  t.key = rank * S::kCols;  // causal: the first keys are seen by most queries
  t.batch = pair / p.kv_heads;
  t.kv_head = pair - t.batch * p.kv_heads;
  t.first_tile = p.causal ? max(0, t.key - (p.k_len - p.q_len)) / S::kRows : 0;
  t.end_tile = (p.q_len + S::kRows - 1) / S::kRows;
  return t;
}

template <class S>
__device__ __forceinline__ void BwdProduce(const BwdParams& p, const BwdMaps& maps,
                                           const BwdShared<S>& sm) {
  const BwdTile t = LocateBwdTile<S>(p);
  BarrierArriveExpect(sm.kv_full, 2 * S::kKvBytes);
  LoadTile<S::kHalves>(sm.k, &maps.k, sm.kv_full, S::kCols, t.key, t.kv_head, t.batch);
  LoadTile<S::kHalves>(sm.v, &maps.v, sm.kv_full, S::kCols, t.key, t.kv_head, t.batch);
  RingPosition<S::kStages> at;
  for (int g = 0; g < p.group; ++g) {
    const int head = t.kv_head * p.group + g;
    const int64_t row_base = (int64_t{t.batch} * p.heads + head) * p.q_padded;
    for (int m = t.first_tile; m < t.end_tile; ++m) {
      const int row = m * S::kRows;
      const uint32_t q_full = sm.q_full + 8 * at.stage, d_o_full = sm.d_o_full + 8 * at.stage;
      BarrierWait(sm.q_empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(q_full, S::kQBytes + S::kRowBytes);
      LoadTile<S::kHalves>(sm.q + at.stage * S::kQBytes, &maps.q, q_full, S::kRows, row, head,
                           t.batch);
      BulkLoad(sm.lse + at.stage * S::kRowBytes, p.lse_log2 + row_base + row, q_full, S::kRowBytes);
      BarrierWait(sm.d_o_empty + 8 * at.stage, at.parity ^ 1);
      BarrierArriveExpect(d_o_full, S::kQBytes + S::kRowBytes);
      LoadTile<S::kHalves>(sm.d_o + at.stage * S::kQBytes, &maps.d_o, d_o_full, S::kRows, row, head,
                           t.batch);
      BulkLoad(sm.delta + at.stage * S::kRowBytes, p.delta + row_base + row, d_o_full,
               S::kRowBytes);
      at.Advance();
    }
  }
}

// D[64 keys, kRows] = A[64 keys, head_dim] B[kRows, head_dim]^T.
template <class S>
__device__ __forceinline__ void IssueInner(float (&d)[S::kRows / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 16; ++i) {
    Wgmma<typename S::T, S::kRows, false, false>::Ss(d, a + (i / 4) * (S::kCols * 8) + (i % 4) * 2,
                                                     b + (i / 4) * (S::kRows * 8) + (i % 4) * 2,
                                                     i > 0);
  }
}

// D[64 keys, head_dim] += A[64 keys, kRows] B[kRows, head_dim].
template <class S>
__device__ __forceinline__ void IssueOuter(float (&d)[S::kHeadDim / 2],
                                           const uint32_t (&a)[S::kRows / 4], uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kRows / 16; ++i) {
    Wgmma<typename S::T, S::kHeadDim, false, true>::Rs(d, a[4 * i], a[4 * i + 1], a[4 * i + 2],
                                                       a[4 * i + 3], b + i * 128, 1);
  }
}

// dQ[64, 64] = dS[64 queries, 128 keys] K[128 keys, 64]; dS lies transposed.
template <class S>
__device__ __forceinline__ void IssueQueries(float (&d)[32], uint64_t ds, uint64_t k) {
#pragma unroll
  for (int i = 0; i < S::kCols / 16; ++i) {
    Wgmma<typename S::T, 64, true, true>::Ss(d, ds + i * 128, k + i * 128, i > 0);
  }
}

template <class S>
__device__ __forceinline__ void BwdConsume(const BwdParams& p, const BwdShared<S>& sm,
                                           int warpgroup) {
  using T = typename S::T;
  constexpr int kScores = S::kRows / 2, kPairs = S::kRows / 4;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int first_column = lane % 4 * 2;
  const BwdTile t = LocateBwdTile<S>(p);
  const int key = t.key + warpgroup * 64 + warp * 16 + lane / 4;
  const uint64_t k_rows = TileDescriptor(sm.k + warpgroup * 64 * 128, 0, 1024);
  const uint64_t v_rows = TileDescriptor(sm.v + warpgroup * 64 * 128, 0, 1024);
  // dQ: at head_dim 128 a warpgroup owns 64 channels, at 64 it owns 64 queries.
  const uint64_t k_half = TileDescriptor(
      sm.k + (S::kHalves == 2 ? warpgroup * S::kCols * 128 : 0), 0, 1024);
  const uint64_t ds_half = TileDescriptor(
      sm.ds + (S::kHalves == 1 ? warpgroup * S::kCols * 128 : 0), 0, 1024);
  const uint64_t q_tiles = TileDescriptor(sm.q, S::kRows * 128, 1024);
  const uint64_t d_o_tiles = TileDescriptor(sm.d_o, S::kRows * 128, 1024);

  float dk[S::kHeadDim / 2], dv[S::kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
  const int tiles = t.end_tile - t.first_tile;
  const int steps = tiles > 0 ? p.group * tiles : 0;

  if (steps > 0) {
    RingPosition<S::kStages> at;
    int m = t.first_tile, head = t.kv_head * p.group;
    float s[kScores];
    BarrierWait(sm.kv_full, 0);
    BarrierWait(sm.q_full, 0);
    PinRegisters(dk);
    PinRegisters(dv);
    WgmmaFence();
    IssueInner<S>(s, k_rows, q_tiles);
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    int step = 0;
    const auto run_step = [&](auto is_last) {
      constexpr bool kLast = decltype(is_last)::value;
      float dp[kScores], pr[kScores];
      uint32_t probs[kPairs], ds[kPairs];
      const uint32_t d_o_empty = sm.d_o_empty + 8 * at.stage, q_empty = sm.q_empty + 8 * at.stage;
      BarrierWait(sm.d_o_full + 8 * at.stage, at.parity);
      WgmmaFence();
      IssueInner<S>(dp, v_rows, d_o_tiles + at.stage * (S::kQBytes / 16));
      WgmmaCommit();
      // S of this step is there already; dP runs under its exponentials.
      const int shift = p.k_len - p.q_len;
      const bool edge = t.key + S::kCols > p.k_len ||
                        (p.causal && t.key + S::kCols - 1 > m * S::kRows + shift);
      if (edge) {
        const int again = ThreadIndexAgain() % 128;
        const int key_again = t.key + warpgroup * 64 + again / 32 * 16 + again % 32 / 4;
        int from[2];  // first allowed query column of each of the two keys
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          from[r] = p.causal ? key_again + 8 * r - shift - m * S::kRows - first_column : -S::kRows;
          if (key_again + 8 * r >= p.k_len) from[r] = S::kRows;
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          if (i / 4 * 8 + i % 2 < from[i / 2 % 2]) s[i] = -INFINITY;
        }
      }
      const uint32_t lse = sm.lse + at.stage * S::kRowBytes + first_column * 4;
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float2 l = LoadShared2(lse + i * 8);
        pr[i] = Exp2(fmaf(s[i], p.scale_log2, -l.x));
        pr[i + 1] = Exp2(fmaf(s[i + 1], p.scale_log2, -l.y));
        pr[i + 2] = Exp2(fmaf(s[i + 2], p.scale_log2, -l.x));
        pr[i + 3] = Exp2(fmaf(s[i + 3], p.scale_log2, -l.y));
      }
      const uint64_t d_o_tile = d_o_tiles + at.stage * (S::kQBytes / 16);
      if constexpr (S::kEarlyValues) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) probs[i] = PackPair<T>(pr[2 * i], pr[2 * i + 1]);
      }
      WgmmaWait<0>();
      PinRegisters(dp);
      if constexpr (S::kEarlyValues) {
        PinRegisters(probs);
        PinRegisters(dv);
        WgmmaFence();
        IssueOuter<S>(dv, probs, d_o_tile);
        WgmmaCommit();
      }
      const uint32_t delta = sm.delta + at.stage * S::kRowBytes + first_column * 4;
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float2 d = LoadShared2(delta + i * 8);
        if constexpr (!S::kEarlyValues) {
          probs[i / 2] = PackPair<T>(pr[i], pr[i + 1]);
          probs[i / 2 + 1] = PackPair<T>(pr[i + 2], pr[i + 3]);
        }
        ds[i / 2] = PackPair<T>(pr[i] * (dp[i] - d.x), pr[i + 1] * (dp[i + 1] - d.y));
        ds[i / 2 + 1] = PackPair<T>(pr[i + 2] * (dp[i + 2] - d.x), pr[i + 3] * (dp[i + 3] - d.y));
      }
      // dS buffers alternate: one barrier a step suffices, because a warpgroup
      // that passed the last one had finished reading the other buffer before.
      const uint32_t ds_buffer = (step & 1) * S::kDsBytes;
      const int again = ThreadIndexAgain() % 128;
      const int ds_row = warpgroup * 64 + again / 32 * 16 + again % 16;
      const uint32_t ds_address = sm.ds + ds_buffer + ds_row * 128;
#pragma unroll
      for (int i = 0; i < kPairs; i += 4) {
        const int chunk = i / 2 % 8 + again % 32 / 16;
        StoreMatrices(ds_address + i / 16 * (S::kCols * 128) + ((chunk ^ ds_row % 8) * 16), ds[i],
                      ds[i + 1], ds[i + 2], ds[i + 3]);
      }
      ProxyFence();
      if constexpr (S::kEarlyValues) {
        WgmmaWait<0>();  // dV: its operand's registers become S of the next step
        PinRegisters(dv);
        PinRegisters(probs);
        BarrierArrive(d_o_empty);
      }
      NamedSync(1, 256);

      float dq[32];
      if constexpr (!S::kEarlyValues) {
        PinRegisters(probs);
        PinRegisters(dv);
      }
      PinRegisters(ds);
      PinRegisters(dk);
      WgmmaFence();
      if constexpr (!S::kEarlyValues) {
        IssueOuter<S>(dv, probs, d_o_tile);
        WgmmaCommit();
      }
      IssueQueries<S>(dq, ds_half + ds_buffer / 16, k_half);
      WgmmaCommit();
      if constexpr (!S::kEarlyValues) {
        WgmmaWait<1>();
        PinRegisters(dv);
        PinRegisters(probs);
        BarrierArrive(d_o_empty);
      }
      IssueOuter<S>(dk, ds, q_tiles + at.stage * (S::kQBytes / 16));
      WgmmaCommit();
      float* const dq_sum =
          p.dq_sum + ((int64_t{t.batch} * p.heads + head) * p.q_padded + m * S::kRows) * S::kHeadDim +
          warpgroup * 4096 + ThreadIndexAgain() % 128 * 4;
      if (++m == t.end_tile) {
        m = t.first_tile;
        ++head;
      }
      at.Advance();
      if constexpr (!kLast) {
        BarrierWait(sm.q_full + 8 * at.stage, at.parity);
        WgmmaFence();
        IssueInner<S>(s, k_rows, q_tiles + at.stage * (S::kQBytes / 16));
        WgmmaCommit();
        WgmmaWait<2>();  // dQ
      } else {
        WgmmaWait<1>();
      }
      PinRegisters(dq);
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        ReduceAdd4(dq_sum + i * 128, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
      }
      WgmmaWait<0>();  // dK, and S of the next step
      PinRegisters(dk);
      PinRegisters(s);
      BarrierArrive(q_empty);
    };
    for (; step + 1 < steps; ++step) run_step(std::false_type{});
    run_step(std::true_type{});
    PinRegisters(dk);
  }

  const auto place = [&](void* base, const FwdStrides& stride, int at) -> uint16_t* {
    if (at >= p.k_len) return nullptr;
    return static_cast<uint16_t*>(base) + t.batch * stride.batch + t.kv_head * stride.head +
           at * stride.token;
  };
  uint32_t words[S::kHeadDim / 4];
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 4; ++i) words[i] = PackPair<T>(dv[2 * i], dv[2 * i + 1]);
  StoreRows<S::kHeadDim>(words, place(p.dv, p.dv_stride, key), place(p.dv, p.dv_stride, key + 8),
                         lane);
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 4; ++i) {
    words[i] = PackPair<T>(dk[2 * i] * p.scale, dk[2 * i + 1] * p.scale);
  }
  StoreRows<S::kHeadDim>(words, place(p.dk, p.dk_stride, key), place(p.dk, p.dk_stride, key + 8),
                         lane);
}

// Grid: batch * kv_heads * kv_tiles.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    AttentionBwdKernel(const __grid_constant__ BwdParams p, const __grid_constant__ BwdMaps maps) {
  extern __shared__ char raw[];
  const BwdShared<S> sm(raw);
  if (threadIdx.x == 0) {
    BarrierInit(sm.kv_full, 1);
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(sm.q_full + 8 * i, 1);
      BarrierInit(sm.d_o_full + 8 * i, 1);
      // Every consumer thread reads L and delta, and every one arrives.
      BarrierInit(sm.q_empty + 8 * i, 256);
      BarrierInit(sm.d_o_empty + 8 * i, 256);
    }
    BarrierInitFence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    RegistersShrink<24>();
    if (threadIdx.x == 0) BwdProduce<S>(p, maps, sm);
  } else {
    RegistersGrow<240>();
    BwdConsume<S>(p, sm, warpgroup - 1);
  }
}

// delta, L in log2 units, and cleared dQ sums, also of the padding rows.
// Grid: [q_padded / rows, heads, batch].  Block: 256, 8 channels a thread.
template <class S>
__global__ void __launch_bounds__(256) PrepareBwdKernel(const __grid_constant__ BwdParams p) {
  using T = typename S::T;
  constexpr int kLanes = S::kHeadDim / 8, kRowsPerBlock = 256 / kLanes;
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  const int head = blockIdx.y, batch = blockIdx.z, channel = threadIdx.x % kLanes * 8;
  const int64_t padded = (int64_t{batch} * p.heads + head) * p.q_padded + row;
  const bool inside = row < p.q_len;
  const auto at = [&](const void* base, const FwdStrides& stride) {
    return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) +
                                           batch * stride.batch + head * stride.head +
                                           row * stride.token + channel);
  };
  float delta = 0.f;
  if (inside) {
    const uint4 o = at(p.o, p.o_stride), d_o = at(p.d_o, p.d_o_stride);
    const uint4 lo = p.o_lo != nullptr ? at(p.o_lo, p.o_lo_stride) : make_uint4(0, 0, 0, 0);
    const uint32_t os[4] = {o.x, o.y, o.z, o.w}, gs[4] = {d_o.x, d_o.y, d_o.z, d_o.w},
                   los[4] = {lo.x, lo.y, lo.z, lo.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = UnpackPair<T>(os[i]), g = UnpackPair<T>(gs[i]),
                   b = UnpackPair<__nv_bfloat16>(los[i]);
      delta += g.x * (a.x + b.x) + g.y * (a.y + b.y);
    }
  }
#pragma unroll
  for (int i = 1; i < kLanes; i *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, i);
  if (channel == 0) {
    constexpr float kLog2E = 1.44269504088896341f;
    const float lse =
        inside ? p.lse[batch * p.lse_batch_stride + head * p.lse_head_stride + row] : -INFINITY;
    p.delta[padded] = delta;
    p.lse_log2[padded] = lse == -INFINITY ? INFINITY : lse * kLog2E;
  }
  float4* const sum = reinterpret_cast<float4*>(p.dq_sum + padded * S::kHeadDim + channel);
  sum[0] = sum[1] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// dQ = scale * sum.  Grid: [tiles of kRows queries, heads, batch].  Block: 256,
// threads as the two consumer warpgroups.
template <class S>
__global__ void __launch_bounds__(256) FinishBwdKernel(const __grid_constant__ BwdParams p) {
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int row = blockIdx.x * S::kRows + (S::kHalves == 1 ? warpgroup * 64 : 0) +
                  thread / 32 * 16 + lane / 4;
  const int column = S::kHalves == 2 ? warpgroup * 64 : 0;
  const float* const sum =
      p.dq_sum +
      ((int64_t{batch} * p.heads + head) * p.q_padded + blockIdx.x * S::kRows) * S::kHeadDim +
      warpgroup * 4096 + thread * 4;
  uint32_t words[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(sum + i * 512);
    words[2 * i] = PackPair<typename S::T>(x.x * p.scale, x.y * p.scale);
    words[2 * i + 1] = PackPair<typename S::T>(x.z * p.scale, x.w * p.scale);
  }
  const auto place = [&](int at) -> uint16_t* {
    if (at >= p.q_len) return nullptr;
    return static_cast<uint16_t*>(p.dq) + batch * p.dq_stride.batch + head * p.dq_stride.head +
           at * p.dq_stride.token + column;
  };
  StoreRows<64>(words, place(row), place(row + 8), lane);
}

template <class S>
Status LaunchAttentionBwd(const BwdParams& p, const BwdMaps& maps, cudaStream_t stream) {
  const auto kernel = AttentionBwdKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) !=
      cudaSuccess) {
    return Status::kDeviceError;
  }
  const unsigned heads = p.heads, batch = p.batch;
  PrepareBwdKernel<S>
      <<<dim3(p.q_padded * (S::kHeadDim / 8) / 256, heads, batch), 256, 0, stream>>>(p);
  kernel<<<p.batch * p.kv_heads * p.kv_tiles, S::kThreads, S::kSharedBytes, stream>>>(p, maps);
  FinishBwdKernel<S>
      <<<dim3((p.q_len + S::kRows - 1) / S::kRows, heads, batch), 256, 0, stream>>>(p);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CUH_
