// attention_fwd_layout.cuh: the shape of a CTA of the Hopper forward and where things
// lie in its shared memory.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_LAYOUT_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_LAYOUT_CUH_

#include "cuda/attention_fwd_tiles.cuh"
#include "cuda/sm90/attention_fwd_params.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/softmax.cuh"

namespace bellwether::kernels::cuda::sm90 {

// kCols keys a tile, kStages tiles of K and of V in flight.  kOnes: V has eight
// more columns of ones behind it, so that the PV product sums the rounded P: 3 to
// 12 % more of that product instead of two and a half instructions an element.
// kGeneral: packed sequences, key bounds, windows, caps and random rounding work, at the price
// of registers.  kCount: rows can be counted for the statistics: in tiles that count
// by a loop of their own, so that the others cost what they do without.
template <class T_, int kHeadDim_, int kWarpgroups_, SoftmaxMode kMode_, bool kGeneral_, bool kCount_>
struct FwdShape {
  using T = T_;
  static constexpr bool kBounded = kGeneral_ && kHeadDim_ <= 128;  // key bounds work: at 256 registers are short
  using Seq = SequenceOf<kBounded>;
  using Tile = FwdTileOf<Seq>;
  static constexpr int kBoxes = (kHeadDim_ + 63) / 64;  // 128-byte columns of a tile
  // kHeadDim_ rounded up, with zeros, which S need not multiply.
  static constexpr int kHeadDim = kBoxes * 64, kScoreChannels = kHeadDim_, kWarpgroups = kWarpgroups_;
  // Head dim 256: O takes 128 registers, and K and V in two stages 128 KB, of 64 keys.
  static constexpr int kCols = kHeadDim > 128 ? 64 : 128, kStages = 2;
  static constexpr SoftmaxMode kMode = kMode_;
  static constexpr bool kGeneral = kGeneral_, kCount = kCount_;
  // kSr sums in registers: with both, ptxas serialises the products (C7511).
  static constexpr bool kOnes = kMode == SoftmaxMode::kHp;
  static constexpr bool kStanding = kOnes;  // anchors, in tiles that do not count
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kQBytes = kRows * kBoxes * 128;
  static constexpr int kKvBytes = kCols * kBoxes * 128;
  static constexpr int kOutputs = kHeadDim + (kOnes ? 8 : 0);
  // A product has 256 columns at most, ones included.
  static constexpr int kValueColumns = kHeadDim > 128 ? 128 : kHeadDim, kValueParts = kHeadDim / kValueColumns;
  // Both stages of V end at the same ones, as columns may lie any multiple of
  // 16 bytes apart.  The orders are K0 K1 V1 V0 ones, or of two boxes K0 V1' K1
  // V1" V0' V0" ones.  Of four it is K0 K1 V0' V0" V1"' V1' V1" V1"" V0"' V0""
  // ones.  These are the places, in boxes.
  static constexpr int kKvBoxBytes = kCols * 128;
  static constexpr int kOnesBytes = kOnes ? kKvBoxBytes : 0;
  static constexpr int kKStride = (kBoxes == 2 ? 3 : kBoxes) * kKvBoxBytes;  // between stages
  __host__ __device__ static constexpr int VPlace(int stage, int box) {
    if (kBoxes == 1) return 3 - stage;
    if (kBoxes == 2) return stage == 0 ? 6 + box : 2 + 3 * box;
    return stage == 0 ? (box < 2 ? 8 : 12) + box : box < 2 ? 11 + box : 4 + 3 * box;
  }
  __host__ __device__ static constexpr int VBoxStride(int stage, int first) {
    return kBoxes == 1 ? VPlace(0, 0) + 1 - VPlace(stage, 0) : VPlace(stage, first + 1) - VPlace(stage, first);
  }
  // What a descriptor has of a product's part of V: where it lies and its boxes' distance.
  __host__ __device__ static constexpr int64_t VPart(int stage, int part) {
    return (int64_t{VPlace(stage, 2 * part)} + (int64_t{VBoxStride(stage, 2 * part)} << 16)) * (kKvBoxBytes / 16);
  }
  static constexpr int kOnesPlace = VPlace(0, kBoxes - 1) + 1;
  static_assert(kStages == 2 && VPlace(1, kBoxes - 1) + VBoxStride(1, kBoxes < 4 ? 0 : 2) == kOnesPlace);
  // Boxes of kOutRows rows and 64 columns on their way out, so many of each warp.
  static constexpr int kOutRows = kHeadDim > 128 ? kFwdOutputRows / 2 : kFwdOutputRows;
  static constexpr int kOutBoxes = kBoxes <= 2 ? kBoxes + 1 : 3;
  static constexpr int kOutBoxBytes = kOutRows * 128, kWarpOutBytes = kOutBoxes * kOutBoxBytes;
  static constexpr int kOutBytes = 4 * kWarpgroups * kWarpOutBytes;
  static constexpr int kSharedBytes = kQBytes + 2 * kStages * kKvBytes + kOnesBytes + kOutBytes + 1024 + 256;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
  static_assert(kScoreChannels % 16 == 0 && kCols % 16 == 0 && kKvBytes % 1024 == 0);
  static_assert(kSharedBytes <= 227 * 1024);
};

// Shared memory of a CTA as addresses; barriers behind the tiles.
template <class S>
struct FwdShared {
  uint32_t q, k, out, q_full, q_empty, k_full, k_empty, v_full, v_empty;
  // S::Tile of this tile and of the next, by q_full's parity: written before it,
  // read while the tile lasts.
  uint32_t tiles;

  __device__ explicit FwdShared(char* raw) {
    const uint32_t base = (SharedAddress(raw) + 1023u) & ~1023u;
    q = base;
    k = q + S::kQBytes;
    out = k + 2 * S::kStages * S::kKvBytes + S::kOnesBytes;
    q_full = out + S::kOutBytes;
    q_empty = q_full + 8;
    k_full = q_empty + 8;
    k_empty = k_full + 8 * S::kStages;
    v_full = k_empty + 8 * S::kStages;
    v_empty = v_full + 8 * S::kStages;
    tiles = v_empty + 8 * S::kStages;
  }
};
static_assert(2 * sizeof(FwdTileOf<MaskedSequence>) <= 128);

template <class Tile>
__device__ __forceinline__ void StoreTile(uint32_t to, const Tile& t) {
  static_assert(sizeof(Tile) % sizeof(int) == 0);
  const int* const words = reinterpret_cast<const int*>(&t);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Tile) / sizeof(int)); ++i) {
    StoreShared(to + i * sizeof(int), words[i]);
  }
}

// Read again where needed, so that nothing of it stays in registers.
template <class S>
struct TileInShared {
  uint32_t address;

  __device__ __forceinline__ int row() const { return Load(0); }
  __device__ __forceinline__ int head() const { return Load(1); }
  __device__ __forceinline__ int begin() const { return Load(kBehind); }
  __device__ __forceinline__ int left() const { return Load(kBehind + 1); }
  __device__ __forceinline__ int right() const { return Load(kBehind + 2); }
  __device__ __forceinline__ int end() const { return Load(kBehind + 3); }
  // Without k_start, which only the producer needs.
  __device__ __forceinline__ typename S::Seq sequence(const SequenceParams& p) const {
    const int index = Load(kSequence);
    if constexpr (!S::kGeneral) {
      return BatchSequence(p, index);
    } else {
      typename S::Seq seq;
      seq.index = index;
      seq.q_start = Load(kSequence + 1);
      seq.q_len = Load(kSequence + 2);
      seq.k_start = 0;
      seq.k_len = Load(kSequence + 4);
      if constexpr (S::kBounded) {
        seq.key_begin = Load(kSequence + 5);
        seq.key_end = Load(kSequence + 6);
      }
      return seq;
    }
  }

 private:
  // Which words they are.
  static constexpr int kSequence = 2, kBehind = kSequence + sizeof(typename S::Seq) / sizeof(int);
  static_assert(sizeof(typename S::Tile) == (kBehind + 4) * sizeof(int));

  __device__ __forceinline__ int Load(int word) const { return LoadShared(address + word * 4); }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_LAYOUT_CUH_
