// laws_scratch.h: memory of one call, which lives on the caller's stream.
//
// It is given and taken back in the order of the stream, so nothing waits, and a call that is
// captured into a CUDA graph has it in the graph.  Private to kernels/cuda.

#ifndef BELLWETHER_KERNELS_CUDA_LAWS_SCRATCH_H_
#define BELLWETHER_KERNELS_CUDA_LAWS_SCRATCH_H_

#include <cuda_runtime.h>

#include <cstddef>

#include "bellwether/kernels/status.h"
#include "error.h"

namespace bellwether::kernels::cuda {

class LawScratch {
 public:
  explicit LawScratch(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}
  LawScratch(const LawScratch&) = delete;
  LawScratch& operator=(const LawScratch&) = delete;
  ~LawScratch() {
    if (at_ != nullptr) (void)cudaFreeAsync(at_, stream_);
  }

  // Says where an array will be; before Allocate().
  template <class T>
  size_t Add(int64_t count) {
    const size_t at = bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return at;
  }
  Status Allocate() {
    const cudaError_t error = cudaMallocAsync(&at_, bytes_ > 0 ? bytes_ : 1, stream_);
    if (error == cudaSuccess) return Status::kOk;
    at_ = nullptr;
    (void)cudaGetLastError();
    return Fail(Status::kDeviceError, "no %zu bytes of memory for the sums: %s", bytes_, cudaGetErrorString(error));
  }
  template <class T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(at_) + offset);
  }

 private:
  cudaStream_t stream_;
  void* at_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAWS_SCRATCH_H_
