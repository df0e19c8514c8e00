// attention_bwd_layout.cuh: how a CTA of the backward shares its work, where things lie
// in its shared memory, and its steps.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_LAYOUT_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_LAYOUT_CUH_

#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/memory.cuh"
#include "cuda/sm80/shared_copy.cuh"

namespace bellwether::kernels::cuda::sm80 {

template <class T_, int kHeadDim_, bool kMasked_>
struct BwdKeys {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kMasked = kMasked_;
};

// kRounded: P is what the forward's product read.  kRowSums: rowsum(dS) is taken, for
// centring or for the statistics.  kMasked: a mask, key bounds and sinks are honoured.
template <class T_, int kHeadDim_, int kWarps_, int kShare_, int kStages_, bool kRounded_, bool kRowSums_,
          bool kMasked_ = false>
struct BwdShape {
  using T = T_;
  using Keys = BwdKeys<T_, kHeadDim_, kMasked_>;
  using Seq = SequenceOf<kMasked_>;
  using Tile = BwdTileOf<Seq>;
  static constexpr bool kMasked = kMasked_;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kShare = kShare_;    // warps that have the same keys
  static constexpr int kStages = kStages_;  // of dO and dS; Q has two
  static constexpr bool kGeneral = true, kRounded = kRounded_, kRowSums = kRowSums_;
  static constexpr int kBlocks = kHeadDim < 128 ? 2 : 1;                  // a multiprocessor
  static constexpr int kTiles = kShare > 1 || kHeadDim == 64 ? 2 : 1;     // of 16 keys, a warp
  static constexpr int kCols = 16 * kTiles * kWarps / kShare;             // keys a CTA
  static constexpr int kRows = kHeadDim == 256 && kShare == 1 ? 16 : 64;  // queries a step
  static constexpr int kChunk = kRows / (kShare > 1 ? kShare : kTiles);   // queries at a time
  static constexpr int kUnroll = kHeadDim == 64 ? 2 : 4;                  // of dP, for want of registers
  static constexpr int kSplits = kHeadDim == 256 && kShare == 1 ? 2 : 1;
  static constexpr int kOutputs = kHeadDim / kSplits;  // channels of dQ, dK, dV
  static constexpr int kOwned = kOutputs / kShare;     // of dK and dV, a warp
  static constexpr bool kSumsKeys = false, kShares = false;
  // A warp's part of dQ: see attention_bwd_rows.cuh.
  static constexpr int kQueryWarps = kRows >= 32 ? 2 : 1;  // along the queries
  static constexpr int kQueryTiles = kRows / 16 / kQueryWarps;
  static constexpr int kQueryColumns = kOutputs / (kWarps / kQueryWarps);
  static constexpr int kQueryThreads = kThreads;
  static __device__ int QueryRow(int thread) {
    return thread / 32 % kQueryWarps * (16 * kQueryTiles) + thread % 32 / 4;
  }
  static __device__ int QueryColumn(int thread) { return thread / 32 / kQueryWarps * kQueryColumns; }

  static constexpr int kKvBytes = kCols * kHeadDim * 2, kQBytes = kRows * kHeadDim * 2;
  static constexpr int kDsBytes = kCols * kRows * 2;
  static constexpr int kRowBytes = kRows * 4;                                      // of L, delta or 1 / lt
  static constexpr int kStageBytes = (kQBytes + 3 * kRowBytes + 127) / 128 * 128;  // Q with these
  static constexpr int kPlaceBytes = 128;                                          // of the tile
  static_assert(SharedCopy<Tile>::kBytes <= kPlaceBytes);
  static constexpr int kPBytes = kShare > 1 ? kDsBytes : 0;
  // These, K, V, P, stages of dO, of dS and of Q.
  static constexpr int kSharedBytes =
      kPlaceBytes + 2 * kKvBytes + kPBytes + kStages * (kQBytes + kDsBytes) + 2 * kStageBytes;
  static_assert(kSplits * kWarps <= kTurnsOfStep && kQueryColumns % 16 == 0);
  // With two stages a half of the warps holds whole groups of sharers.
  static_assert(kStages == 1 || (kShare > 1 && kWarps / 2 % kShare == 0));
};

// Where things lie in shared memory, for a step whose stage is 0 or 1.
template <class S>
struct BwdShared {
  SharedCopy<typename S::Tile> tile;
  uint32_t k, v, p, d_o, ds, q, lse, delta, inverse;

  __device__ __forceinline__ BwdShared(const void* raw, int stage) : tile(SharedAddress(raw)) {
    const int other = S::kStages == 2 ? stage : 0;
    k = SharedAddress(raw) + S::kPlaceBytes;
    v = k + S::kKvBytes;
    p = v + S::kKvBytes;
    d_o = p + S::kPBytes + other * S::kQBytes;
    ds = p + S::kPBytes + S::kStages * S::kQBytes + other * S::kDsBytes;
    q = p + S::kPBytes + S::kStages * (S::kQBytes + S::kDsBytes) + stage * S::kStageBytes;
    lse = q + S::kQBytes;
    delta = lse + S::kRowBytes;
    inverse = delta + S::kRowBytes;
  }
};

// One step: a tile of queries of one head.
struct BwdStep {
  int head, tile;

  template <class Tile>
  __device__ __forceinline__ bool IsFirst(const SequenceParams& p, const Tile& t) const {
    return head == t.kv_head * p.group && tile == t.first_tile;
  }
  template <class Tile>
  __device__ __forceinline__ bool Exists(const SequenceParams& p, const Tile& t) const {
    return head < (t.kv_head + 1) * p.group;
  }
  template <class Tile>
  __device__ __forceinline__ BwdStep Next(const Tile& t) const {
    return tile + 1 < t.end_tile ? BwdStep{head, tile + 1} : BwdStep{head + 1, t.first_tile};
  }
  template <class Tile>
  __device__ __forceinline__ BwdStep Last(const Tile& t) const {
    return tile > t.first_tile ? BwdStep{head, tile - 1} : BwdStep{head - 1, t.end_tile - 1};
  }
};

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_LAYOUT_CUH_
