// device.h: where a kernel runs, and how it finds its arrays.

#ifndef BELLWETHER_KERNELS_DEVICE_H_
#define BELLWETHER_KERNELS_DEVICE_H_

#include <cstdint>

namespace bellwether::kernels {

enum class Backend : int { kCpu = 0, kCuda = 1 };

// All pointers passed to a kernel must be readable by `backend`: host memory
// for kCpu, device or managed memory for kCuda.
struct Device {
  Backend backend = Backend::kCpu;
  void* stream = nullptr;  // cudaStream_t for kCuda; ignored for kCpu.
  // kCpu: most threads that one call may use, 0..256; 0 = 1 = the caller's own.
  // A call too small to gain from threads uses fewer.  Results do not depend
  // on it, bit for bit.
  uint32_t threads = 0;
};

// Whether the kernels that are built for this backend can run in this process; kCuda:
// on the current device.  kCuda has all but IncrementRank(), which answers kUnavailable.
// Any thread.
bool IsAvailable(Backend backend);

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// A [batch][head][token][channel] view.  Strides count elements and may be
// anything that stays inside the caller's memory; channels are adjacent.
struct Tensor4 {
  const void* data = nullptr;  // Aligned to the element; null = absent.
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

// Words of a gate.  A launch that was captured into a CUDA graph runs whenever
// the graph does, so it asks its gate each time.  If the first word is 0 it
// writes nothing.  The second is added to the seed of the sampled rows.  kCpu
// reads the gate when it is called.
enum Gate : int { kGateOpen = 0, kGateSeed, kGateWords };

// Legal sizes, the same for all kernels.
inline constexpr int64_t kBatchMax = 1 << 20;
inline constexpr int64_t kHeadsMax = 65536;
inline constexpr int64_t kTokensMax = (int64_t{1} << 31) - 1;
inline constexpr int64_t kHeadDimMax = 1024;
inline constexpr uint32_t kThreadsMax = 256;

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_DEVICE_H_
