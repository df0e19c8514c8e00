// probe_mask.cuh: what a mask's tensor adds to scores, read where it lies, and which keys of a
// warp's tile a row may see.
//
// A warp's tile has up to 32 keys, so a word says of each whether it is in V, or allowed: bit j
// stands for key first_key + j.  A thread has the keys 8 b + 2 (lane % 4) and the next one, b = 0, 1,
// ..., in this order.

#ifndef BELLWETHER_KERNELS_CUDA_PROBE_MASK_CUH_
#define BELLWETHER_KERNELS_CUDA_PROBE_MASK_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "bellwether/kernels/probe.h"

namespace bellwether::kernels::cuda {

// Where a mask's row begins, in elements.
__device__ __forceinline__ int64_t MaskRowAt(const ProbeMask& mask, int64_t batch, int64_t head, int64_t row) {
  return batch * mask.batch_stride + head * mask.head_stride + row * mask.row_stride;
}

// What is added to a score; -inf hides the key.
__device__ __forceinline__ float BiasAt(const ProbeMask& mask, int64_t at) {
  float value, hidden = kHiddenFrom;
  switch (mask.dtype) {
    case MaskDType::kBool:
      return static_cast<const uint8_t*>(mask.data)[at] != 0 ? 0.f : -INFINITY;
    case MaskDType::kBFloat16:
      value = __bfloat162float(static_cast<const __nv_bfloat16*>(mask.data)[at]);
      hidden = kHiddenFromBf16;
      break;
    case MaskDType::kFloat16:
      value = __half2float(static_cast<const __half*>(mask.data)[at]);
      break;
    default:
      value = static_cast<const float*>(mask.data)[at];
  }
  return value <= hidden ? -INFINITY : value;
}

// Of a word the bits of this thread's keys, in the order in which it has them.
template <int kBlocks>
__device__ __forceinline__ unsigned OwnBits(unsigned word) {
  const unsigned mine = word >> 2 * (threadIdx.x % 4);
  unsigned bits = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) bits |= (mine >> 8 * b & 3u) << 2 * b;
  return bits;
}

// Bits 0..count-1, count being cut at 0 and 32.
__device__ __forceinline__ unsigned BitsBelow(int count) {
  return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1;
}

__device__ __forceinline__ unsigned RangeBits(int begin, int end) { return BitsBelow(end) & ~BitsBelow(begin); }

// Of four bytes a bit each: whether it is not 0.
__device__ __forceinline__ unsigned NonzeroBytes(unsigned bytes) {
  // Byte i's bit goes to 24 + i, and no two products meet.
  return __vsetne4(bytes, 0) * 0x01020408u >> 24 & 0xfu;
}

// How a kernel may read a mask's tensor.
enum class MaskAccess : int {
  kOne,    // an element at a time
  kPairs,  // two elements that are added to scores
  kChunks  // 16 bytes of a bool tensor
};
inline constexpr int kChunkKeys = 16;

inline MaskAccess AccessOf(const ProbeMask& mask) {
  const bool is_bool = mask.dtype == MaskDType::kBool;
  const int64_t width = is_bool ? kChunkKeys : 2;
  const int64_t bytes = is_bool ? 1 : mask.dtype == MaskDType::kFloat32 ? 4 : 2;
  const auto fits = [width](int64_t stride) { return stride % width == 0; };
  const bool aligned = reinterpret_cast<uintptr_t>(mask.data) % (width * bytes) == 0;
  if (mask.key_stride != 1 || !aligned || !fits(mask.batch_stride) || !fits(mask.head_stride) ||
      !fits(mask.row_stride)) {
    return MaskAccess::kOne;
  }
  return is_bool ? MaskAccess::kChunks : MaskAccess::kPairs;
}

// 16 keys of a bool tensor from `at` on, of which `keys` are there.
__device__ __forceinline__ uint4 ChunkAt(const ProbeMask& mask, int64_t at, int keys) {
  const auto* const from = static_cast<const uint8_t*>(mask.data) + at;
  if (keys >= kChunkKeys) return __ldg(reinterpret_cast<const uint4*>(from));
  unsigned words[4] = {};
#pragma unroll
  for (int i = 0; i < kChunkKeys; ++i) {
    if (i < keys) words[i / 4] |= static_cast<unsigned>(from[i]) << 8 * (i % 4);
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ unsigned ChunkBits(uint4 chunk) {
  return NonzeroBytes(chunk.x) | NonzeroBytes(chunk.y) << 4 | NonzeroBytes(chunk.z) << 8 | NonzeroBytes(chunk.w) << 12;
}

// What is added to the scores of the key at `at` and the next one; -inf hides a key.
__device__ __forceinline__ float2 BiasPairAt(const ProbeMask& mask, int64_t at) {
  float2 pair;
  float hidden = kHiddenFrom;
  if (mask.dtype == MaskDType::kFloat32) {
    pair = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(mask.data) + at));
  } else {
    const unsigned bits = __ldg(reinterpret_cast<const unsigned*>(static_cast<const uint16_t*>(mask.data) + at));
    if (mask.dtype == MaskDType::kBFloat16) {
      pair = {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
      hidden = kHiddenFromBf16;
    } else {
      __half2_raw raw;
      raw.x = static_cast<unsigned short>(bits);
      raw.y = static_cast<unsigned short>(bits >> 16);
      pair = __half22float2(raw);
    }
  }
  return {pair.x <= hidden ? -INFINITY : pair.x, pair.y <= hidden ? -INFINITY : pair.y};
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_PROBE_MASK_CUH_
