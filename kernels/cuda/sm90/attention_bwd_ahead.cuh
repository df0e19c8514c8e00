// attention_bwd_ahead.cuh: what the backward does once a query row, done under the products of other rows.
//
// Work      Two warps of a CTA have nothing to do.  They prepare a share of the rows of the pair (sequence, head)
//           that is p.ahead pairs later, and finish the same share of dQ of the pair that is p.ahead pairs before.
//           Kernels have only the first and the last p.ahead pairs.  A CTA's share goes by its steps.  If keys are
//           centred, they sum the CTA's keys, too, and take the means from dQ and dK of the pair before.
// Order     A pair's CTAs wait until its rows are prepared, and what finishes waits until all CTAs of the pair have
//           added their dQ, and stored dK and sums of keys.  A CTA that another one waits for has a lower block number,
//           so it has begun.
// Limits    One query head a key head, batches of equal lengths, without windows; if causal, as many keys as queries.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_AHEAD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_AHEAD_CUH_

#include "cuda/attention_bwd_rows.cuh"
#include "cuda/key_mean.cuh"
#include "cuda/launch_order.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_center.cuh"
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

// What a CTA counts up to once all that finishing reads is there: dQ and dK, and the halves of the sums of keys.
template <class S>
inline constexpr int kAddedCounts = S::kRowSums ? 1 + kAheadWarps : 1;

// By the warp whose one thread has added all dQ of the CTA, which is there.
template <class S>
__device__ __forceinline__ void SayAdded(const AttentionBwdParams& p, const typename S::Tile* tile) {
  if (p.ahead == 0 || threadIdx.x % 32 != 0) return;
  GlobalProxyFence();
  __threadfence();
  ReduceAddRelease(p.pair_counts + p.seq.batch * p.seq.heads + PairOf(p, tile), 1);
}

// The first unit of rows of a key tile, of `units` in all, as far as the tiles before it have steps.
template <class S>
__device__ __forceinline__ int FirstUnitOf(const AttentionBwdParams& p, int tile, int units) {
  const int tiles = KeyTiles(p.seq);
  if (!p.seq.causal) return units * tile / tiles;
  return kBwdTileKeys / kAheadRows<S> * tile * (2 * tiles - tile + 1) / (tiles + 1);
}

template <class S>
__device__ __forceinline__ int FirstUnit(const AttentionBwdParams& p, int tile) {
  return FirstUnitOf<S>(p, tile, static_cast<int>(p.rows_per_head) / kAheadRows<S>);
}

// The first unit of rows of dK.
template <class S>
__device__ __forceinline__ int FirstKeyUnit(const AttentionBwdParams& p, int tile) {
  return FirstUnitOf<S>(p, tile, KeyTiles(p.seq) * (kBwdTileKeys / kAheadRows<S>));
}

// The head that a warp finishes rows of, and the units behind its last ones.  In shared memory: registers are few.
struct AheadPart {
  uint16_t* d_k;  // of the head
  int sequence, head, end, key_end;
};

// Where a warp's buffer has a mean while it finishes, the first one's that of K and the second one's that of dK, and
// rowsum(dS) of a unit.
inline constexpr int kMeanAt = 8 * 1024;
template <class S>
inline constexpr int kDsSumsAt = kMeanAt + S::kHeadDim * 4;

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
      if constexpr (S::kRowSums) p.ds_sum[padded + lane] = 0.f;
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

// dQ of a unit of rows, as FinishBwdKernel.  By a warp.  `k_mean`: of the head's keys, in shared memory, if they are
// centred.
template <class S>
__device__ __forceinline__ void FinishUnit(const AttentionBwdParams& p, int sequence, int head, int unit,
                                           AheadBuffer* buffer, [[maybe_unused]] uint32_t k_mean) {
  constexpr int kRows = kAheadRows<S>, kUnits = S::kRows / kRows, kPiece = 512,
                kPieces = kRows * S::kHeadDim * 4 / kPiece;
  static_assert(kPieces == 16 && kUnits == 4);
  {  // A piece is what a warp of the consumers added by one instruction.
    const int lane = ThreadIndexAgain() % 32;
    if (lane == 0) {
      BarrierArriveExpect(buffer->full, kPieces * kPiece + (S::kRowSums ? kRows * 4 : 0));
      if constexpr (S::kRowSums) {
        BulkLoad(buffer->at + kDsSumsAt<S>,
                 p.ds_sum + head * p.rows_per_head + sequence * p.rows_per_sequence + unit * kRows, buffer->full,
                 kRows * 4);
      }
    }
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
    [[maybe_unused]] float first = 0.f, second = 0.f;
    [[maybe_unused]] uint32_t mean = 0;
    if constexpr (S::kRowSums) {
      const int lane = ThreadIndexAgain() % 32, row = (S::kHalves == 1 ? part / 2 * 16 : 0) + lane / 4;
      const uint32_t sums = buffer->at + kDsSumsAt<S> + row * 4;
      first = __int_as_float(LoadShared(sums));
      second = __int_as_float(LoadShared(sums + 8 * 4));
      mean = k_mean + (S::kHalves == 1 ? part % 2 : part) * 128 + lane % 4 * 8;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 x = LoadShared4(at + i * kPiece);
      if constexpr (S::kRowSums) {
        const float2 k = LoadShared2(mean + i * 32);
        x.x -= first * k.x;
        x.y -= first * k.y;
        x.z -= second * k.x;
        x.w -= second * k.y;
      }
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

// The sums over the CTA's keys of K, which lies in shared memory.  By a warp, of which 8 lanes share a row: each warp
// has halves of the channels.
template <class S>
__device__ __forceinline__ void SumKeys(const AttentionBwdParams& p, uint32_t k, uint32_t full,
                                        const typename S::Tile* tile, int warp) {
  BarrierWait(full, 0);
#pragma unroll 1
  for (int half = warp; half < S::kHalves; half += kAheadWarps) {
    const int lane = ThreadIndexAgain() % 32;
    float sums[8] = {};
#pragma unroll 1
    for (int row = lane / 8; row < S::kCols; row += 4) {
      const float4 x = LoadShared4(k + half * (S::kCols * 128) + row * 128 + (lane ^ row) % 8 * 16);
      const auto add = [&](int i, float two) {
        const float2 pair = UnpackPair<typename S::T>(__float_as_uint(two));
        sums[i] += pair.x;
        sums[i + 1] += pair.y;
      };
      add(0, x.x);
      add(2, x.y);
      add(4, x.z);
      add(6, x.w);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 8);
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 16);
    }
    if (lane < 8) {
      const int chunk = FirstChunk(p.seq, tile->sequence.index) + tile->key / S::kCols;
      float4* const to =
          reinterpret_cast<float4*>(p.key_sums + SumsAt<S>(p, tile->kv_head, chunk) + half * 64 + lane * 8);
      to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
  }
  __syncwarp();
}

// Leaves the mean of a pair's keys at `to`, of the sums of its tiles.  By a warp.
template <class S>
__device__ __forceinline__ void MeanOfSums(const AttentionBwdParams& p, const float* sums, uint32_t to,
                                           AheadBuffer* buffer) {
  constexpr int kSumBytes = S::kHeadDim * 4, kSums = kMeanAt / kSumBytes, kSumLanes = S::kHeadDim / 4;
  const int all = KeyTiles(p.seq);
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int first = 0; first < all; first += kSums) {
    const int count = min(all - first, kSums);
    const int lane = ThreadIndexAgain() % 32;
    if (lane == 0) {
      BarrierArriveExpect(buffer->full, count * kSumBytes);
      BulkLoad(buffer->at, sums + first * S::kHeadDim, buffer->full, count * kSumBytes);
    }
    __syncwarp();
    buffer->Await();
#pragma unroll 2
    for (int i = lane / kSumLanes; i < count; i += 32 / kSumLanes) {
      const float4 x = LoadShared4(buffer->at + i * kSumBytes + lane % kSumLanes * 16);
      total.x += x.x;
      total.y += x.y;
      total.z += x.z;
      total.w += x.w;
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = kSumLanes; i < 32; i *= 2) {
    total.x += __shfl_xor_sync(0xffffffffu, total.x, i);
    total.y += __shfl_xor_sync(0xffffffffu, total.y, i);
    total.z += __shfl_xor_sync(0xffffffffu, total.z, i);
    total.w += __shfl_xor_sync(0xffffffffu, total.w, i);
  }
  const float scale = 1.f / static_cast<float>(p.seq.k_len);
  StoreShared4(to + ThreadIndexAgain() % kSumLanes * 16, total.x * scale, total.y * scale, total.z * scale,
               total.w * scale);
  __syncwarp();
}

// Takes the mean, which lies at `mean`, from dK of two units.  By a warp.
template <class S>
__device__ __forceinline__ void CenterUnits(const AttentionBwdParams& p, const BwdMaps& maps, const AheadPart* part,
                                            int unit, AheadBuffer* buffer, uint32_t mean) {
  constexpr int kRows = kAheadRows<S>, kBytes = kRows * S::kHeadDim * 2;
  static_assert(2 * kBytes <= kMeanAt && kRows == kCenterUnitRows<S>);
  const int units = min(part->key_end - unit, 2);
  if (ThreadIndexAgain() % 32 == 0) {
    BarrierArriveExpect(buffer->full, units * kBytes);
    const TileOrigin from = {0, part->sequence, 0, part->head};
    LoadTile<S::kHalves>(buffer->at, &maps.d_k, buffer->full, kRows, from, unit * kRows);
    if (units > 1) LoadTile<S::kHalves>(buffer->at + kBytes, &maps.d_k, buffer->full, kRows, from, (unit + 1) * kRows);
  }
  __syncwarp();
  buffer->Await();
  // Eight lanes have the 128 bytes of a row that lie together, chunks of 16 swapped.
#pragma unroll 1
  for (int box = 0; box < units * S::kHalves; ++box) {
    const int lane = ThreadIndexAgain() % 32;
    const uint32_t mean_at = mean + (box % S::kHalves * 64 + lane % 8 * 8) * 4;
#pragma unroll 1
    for (int i = lane / 8; i < kRows; i += 4) {
      const float4 x = LoadShared4(buffer->at + (box * kRows + i) * 128 + (lane % 8 ^ i % 8) * 16);
      const auto centred = [](float two, float first, float second) {
        const float2 pair = UnpackPair<typename S::T>(__float_as_uint(two));
        return PackPair<typename S::T>(pair.x - first, pair.y - second);
      };
      uint4 words;
      {
        const float4 low = LoadShared4(mean_at);
        words.x = centred(x.x, low.x, low.y);
        words.y = centred(x.y, low.z, low.w);
      }
      {
        const float4 high = LoadShared4(mean_at + 16);
        words.z = centred(x.z, high.x, high.y);
        words.w = centred(x.w, high.z, high.w);
      }
      const int again = ThreadIndexAgain() % 32;
      const int row = (unit + box / S::kHalves) * kRows + i, channel = box % S::kHalves * 64 + again % 8 * 8;
      if (row < p.seq.k_len && channel < p.seq.head_dim) {
        *reinterpret_cast<uint4*>(part->d_k + row * p.dk_stride.token + channel) = words;
      }
    }
  }
  __syncwarp();
}

// By the warps that have nothing else to do: of which `warp` is one.
template <class S>
__device__ __forceinline__ void BwdWorkAhead(const AttentionBwdParams& p, const BwdMaps& maps, const BwdShared<S>& sm,
                                             const typename S::Tile* tile, AheadPart* part, int warp) {
  AheadBuffer buffer = {sm.ahead + warp * kAheadBytes, sm.ahead_full + warp * 8, 0};
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
  if constexpr (S::kRowSums) {
    SumKeys<S>(p, sm.k, sm.kv_full, tile, warp);
    if (ThreadIndexAgain() % 32 == 0) ReduceAddRelease(p.pair_counts + pairs + later - p.ahead, 1);
  }
  if (later >= 2 * p.ahead) {
    const int before = later - 2 * p.ahead, sequence = before / p.seq.heads;
    const int all = kAddedCounts<S> * KeyTiles(p.seq);
    while (LoadAcquire(p.pair_counts + pairs + before) != all) __nanosleep(256);
    GlobalProxyFence();
    if (ThreadIndexAgain() % 32 == 0) {
      const int head = before - sequence * p.seq.heads;
      part->sequence = sequence;
      part->head = head;
      part->end = FirstUnit<S>(p, key_tile + 1);
      if constexpr (S::kRowSums) {
        part->key_end = FirstKeyUnit<S>(p, key_tile + 1);
        part->d_k = static_cast<uint16_t*>(p.dk) + sequence * p.dk_stride.batch + head * p.dk_stride.head;
      }
    }
    __syncwarp();
    if constexpr (S::kRowSums) {
      const int64_t sums = SumsAt<S>(p, part->head, part->sequence * KeyTiles(p.seq));
      MeanOfSums<S>(p, (warp == 0 ? p.key_sums : p.d_key_sums) + sums, buffer.at + kMeanAt, &buffer);
      NamedSync(kMeansThere, kAheadWarps * 32);
#pragma unroll 1
      for (int unit = FirstKeyUnit<S>(p, key_tile) + 2 * warp; unit < part->key_end; unit += 2 * kAheadWarps) {
        CenterUnits<S>(p, maps, part, unit, &buffer, sm.ahead + kAheadBytes + kMeanAt);
      }
    }
#pragma unroll 1
    for (int unit = FirstUnit<S>(p, key_tile) + warp; unit < part->end; unit += kAheadWarps) {
      FinishUnit<S>(p, part->sequence, part->head, unit, &buffer, sm.ahead + kMeanAt);
    }
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_AHEAD_CUH_
