// attention_bwd_pair_layout.cuh: what each CTA of the pair has: its tiles, and where they lie.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_LAYOUT_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_LAYOUT_CUH_

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/sm90/ptx.cuh"

namespace bellwether::kernels::cuda::sm90 {

// The booleans are BwdShape's.
template <class T_, bool kGeneral_, bool kRounded_, bool kRowSums_, bool kCount_>
struct BwdPairShape {
  using T = T_;
  using Keys = BwdPairShape;
  static constexpr int kHeadDim = 256;
  static constexpr bool kGeneral = kGeneral_, kRounded = kRounded_, kRowSums = kRowSums_, kCount = kCount_;
  static constexpr int kCols = 128;               // keys of both CTAs
  static constexpr int kKeys = kCols / 2;         // of one
  static constexpr int kRows = 64;                // queries a step
  static constexpr int kScoreRows = kRows / 2;    // of a warpgroup
  static constexpr int kChannels = kHeadDim / 2;  // of a warpgroup's dK and dV, of a CTA's dQ
  static constexpr int kStages = 2;               // of Q; dO has one
  static constexpr int kThreads = 384;
  static constexpr int kTurnSteps = 50;         // see BwdLauncher
  static constexpr int kBoxes = kHeadDim / 64;  // of a row
  static constexpr int kKvBytes = kKeys * kHeadDim * 2, kQBytes = kRows * kHeadDim * 2;
  static constexpr int kTheirsBytes = kKeys * kChannels * 2;  // of the other CTA's K, what dQ needs
  static constexpr int kScoreBytes = kKeys * kRows * 2;       // of P or dS
  static constexpr int kRowBytes = kRows * 4;                 // of L, delta or 1 / lt
  static constexpr int kOnesBytes = kRowSums ? kKeys * 128 : 0;
  static constexpr int kQueries = kRowSums ? 72 : 64;  // columns of a warpgroup's dQ
  // What a consumer thread has of a step's dQ: see attention_bwd_rows.cuh.  A split is a CTA's.
  static constexpr int kQueryThreads = 256, kQueryTiles = 1, kQueryColumns = kChannels / 2;
  static constexpr int kSplits = 2, kOutputs = kHeadDim / kSplits;
  static constexpr bool kSumsKeys = false, kShares = true, kMasked = false;
  static __device__ int QueryRow(int thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }
  static __device__ int QueryColumn(int thread) { return thread / 128 * kQueryColumns; }
  static constexpr int kTurnWarps = kQueryThreads / 32;  // of a CTA
  static_assert(kSplits * kTurnWarps <= kTurnsOfStep);
  static constexpr int kSharedBytes = 2 * kKvBytes + kTheirsBytes + (kStages + 1) * kQBytes + 5 * kScoreBytes +
                                      kOnesBytes + (2 * kStages + 1) * kRowBytes + 1024 + 128;
  static_assert(kSharedBytes <= 227 * 1024 - 64);  // beside them the tile
};

// Of Q and dS two stages alternate with the steps.
template <class S>
struct BwdPairShared {
  uint32_t k, v, theirs, q, d_o, probs, ds, their_ds, ones, lse, delta, inverse;
  // Ready: the other CTA has room, too.  dS: of the other CTA is there; it has read ours.
  uint32_t kv_full, q_full, q_empty, q_ready, d_o_full, d_o_empty, d_o_ready, ds_full, ds_empty;

  __device__ explicit BwdPairShared(char* raw) {
    k = (SharedAddress(raw) + 1023u) & ~1023u;
    v = k + S::kKvBytes;
    theirs = v + S::kKvBytes;
    q = theirs + S::kTheirsBytes;
    d_o = q + S::kStages * S::kQBytes;
    probs = d_o + S::kQBytes;
    ds = probs + S::kScoreBytes;
    their_ds = ds + 2 * S::kScoreBytes;
    ones = their_ds + 2 * S::kScoreBytes;
    lse = ones + S::kOnesBytes;
    inverse = lse + S::kStages * S::kRowBytes;
    delta = inverse + S::kStages * S::kRowBytes;
    kv_full = delta + S::kRowBytes;
    q_full = kv_full + 8;
    q_empty = q_full + 8 * S::kStages;
    q_ready = q_empty + 8 * S::kStages;
    d_o_full = q_ready + 8 * S::kStages;
    d_o_empty = d_o_full + 8;
    d_o_ready = d_o_empty + 8;
    ds_full = d_o_ready + 8;
    ds_empty = ds_full + 16;
  }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_PAIR_LAYOUT_CUH_
