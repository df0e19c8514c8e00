// attention_bwd_ahead.cuh: what the backward does once a query row, done under the products of other rows.
//
// Work      Two warps of a CTA have nothing to do.  They prepare a share of the rows of the pair (sequence, head)
//           that is p.ahead pairs later, and finish the same share of dQ of the pair that is p.ahead pairs before.
//           Kernels have only the first and the last p.ahead pairs.  A CTA's share goes by its steps.
// Order     A pair's CTAs wait until its rows are prepared, and what finishes waits until all CTAs of the pair have
//           added their dQ.  A CTA that another one waits for has a lower block number, so it has begun.
// Limits    One query head a key head, batches of equal lengths, without windows; if causal, as many keys as queries.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_AHEAD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_AHEAD_CUH_

#include "cuda/attention_bwd_rows.cuh"
#include "cuda/launch_order.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/attention_bwd_layout.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm90 {

// Of a unit: what fills kAheadBytes.
template <class S>
inline constexpr int kAheadRows = kAheadBytes / (3 * 2 * S::kHeadDim);

__device__ __forceinline__ int KeyTiles(const SequenceParams& p) { return (p.k_len + kBwdTileKeys - 1) / kBwdTileKeys; }

template <class Tile>
__device__ __forceinline__ int PairOf(const AttentionBwdParams& p, const Tile* tile) {
  return tile->sequence.index * p.seq.heads + tile->kv_head;
}

// By each thread that reads prepared rows or adds to cleared sums, or a warp of which one does.
template <class S>
__device__ __forceinline__ void AwaitPrepared(const AttentionBwdParams& p, const typename S::Tile* tile) {
  AwaitLaunchBefore();
  if (!S::kWorksAhead || p.ahead == 0) return;
  const int pair = PairOf(p, tile);
  if (pair < p.ahead) return;
  const int all = kAheadWarps * KeyTiles(p.seq);
  while (LoadAcquire(p.pair_counts + pair) != all) __nanosleep(64);
  GlobalProxyFence();
}

// By the warp whose one thread has added all dQ of the CTA, which is there.
template <class S>
__device__ __forceinline__ void SayAdded(const AttentionBwdParams& p, const typename S::Tile* tile) {
  if (p.ahead == 0 || threadIdx.x % 32 != 0) return;
  GlobalProxyFence();
  __threadfence();
  ReduceAddRelease(p.pair_counts + p.seq.batch * p.seq.heads + PairOf(p, tile), 1);
}

// The first unit of rows of a key tile, as far as the tiles before it have steps.
template <class S>
__device__ __forceinline__ int FirstUnit(const AttentionBwdParams& p, int tile) {
  const int tiles = KeyTiles(p.seq), units = static_cast<int>(p.rows_per_head) / kAheadRows<S>;
  if (!p.seq.causal) return units * tile / tiles;
  return kBwdTileKeys / kAheadRows<S> * tile * (2 * tiles - tile + 1) / (tiles + 1);
}

// The head that a warp finishes rows of, and the unit behind its last one.  In shared memory: registers are few.
struct AheadPart {
  int sequence, head, end;
};

// Where a warp works: its buffer, and the barrier that says that it is full.
struct AheadBuffer {
  uint32_t at, full, parity;
  __device__ __forceinline__ void Await() {
    BarrierWait(full, parity);
    parity ^= 1;
  }
};

// L and delta of a unit of rows, whose dQ is cleared.  By a warp.
template <class S>
__device__ __forceinline__ void PrepareUnit(const AttentionBwdParams& p, const BwdMaps& maps, int sequence, int head,
                                            int unit, AheadBuffer* buffer) {
  using T = typename S::T;
  constexpr int kRows = kAheadRows<S>, kLanes = kRowLanes<S>, kBytes = kRows * S::kHeadDim * 2;
  const bool has_rest = p.o_lo != nullptr;
  if (ThreadIndexAgain() % 32 == 0) {
    BarrierArriveExpect(buffer->full, (has_rest ? 3 : 2) * kBytes);
    const TileOrigin from = {0, sequence, 0, head};
    LoadTile<S::kHalves>(buffer->at, &maps.o, buffer->full, kRows, from, unit * kRows);
    LoadTile<S::kHalves>(buffer->at + kBytes, &maps.d_o_unit, buffer->full, kRows, from, unit * kRows);
    if (has_rest) LoadTile<S::kHalves>(buffer->at + 2 * kBytes, &maps.o_lo, buffer->full, kRows, from, unit * kRows);
  }
  __syncwarp();
  const uint32_t padded = static_cast<uint32_t>(head * p.rows_per_head + sequence * p.rows_per_sequence) + unit * kRows;
  {
    const int lane = ThreadIndexAgain() % 32, row = unit * kRows + lane;
    if (lane < kRows) {
      float lse = INFINITY;
      if (row < p.seq.q_len) {
        lse = p.lse[sequence * p.lse_batch_stride + head * p.lse_head_stride + row] * kLog2E;
        if (lse == -INFINITY) lse = INFINITY;  // NaN goes on
      }
      p.lse_log2[padded + lane] = lse;
    }
    float4* const sums = reinterpret_cast<float4*>(p.dq_sum + int64_t{padded} * S::kHeadDim) + lane;
#pragma unroll 4
    for (int i = 0; i < kRows * S::kHeadDim / 128; ++i) sums[i * 32] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  buffer->Await();
#pragma unroll 1
  for (int i = 0; i < kRows; i += 32 / kLanes) {
    const int lane = ThreadIndexAgain() % 32, row = i + lane / kLanes, chunk = lane % kLanes;
    const uint32_t at = buffer->at + chunk / 8 * (kRows * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16;
    const float4 o = LoadShared4(at), d_o = LoadShared4(at + kBytes);
    float4 rest = make_float4(0.f, 0.f, 0.f, 0.f);
    if (has_rest) rest = LoadShared4(at + 2 * kBytes);
    float delta = 0.f;
    const auto add = [&](float o2, float d_o2, float rest2) {
      const float2 a = UnpackPair<T>(__float_as_uint(o2)), g = UnpackPair<T>(__float_as_uint(d_o2));
      const float2 b = UnpackPair<__nv_bfloat16>(__float_as_uint(rest2));
      delta += g.x * (a.x + b.x) + g.y * (a.y + b.y);
    };
    add(o.x, d_o.x, rest.x);
    add(o.y, d_o.y, rest.y);
    add(o.z, d_o.z, rest.z);
    add(o.w, d_o.w, rest.w);
#pragma unroll
    for (int j = 1; j < kLanes; j *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, j);
    if (chunk == 0) p.delta[padded + row] = delta;
  }
  __syncwarp();
}

// dQ of a unit of rows, as FinishBwdKernel.  By a warp.
template <class S>
__device__ __forceinline__ void FinishUnit(const AttentionBwdParams& p, int sequence, int head, int unit,
                                           AheadBuffer* buffer) {
  constexpr int kRows = kAheadRows<S>, kUnits = S::kRows / kRows, kPiece = 512,
                kPieces = kRows * S::kHeadDim * 4 / kPiece;
  static_assert(kPieces == 16 && kUnits == 4);
  {  // A piece is what a warp of the consumers added by one instruction.
    const int lane = ThreadIndexAgain() % 32;
    if (lane == 0) BarrierArriveExpect(buffer->full, kPieces * kPiece);
    __syncwarp();
    if (lane < kPieces) {
      const int half = lane / 8, warp = S::kHalves == 2 ? unit % kUnits + kUnits * half : unit % kUnits * 2 + half;
      const float* const from =
          p.dq_sum +
          (head * p.rows_per_head + sequence * p.rows_per_sequence + unit / kUnits * S::kRows) * S::kHeadDim +
          lane % 8 * (4 * S::kQueryThreads) + warp * (kPiece / 4);
      BulkLoad(buffer->at + lane * kPiece, from, buffer->full, kPiece);
    }
  }
  buffer->Await();
#pragma unroll 1
  for (int part = 0; part < 4; ++part) {  // 16 rows of 32 columns
    uint32_t words[8];
    const uint32_t at = buffer->at + part * (4 * kPiece) + ThreadIndexAgain() % 32 * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = LoadShared4(at + i * kPiece);
      words[2 * i] = PackPair<typename S::T>(x.x * p.scale, x.y * p.scale);
      words[2 * i + 1] = PackPair<typename S::T>(x.z * p.scale, x.w * p.scale);
    }
    PinRegisters(words);
    const int lane = ThreadIndexAgain() % 32;
    const int row = unit * kRows + (S::kHalves == 1 ? part / 2 * 16 : 0) + lane / 4;
    const int column = (S::kHalves == 1 ? part % 2 : part) * 32;
    uint16_t* const to = static_cast<uint16_t*>(p.dq) + sequence * p.dq_stride.batch + head * p.dq_stride.head +
                         row * p.dq_stride.token + column;
    StoreRows<32>(words, row < p.seq.q_len ? to : nullptr, row + 8 < p.seq.q_len ? to + 8 * p.dq_stride.token : nullptr,
                  p.seq.head_dim - column, lane);
  }
  __syncwarp();
}

// By the warps that have nothing else to do: of which `warp` is one.
template <class S>
__device__ __forceinline__ void BwdWorkAhead(const AttentionBwdParams& p, const BwdMaps& maps, uint32_t base,
                                             uint32_t fulls, const typename S::Tile* tile, AheadPart* part, int warp) {
  AheadBuffer buffer = {base + warp * kAheadBytes, fulls + warp * 8, 0};
  const int pairs = p.seq.batch * p.seq.heads;
  AwaitLaunchBefore();  // The counts are cleared.
  // Uniform registers have them, of which there are enough.
  const int later = __shfl_sync(0xffffffffu, PairOf(p, tile) + p.ahead, 0);
  const int key_tile = __shfl_sync(0xffffffffu, tile->key / kBwdTileKeys, 0);
  if (later < pairs) {
    const int sequence = later / p.seq.heads, end = FirstUnit<S>(p, key_tile + 1);
#pragma unroll 1
    for (int unit = FirstUnit<S>(p, key_tile) + warp; unit < end; unit += kAheadWarps) {
      PrepareUnit<S>(p, maps, sequence, later - sequence * p.seq.heads, unit, &buffer);
    }
    GlobalProxyFence();
    __threadfence();
    __syncwarp();
    if (ThreadIndexAgain() % 32 == 0) ReduceAddRelease(p.pair_counts + later, 1);
  }
  if (later >= 2 * p.ahead) {
    const int before = later - 2 * p.ahead, sequence = before / p.seq.heads;
    while (LoadAcquire(p.pair_counts + pairs + before) != KeyTiles(p.seq)) __nanosleep(256);
    GlobalProxyFence();
    if (ThreadIndexAgain() % 32 == 0)
      *part = {sequence, before - sequence * p.seq.heads, FirstUnit<S>(p, key_tile + 1)};
    __syncwarp();
#pragma unroll 1
    for (int unit = FirstUnit<S>(p, key_tile) + warp; unit < part->end; unit += kAheadWarps) {
      FinishUnit<S>(p, part->sequence, part->head, unit, &buffer);
    }
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_AHEAD_CUH_
