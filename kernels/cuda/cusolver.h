// cusolver.h: the five functions of cuSOLVER that are used, found at run time.
//
// Declared here, because its headers are no part of what the CUDA compiler needs, and the
// library is not linked.  Types and numbers are those of cusolverDn.h and
// cublas_api.h, which keep them for good: they are NVIDIA's binary interface.

#ifndef BELLWETHER_KERNELS_CUDA_CUSOLVER_H_
#define BELLWETHER_KERNELS_CUDA_CUSOLVER_H_

#include <cuda_runtime.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace bellwether::kernels::cuda {

struct Cusolver {
  using Handle = void*;
  using Params = void*;
  static constexpr int kSuccess = 0;
  static constexpr int kValuesOnly = 0;  // CUSOLVER_EIG_MODE_NOVECTOR
  static constexpr int kLower = 0;       // CUBLAS_FILL_MODE_LOWER

  int (*create)(Handle* handle) = nullptr;
  int (*destroy)(Handle handle) = nullptr;
  int (*set_stream)(Handle handle, cudaStream_t stream) = nullptr;
  int (*create_params)(Params* params) = nullptr;
  int (*destroy_params)(Params params) = nullptr;
  int (*buffer_size)(Handle handle, Params params, int vectors, int fill, int64_t n, cudaDataType a_type, const void* a,
                     int64_t lda, cudaDataType w_type, const void* w, cudaDataType compute_type, size_t* device_bytes,
                     size_t* host_bytes, int64_t batch) = nullptr;
  int (*eigen)(Handle handle, Params params, int vectors, int fill, int64_t n, cudaDataType a_type, void* a,
               int64_t lda, cudaDataType w_type, void* w, cudaDataType compute_type, void* on_device,
               size_t device_bytes, void* on_host, size_t host_bytes, int* info, int64_t batch) = nullptr;

  Cusolver() = default;
  Cusolver(const Cusolver&) = delete;
  Cusolver& operator=(const Cusolver&) = delete;
  ~Cusolver();

  // False, with a sentence: no such library, or one that is too old.  `name` as in
  // bw_spectra_open().
  bool Load(const char* name, std::string* error);

 private:
  void* library_ = nullptr;
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_CUSOLVER_H_
