// shared_copy.cuh: a struct of ints in shared memory, read again where it is needed,
// so that nothing of it stays in registers.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_SHARED_COPY_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_SHARED_COPY_CUH_

#include <cstdint>

#include "cuda/memory.cuh"

namespace bellwether::kernels::cuda::sm80 {

template <class Struct>
class SharedCopy {
  static constexpr int kWords = sizeof(Struct) / 4, kVectors = (kWords + 3) / 4;
  static_assert(sizeof(Struct) % 4 == 0);

 public:
  static constexpr int kBytes = 16 * kVectors;

  // `address` is aligned to 16 bytes.
  __device__ __forceinline__ explicit SharedCopy(uint32_t address) : address_(address) {}

  __device__ __forceinline__ uint32_t End() const { return address_ + kBytes; }

  // By one thread, before a barrier.
  __device__ __forceinline__ void Store(const Struct& value) const {
    const int* const words = reinterpret_cast<const int*>(&value);
#pragma unroll
    for (int i = 0; i < kWords; ++i) StoreShared(address_ + 4 * i, static_cast<uint32_t>(words[i]));
  }

  __device__ __forceinline__ Struct Load() const {
    union {
      int words[4 * kVectors];
      Struct value;
    } copy;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int* const w = copy.words + 4 * i;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "r"(address_ + 16 * i)
                   : "memory");
    }
    return copy.value;
  }

 private:
  uint32_t address_;
};

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_SHARED_COPY_CUH_
