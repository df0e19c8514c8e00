// attention_bwd_layout.cuh: a CTA's tiles up to head dim 128, where they lie, and what its warps wait at.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAYOUT_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAYOUT_CUH_

#include <cstdint>

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_params.h"
#include "cuda/sm90/attention_bwd_center.cuh"
#include "cuda/sm90/ptx.cuh"

namespace bellwether::kernels::cuda::sm90 {

// The warps that work ahead, attention_bwd_ahead.cuh, and what each has: rows of O, of O_lo and of dO.
inline constexpr int kAheadWarps = 2, kAheadBytes = 12 * 1024;

// kGeneral: packed sequences, key bounds, windows, caps and turns work.  kRounded: P is what the
// forward's product read.  kRowSums: rowsum(dS) is taken, from a column of ones
// beside K, for centring, or for the statistics.  kCount: they are taken without it.
// kWorksAhead: warps that are idle otherwise work as attention_bwd_ahead.cuh says.
template <class T_, int kHeadDim_, bool kGeneral_, bool kRounded_, bool kRowSums_, bool kCount_,
          bool kWorksAhead_ = false, int kChannels_ = kHeadDim_>
struct BwdShape {
  using T = T_;
  using Keys = BwdShape;
  using Tile = BwdTileOf<SequenceOf<kGeneral_>>;
  // kChannels: those of a row that S, dP, dV and dK are computed of, a multiple of 32; the others are 0.
  static constexpr int kHeadDim = kHeadDim_, kChannels = kChannels_;
  static constexpr bool kGeneral = kGeneral_, kRounded = kRounded_, kRowSums = kRowSums_, kCount = kCount_;
  static constexpr bool kPlain = !kGeneral && !kRounded && !kRowSums && !kCount;
  static constexpr bool kMayWorkAhead = !kGeneral && !kRounded && !kCount;
  static constexpr bool kWorksAhead = kWorksAhead_;
  static_assert(kMayWorkAhead || !kWorksAhead);
  static constexpr int kCols = 128;                        // keys a CTA
  static constexpr int kRows = kHeadDim == 64 ? 128 : 64;  // queries a step
  static constexpr int kStages = 2;
  static constexpr int kThreads = 384;
  static constexpr int kTurnSteps = kHeadDim == 64 ? 200 : 100;  // see BwdLauncher
  static constexpr int kHalves = kHeadDim / 64;
  static constexpr int kKvBytes = kCols * kHeadDim * 2;
  static constexpr int kQBytes = kRows * kHeadDim * 2;
  static constexpr int kRowBytes = kRows * 4;  // of L, delta or 1 / lt
  static constexpr int kDsBytes = kCols * kRows * 2;
  // Ones for 16 keys, which all products of a step read; or for all keys.
  static constexpr bool kOnesOfProduct = kRowSums && kWorksAhead;
  static constexpr int kOnesBytes = kOnesOfProduct ? 16 * 128 : kRowSums ? kCols * 128 : 0;
  static constexpr int kQueries = kRowSums ? 72 : 64;  // columns of a warpgroup's dQ
  // What a consumer thread has of a step's dQ: see attention_bwd_rows.cuh.
  static constexpr int kQueryThreads = 256, kQueryTiles = 1, kQueryColumns = 64;
  static constexpr int kOutputs = kHeadDim, kSplits = 1;
  static constexpr bool kSumsKeys = true, kShares = true, kMasked = false;
  static_assert(kCols == kMeanKeys, "a CTA's keys are summed together");
  static __device__ int QueryRow(int thread) {
    return (kHalves == 1 ? thread / 128 * 64 : 0) + thread % 128 / 32 * 16 + thread % 32 / 4;
  }
  static __device__ int QueryColumn(int thread) { return kHalves == 2 ? thread / 128 * 64 : 0; }
  // Ahead: S of the next step is issued behind dK of this one, and dV beside dQ.  Else a step issues its S and dP
  // together and dV before it awaits dP.  Then all exponentials run under dP, and dS and the barrier under dV.
  // Where it is kept, ahead is 1 % faster: RESULTS.md, step 9.
  static constexpr bool kScoresAhead = kHeadDim == 64 && !kGeneral && !kRounded;
  // Whether a kernel for one query head a kv head runs in the order of attention_bwd_deferred.cuh.  At 4k and 16k it is
  // 2 to 3 % faster; with 4 query heads it is 0 to 2 % slower, at head dim 128 4 to 8 %, and with rowsum(dS) up to 5 %.
  static constexpr bool kDeferred = kHeadDim == 64 && kWorksAhead && !kRowSums;
  // delta is loaded before dP is awaited where registers suffice.  Behind dP each load would be waited for.
  static constexpr bool kEarlyDeltas = kHeadDim == 128;
  static constexpr int kDqBytes = kRows * kHeadDim * 4;
  static constexpr int kDqBarriers = kGeneral ? 2 : 1;  // for the two warps of BwdReduce() in turns
  static constexpr int kSumBytes = kRowSums ? kRowBytes : 0;
  // dK of other keys is centred meanwhile.
  static constexpr bool kCenters = kRowSums && !kGeneral && !kWorksAhead;
  static constexpr int kSharedBytes = 2 * kKvBytes + 2 * kStages * kQBytes + 3 * kStages * kRowBytes + 2 * kDsBytes +
                                      kOnesBytes + kDqBytes + kSumBytes + (kCenters ? kCenterBytes<BwdShape> : 0) +
                                      (kWorksAhead ? kAheadWarps * kAheadBytes : 0) + 1024 +
                                      256;                             // the latter for barriers
  static_assert(kSharedBytes <= 227 * 1024 - 8 * kHeadDim * 4 - 128);  // beside them the sums of warps and the tile
};

template <class S>
struct BwdShared {
  uint32_t k, v, q, d_o, ds, ones, lse, delta, inverse, dq, ds_sum, center,
      ahead;  // tiles first, aligned to 1024 bytes
  uint32_t kv_full, q_full, d_o_full, dq_empty, center_full, ahead_full;
  uint32_t steps;        // [stage] the QueryStep whose queries are there
  uint32_t skew, spare;  // attention_bwd_deferred.cuh: a barrier, and what AwaitValues() never writes

  __device__ explicit BwdShared(char* raw) {
    k = (SharedAddress(raw) + 1023u) & ~1023u;
    v = k + S::kKvBytes;
    q = v + S::kKvBytes;
    d_o = q + S::kStages * S::kQBytes;
    ds = d_o + S::kStages * S::kQBytes;
    ones = ds + 2 * S::kDsBytes;
    center = ones + S::kOnesBytes;
    ahead = center + (S::kCenters ? kCenterBytes<S> : 0);
    lse = ahead + (S::kWorksAhead ? kAheadWarps * kAheadBytes : 0);
    delta = lse + S::kStages * S::kRowBytes;
    inverse = delta + S::kStages * S::kRowBytes;
    dq = inverse + S::kStages * S::kRowBytes;
    ds_sum = dq + S::kDqBytes;
    kv_full = ds_sum + S::kSumBytes;
    q_full = kv_full + 8;
    d_o_full = q_full + 8 * S::kStages;
    dq_empty = d_o_full + 8 * S::kStages;
    center_full = dq_empty + 8;
    steps = center_full + 8 * kCenterBarriers;
    skew = steps + 8 * S::kStages;
    spare = skew + 8;
    ahead_full = spare + 8;
  }
};

// Named barriers between the consumers and the warp of the loading warpgroup that waits for them.
// kDkStored: in kernels that work ahead, which have one for dQ.  kDsFull and the three behind it:
// attention_bwd_deferred.cuh.  kMeansThere: between the warps that work ahead.
enum BwdBarrier {
  kConsumers = 1,
  kQEmpty = 2,
  kDoEmpty = kQEmpty + 2,
  kDqFull = kDoEmpty + 2,
  kDkStored = kDqFull + 1,
  kDsFull = kDqFull + 2,
  kMeansThere = kDsFull + 4
};
constexpr int kBwdBarrierThreads = 256 + 32;

// The barrier that announces a step's dQ.
template <class S>
__device__ __forceinline__ int DqFull(int step) {
  return kDqFull + step % S::kDqBarriers;
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAYOUT_CUH_
