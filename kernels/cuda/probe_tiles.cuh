// probe_tiles.cuh: tiles of queries and keys in shared memory, and their products.
//
// A row of a tile is `pitch` bytes: its channels, zeros up to a multiple of 16, and 16
// bytes that put the same chunk of eight rows into different banks.

#ifndef BELLWETHER_KERNELS_CUDA_PROBE_TILES_CUH_
#define BELLWETHER_KERNELS_CUDA_PROBE_TILES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/mma.cuh"

namespace bellwether::kernels::cuda {

__host__ __device__ constexpr int TilePitch(int64_t dim, int element_bytes) {
  const int64_t padded = (dim + kStepChannels - 1) / kStepChannels * kStepChannels;
  return static_cast<int>(padded) * element_bytes + kVectorBytes;
}
static_assert(TilePitch(1, 2) == 48 && TilePitch(128, 2) == 272 && TilePitch(256, 4) == 1040);

// Pitches are odd multiples of 16 bytes: eight rows' chunks cover all 32 banks.
static_assert(TilePitch(32, 2) / 16 % 2 == 1 && TilePitch(96, 2) / 16 % 2 == 1 && TilePitch(80, 4) / 16 % 2 == 1);

inline constexpr int kTileThreads = 256;

// Which calls a kernel takes.
enum class Form {
  kPlain,   // no tensor of a mask, V is all keys, dims up to 256
  kMasked,  // dims up to 256
  kWide     // all
};

// How many rows and keys a block holds and how its warps share them: 16 rows a warp.
// kNarrow: the rows of one warp, so that a few rows keep all warps busy.
template <class Element, bool kNarrow, Form kForm>
struct TileShape {
  static constexpr int kDimMax = kForm == Form::kWide ? 576 : 256;
  static constexpr bool kTensorCores = sizeof(Element) == 2;
  static constexpr int kWarps = kTileThreads / 32;
  static constexpr int kRowWarps = kNarrow ? 1 : kTensorCores ? 4 : 2;
  static constexpr int kKeyWarps = kWarps / kRowWarps;
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kWarpKeys = !kTensorCores ? 8 : kNarrow || kForm == Form::kWide ? 16 : 32;
  static constexpr int kKeys = kKeyWarps * kWarpKeys;
  static constexpr int kBlocks = kWarpKeys / 8;  // of 8 keys, one mma each
  // The 16 keys that a warp multiplies are no other warp's.
  static constexpr bool kOwnKeys = kTensorCores && kNarrow;
};

// Fills rows [0, rows) of a tile; row_at(r) is null where there is none.  Eight lanes a
// row.  With `vectorized` the copies are asynchronous and not yet committed.
template <class Element, class RowAt>
__device__ __forceinline__ void LoadTile(unsigned char* tile, int rows, int pitch, int64_t dim, bool vectorized,
                                         const void* any, const RowAt& row_at) {
  constexpr int kLanes = 8, kWidth = kVectorBytes / sizeof(Element);
  const int lane = threadIdx.x % kLanes, bytes = pitch - kVectorBytes;
  for (int r = threadIdx.x / kLanes; r < rows; r += kTileThreads / kLanes) {
    const Element* const from = row_at(r);
    unsigned char* const to = tile + r * pitch;
    if (vectorized) {
      for (int chunk = lane; chunk * kVectorBytes < bytes; chunk += kLanes) {
        const bool there = from != nullptr && chunk * kWidth < dim;
        CopyAsync16(to + chunk * kVectorBytes, there ? from + chunk * kWidth : any, there ? kVectorBytes : 0);
      }
    } else {
      auto* const elements = reinterpret_cast<Element*>(to);
      for (int c = lane; c < bytes / static_cast<int>(sizeof(Element)); c += kLanes) {
        elements[c] = from != nullptr && c < dim ? from[c] : Element(0.f);
      }
    }
  }
}

// out[block][2 r + e] = row (lane / 4 + 8 r) . key (8 block + 2 (lane % 4) + e), for the
// warp's 16 rows and 8 kBlocks keys.
template <class Element, int kBlocks>
__device__ __forceinline__ void Multiply(const unsigned char* rows, const unsigned char* keys, int pitch,
                                         float (&out)[kBlocks][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[block][i] = 0.f;
  }
  const int bytes = pitch - kVectorBytes;
  if constexpr (sizeof(Element) == 2) {
    static_assert(kBlocks % 2 == 0);
    // Matrices of A: rows 0-7 and 8-15 of channels 0-7, then of 8-15; of B: channels 0-7
    // and 8-15 of keys 0-7, then of 8-15.
    const unsigned char* const a_at = rows + (lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * kVectorBytes;
    const unsigned char* const b_at = keys + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * kVectorBytes;
#pragma unroll 2
    for (int at = 0; at < bytes; at += 2 * kStepChannels) {
      unsigned a[4];
      LoadMatrices(a_at + at, a);
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        unsigned b[4];
        LoadMatrices(b_at + pair * 16 * pitch + at, b);
        MultiplyAdd<Element>(a, b[0], b[1], out[2 * pair]);
        MultiplyAdd<Element>(a, b[2], b[3], out[2 * pair + 1]);
      }
    }
  } else {
    for (int at = 0; at < bytes; at += kVectorBytes) {
      float4 a[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        a[r] = *reinterpret_cast<const float4*>(rows + (lane / 4 + 8 * r) * pitch + at);
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = 8 * block + 2 * (lane % 4) + i % 2;
          const float4 b = *reinterpret_cast<const float4*>(keys + key * pitch + at);
          const float4 q = a[i / 2];
          out[block][i] = fmaf(q.w, b.w, fmaf(q.z, b.z, fmaf(q.y, b.y, fmaf(q.x, b.x, out[block][i]))));
        }
      }
    }
  }
}

// Multiply() for 16 keys, and from the same loads the keys' products with each other: low[], high[]
// as out[][] with the keys for rows, of the first and the last eight of them.
template <class Element>
__device__ __forceinline__ void MultiplyWithNorms(const unsigned char* rows, const unsigned char* keys, int pitch,
                                                  float (&out)[2][4], float (&low)[4], float (&high)[4]) {
  const int lane = threadIdx.x % 32, bytes = pitch - kVectorBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[0][i] = out[1][i] = low[i] = high[i] = 0.f;
  const unsigned char* const a_at = rows + (lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * kVectorBytes;
  const unsigned char* const b_at = keys + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * kVectorBytes;
#pragma unroll 2
  for (int at = 0; at < bytes; at += 2 * kStepChannels) {
    unsigned a[4], b[4];
    LoadMatrices(a_at + at, a);
    LoadMatrices(b_at + at, b);
    MultiplyAdd<Element>(a, b[0], b[1], out[0]);
    MultiplyAdd<Element>(a, b[2], b[3], out[1]);
    const unsigned own[4] = {b[0], b[2], b[1], b[3]};
    MultiplyAdd<Element>(own, b[0], b[1], low);
    MultiplyAdd<Element>(own, b[2], b[3], high);
  }
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_PROBE_TILES_CUH_
