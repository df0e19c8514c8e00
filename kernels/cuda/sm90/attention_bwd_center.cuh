// attention_bwd_center.cuh: what centred keys ask of a CTA of the backward: the sums of
// its keys and of their dK, and dK minus its mean.
//
// A mean is known when all tiles of a pair of sequence and kv head are done, and by then
// dK has left for memory.  So the pairs are launched in parts, p.launch_pairs at a time:
// the CTAs of a part have a warp that is idle take the mean from dK of the part before,
// under their products.  Parts need not wait for each other (programmatic dependent
// launch): only that warp does.  The last part is left to key_mean.cuh.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CENTER_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CENTER_CUH_

#include <cuda.h>

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/key_mean.cuh"
#include "cuda/launch_order.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// The sums over the CTA's keys of K, which lies in shared memory.  By one warp, which has few
// registers; two rows at a time, whose channels 16 lanes share.
template <class S>
__device__ __forceinline__ void BwdSumKeys(const AttentionBwdParams& p, uint32_t k, uint32_t full,
                                           const typename S::Tile* tile) {
  const int lane = ThreadIndexAgain() % 32;
  BarrierWait(full, 0);
#pragma unroll 1
  for (int half = 0; half < S::kHalves; ++half) {
    float sums[4] = {};
#pragma unroll 1
    for (int row = lane / 16; row < S::kCols; row += 2) {
      const uint32_t at = half * (S::kCols * 128) + row * 128 + (lane / 2 ^ row) % 8 * 16 + lane % 2 * 8;
      const float2 words = LoadShared2(k + at);
      const float2 low = UnpackPair<typename S::T>(__float_as_uint(words.x));
      const float2 high = UnpackPair<typename S::T>(__float_as_uint(words.y));
      sums[0] += low.x;
      sums[1] += low.y;
      sums[2] += high.x;
      sums[3] += high.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 16);
    if (lane < 16) {
      const int chunk = FirstChunk(p.seq, tile->sequence.index) + tile->key / S::kCols;
      float* const to = p.key_sums + SumsAt<S>(p, tile->kv_head, chunk) + half * 64 + lane * 4;
      *reinterpret_cast<float4*>(to) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
  }
}

// Adds kCount sums of two lanes, `offset` apart, of which the upper goes on with their upper half.
template <int kCount, int kAll>
__device__ __forceinline__ void HalveOverLanes(float (&sums)[kAll], bool upper, int offset) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float given = upper ? sums[i] : sums[i + kCount / 2], kept = upper ? sums[i + kCount / 2] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, offset);
  }
}

// The sums over the CTA's keys of dK, as it is stored: `words` are a consumer's two rows of it,
// from `key` and 8 behind.
template <class S>
__device__ __forceinline__ void BwdSumGradients(const AttentionBwdParams& p, const typename S::Tile& t, int key,
                                                const uint32_t (&words)[S::kHeadDim / 4]) {
  using T = typename S::T;
  constexpr int kSums = S::kHeadDim / 4;  // of a thread: two columns of eight
  __shared__ float warps[8][S::kHeadDim];
  const int thread = ThreadIndexAgain() - 128, lane = thread % 32;
  const bool first = key < t.sequence.k_len, second = key + 8 < t.sequence.k_len;  // else not even 0, perhaps
  float sums[kSums];
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    const float2 x = UnpackPair<T>(words[i]), y = UnpackPair<T>(words[i + 1]);
    sums[i] = (first ? x.x : 0.f) + (second ? y.x : 0.f);
    sums[i + 1] = (first ? x.y : 0.f) + (second ? y.y : 0.f);
  }
  // Over the eight lanes of a column.
  HalveOverLanes<kSums>(sums, lane & 16, 16);
  HalveOverLanes<kSums / 2>(sums, lane & 8, 8);
  HalveOverLanes<kSums / 4>(sums, lane & 4, 4);
  const int of_lane = lane / 16 * (kSums / 2) + lane / 8 % 2 * (kSums / 4) + lane / 4 % 2 * (kSums / 8);
#pragma unroll
  for (int i = 0; i < kSums / 8; ++i) {
    const int at = of_lane + i;
    warps[thread / 32][at / 2 * 8 + lane % 4 * 2 + at % 2] = sums[i];
  }
  NamedSync(1, 256);
  if (thread >= S::kHeadDim) return;
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < 8; ++warp) total += warps[warp][thread];
  const int chunk = FirstChunk(p.seq, t.sequence.index) + t.key / S::kCols;
  p.d_key_sums[SumsAt<S>(p, t.kv_head, chunk) + thread] = total;
}

// What the warp below has of shared memory: two units of dK on their way, or sums, and the
// mean; and barriers.
inline constexpr int kCenterUnitBytes = 4096, kCenterBarriers = 3;
template <class S>
inline constexpr int kCenterUnitRows = kCenterUnitBytes / (S::kHeadDim * 2);
template <class S>
inline constexpr int kCenterBytes = 2 * kCenterUnitBytes + S::kHeadDim * 4;

// The units of this CTA, of a pair's dK cut into `units`: in proportion to what CenterWeight() says
// of its tile.
template <class S>
__device__ __forceinline__ void ShareOfUnits(const SequenceParams& seq, const typename S::Tile* tile, int units,
                                             int* begin, int* end) {
  const int first_key = tile->key;
  int before = 0, all = 0;
#pragma unroll 1
  for (int key = ThreadIndexAgain() % 32 * S::kCols; key < seq.k_len; key += 32 * S::kCols) {
    const int weight = CenterWeight(seq, key, S::kRows);
    all += weight;
    if (key < first_key) before += weight;
  }
  before = __reduce_add_sync(0xffffffffu, before);
  all = __reduce_add_sync(0xffffffffu, all);
  // Grows with x, so that one tile begins where another ends.
  const auto share = [&](int x) {
    return x == all ? units : min(units, static_cast<int>(ceilf(__fdividef(x, all) * units)));
  };
  *begin = share(before);
  *end = share(before + CenterWeight(seq, first_key, S::kRows));
}

// What it has to do, in shared memory: registers are few.
struct CenterPart {
  uint16_t* d_k;      // of the pair
  const float* sums;  // of its tiles
  int sequence, kv_head;
  int begin, end;  // units
};

// Takes the mean from this CTA's share of the dK of the part of the launch before, of the
// pair at the same place in it.  By one warp, which has few registers: the copy engine
// brings dK, as tiles.  (Row by row it has too much to do; and with cp.async ptxas has every
// fence of the kernel wait for loads of shared memory, which costs 2 %.)
template <class S>
__device__ __forceinline__ void BwdCenterPartBefore(const AttentionBwdParams& p, const CUtensorMap* map,
                                                    uint32_t shared, uint32_t full, const typename S::Tile* tile,
                                                    CenterPart* part) {
  using T = typename S::T;
  constexpr int kUnitRows = kCenterUnitRows<S>, kHalfBytes = kCenterUnitBytes / S::kHalves;
  const uint32_t mean_at = shared + 2 * kCenterUnitBytes;
  AwaitLaunchBefore();
  GlobalProxyFence();
  {
    int begin, end;
    ShareOfUnits<S>(p.seq, tile, (p.seq.k_len + kUnitRows - 1) / kUnitRows, &begin, &end);
    if (begin == end) return;
    const int pair = tile->sequence.index * p.seq.kv_heads + tile->kv_head - p.launch_pairs;
    const int sequence = pair / p.seq.kv_heads, kv_head = pair - sequence * p.seq.kv_heads;
    part->begin = begin;
    part->end = end;
    part->sequence = sequence;
    part->kv_head = kv_head;
    part->d_k = static_cast<uint16_t*>(p.dk) + sequence * p.dk_stride.batch + kv_head * p.dk_stride.head;
    part->sums = p.d_key_sums + SumsAt<S>(p, kv_head, sequence * ChunksOf(p.seq.k_len));
    __syncwarp();
  }
  const int lane = ThreadIndexAgain() % 32;
  {  // The mean, of the sums of the pair's tiles: as many at a time as there is room for.
    constexpr int kSumBytes = S::kHeadDim * 4, kSums = 2 * kCenterUnitBytes / kSumBytes, kSumLanes = S::kHeadDim / 4;
    const uint32_t sums_full = full + 16;
    uint32_t parity = 0;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int first = 0; first < ChunksOf(p.seq.k_len); first += kSums, parity ^= 1) {
      const int count = min(ChunksOf(p.seq.k_len) - first, kSums);
      if (lane == 0) {
        BarrierArriveExpect(sums_full, count * kSumBytes);
        BulkLoad(shared, part->sums + first * S::kHeadDim, sums_full, count * kSumBytes);
      }
      BarrierWait(sums_full, parity);
#pragma unroll 1
      for (int i = lane / kSumLanes; i < count; i += 32 / kSumLanes) {
        const float4 x = LoadShared4(shared + i * kSumBytes + lane % kSumLanes * 16);
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
    StoreShared4(mean_at + lane % kSumLanes * 16, total.x * scale, total.y * scale, total.z * scale, total.w * scale);
    __syncwarp();
  }
  const auto ask = [&](int unit) {
    if (ThreadIndexAgain() % 32 != 0) return;
    const int buffer = (unit - part->begin) % 2;
    BarrierArriveExpect(full + buffer * 8, kCenterUnitBytes);
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      TmaLoad5(shared + buffer * kCenterUnitBytes + half * kHalfBytes, map, full + buffer * 8, half * 64,
               unit * kUnitRows, part->sequence, 0, part->kv_head);
    }
  };
#pragma unroll 1
  for (int unit = part->begin; unit < min(part->begin + 2, part->end); ++unit) ask(unit);
#pragma unroll 1
  for (int unit = part->begin; unit < part->end; ++unit) {
    const uint32_t phase = unit - part->begin, buffer = phase % 2;
    BarrierWait(full + buffer * 8, phase / 2 % 2);
    // Eight lanes have the 128 bytes of a row that lie together, chunks of 16 swapped.
    const int again = ThreadIndexAgain() % 32;
#pragma unroll 1
    for (int i = again / 8; i < kUnitRows * S::kHalves; i += 4) {
      const int row = unit * kUnitRows + i % kUnitRows, channel = i / kUnitRows * 64 + again % 8 * 8;
      const float4 x = LoadShared4(shared + buffer * kCenterUnitBytes + i * 128 + (again % 8 ^ i % 8) * 16);
      uint32_t words[4] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 mean = LoadShared2(mean_at + channel * 4 + j * 8), pair_of = UnpackPair<T>(words[j]);
        words[j] = PackPair<T>(pair_of.x - mean.x, pair_of.y - mean.y);
      }
      if (row < p.seq.k_len && channel < p.seq.head_dim) {
        *reinterpret_cast<uint4*>(part->d_k + row * p.dk_stride.token + channel) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    __syncwarp();
    if (unit + 2 < part->end) ask(unit + 2);
  }
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_CENTER_CUH_
