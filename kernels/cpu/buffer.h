// buffer.h: scratch memory of one call: aligned for vectors, never throws.

#ifndef BELLWETHER_KERNELS_CPU_BUFFER_H_
#define BELLWETHER_KERNELS_CPU_BUFFER_H_

#include <cstdint>
#include <new>

namespace bellwether::kernels::cpu {

class Buffer {
 public:
  static constexpr std::align_val_t kAlignment{64};

  explicit Buffer(int64_t doubles)
      : data_(static_cast<double*>(
            ::operator new(static_cast<size_t>(doubles) * sizeof(double), kAlignment, std::nothrow))) {}
  ~Buffer() { ::operator delete(data_, kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  double* data() const { return data_; }  // Null if there was no memory.

 private:
  double* data_;
};

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_BUFFER_H_
