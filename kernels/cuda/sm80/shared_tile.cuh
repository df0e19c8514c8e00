// shared_tile.cuh: tiles of tokens in shared memory, [row][kElements] of 16 bits.
//
// Chunks of 16 bytes of a row are permuted by its number, so that no two of the
// eight rows that a quarter of a matrix load touches share a bank, without padding.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_SHARED_TILE_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_SHARED_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/registers.cuh"
#include "cuda/sm80/mma.cuh"

namespace bellwether::kernels::cuda::sm80 {

template <int kElements>
struct TileLayout {
  static_assert(kElements % 16 == 0);
  static constexpr int kChunks = kElements / 8;  // of a row
  static constexpr int kPitch = kElements * 2;   // bytes
  // Chunks are permuted within groups of so many.
  static constexpr int kGroup = kElements % 64 == 0 ? 8 : kElements % 32 == 0 ? 4 : 2;

  // Rows that differ by a multiple of 8 have the same.
  static constexpr __host__ __device__ int Phase(int row) { return row * kGroup / 8 % kGroup; }
  static constexpr __host__ __device__ int Offset(int row, int chunk) {
    return row * kPitch + (chunk ^ Phase(row)) * 16;
  }

  // Every chunk of 8 rows has a place of its own, and the 8 rows of one chunk lie
  // in 8 different quarters of 128 bytes.
  static constexpr bool IsSound() {
    bool taken[8 * kChunks] = {};
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      bool banks[8] = {};
      for (int row = 0; row < 8; ++row) {
        const int at = Offset(row, chunk) / 16;
        if (at >= 8 * kChunks || taken[at] || banks[at % 8]) return false;
        taken[at] = banks[at % 8] = true;
      }
    }
    return true;
  }
};
static_assert(TileLayout<16>::IsSound() && TileLayout<64>::IsSound() && TileLayout<96>::IsSound() &&
              TileLayout<128>::IsSound() && TileLayout<256>::IsSound());

// How the lanes of a warp address the four matrices of 16 rows and 16 columns.
//
//   kRowsFirst      matrices (rows 0-7, chunk 0), (rows 8-15, chunk 0), (0-7, 1), (8-15, 1)
//   kChunksFirst    matrices (rows 0-7, chunk 0), (rows 0-7, chunk 1), (8-15, 0), (8-15, 1)
//
// The first is an A of rows, or transposed two B of rows as k; the second two B
// of rows as columns, or transposed an A of rows as k.
enum class LaneOrder { kRowsFirst, kChunksFirst };

template <int kElements, LaneOrder kOrder>
class TileReader {
 public:
  using Layout = TileLayout<kElements>;

  // `tile` is aligned to 128 bytes.
  __device__ __forceinline__ TileReader(uint32_t tile, int lane) {
    const int row = lane % 8 + (kOrder == LaneOrder::kRowsFirst ? lane / 8 % 2 : lane / 16) * 8;
    const int chunk = kOrder == LaneOrder::kRowsFirst ? lane / 16 : lane / 8 % 2;
    at_ = tile + Layout::Offset(row, chunk);
  }

  // The 16 rows from `row` on, a multiple of 8, and 16 columns from chunk `chunk`
  // on, an even number: its bits in a group are not a lane's own, so one XOR adds it.
  template <bool kTransposed>
  __device__ __forceinline__ void Load(uint32_t (&w)[4], int row, int chunk) const {
    const int in_group = chunk % Layout::kGroup;
    LoadMatrices<kTransposed>(w, (at_ ^ (in_group * 16)) + row * Layout::kPitch + (chunk - in_group) * 16);
  }

  // To a tile `bytes` further on, a multiple of 128.
  __device__ __forceinline__ void Move(int bytes) { at_ += bytes; }

 private:
  uint32_t at_;
};

// ---- copies

// 16 bytes to shared memory; zeros if not `inside`, and then nothing is read.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void CopyCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Copies tiles of kRows tokens of one head.  All threads of the block call it.  A
// thread stays in its phase and in its chunk of every group, so that what differs
// between its copies is mostly known to the compiler.
template <int kElements, int kRows, int kThreads>
class TileCopier {
  using Layout = TileLayout<kElements>;
  static constexpr int kGroup = Layout::kGroup, kGroups = Layout::kChunks / kGroup;
  static constexpr int kPass = kThreads / kGroup;  // rows that are copied at once
  static_assert(kPass % 8 == 0 && kRows % kPass == 0);

 public:
  // What this thread reads first of the rows from `row` on.
  static __device__ __forceinline__ const uint16_t* Source(const uint16_t* first, int64_t stride, int row) {
    const int thread = ThreadIndexAgain();
    return first + (row + thread / kGroup) * stride + thread % kGroup * 8;
  }

  // To `tile`, from this thread's `source` on; `left` of the tile's rows exist, with kSkips
  // those from `skipped` on, and `channels`.  The others become 0.  `stride` in elements.
  template <bool kSkips>
  static __device__ __forceinline__ void CopyFrom(uint32_t tile, const uint16_t* source, int64_t stride, int channels,
                                                  int left, int skipped) {
    const int thread = ThreadIndexAgain(), in_tile = thread / kGroup, chunk = thread % kGroup;
    const uint32_t to = tile + Layout::Offset(in_tile, chunk);
    left -= in_tile;
    skipped -= in_tile;
    int left_of[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) left_of[g] = (chunk + g * kGroup) * 8 < channels ? left : 0;
#pragma unroll
    for (int i = 0; i < kRows / kPass; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const bool exists = i * kPass < left_of[g] && (!kSkips || i * kPass >= skipped);
        CopyAsync(to + i * (kPass * Layout::kPitch) + g * (kGroup * 16), source + g * (kGroup * 8), exists);
      }
      source += kPass * stride;
    }
  }

  // Rows [row, row + kRows); those from `end` on become 0, and with kSkips those before
  // `begin`.  `first` is channel 0 of row 0.
  template <bool kSkips = false>
  static __device__ __forceinline__ void Copy(uint32_t tile, const uint16_t* first, int64_t stride, int channels,
                                              int row, int end, int begin = 0) {
    CopyFrom<kSkips>(tile, Source(first, stride, row), stride, channels, end - row, begin - row);
  }
};

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_SHARED_TILE_CUH_
