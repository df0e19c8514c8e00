// Batched eigenvalues through cuSOLVER: cusolverDnXsyevBatched, in double.
//
// Work      as many matrices a call as fit in kPassBytesMax, one transfer there and one back
// Memory    8 n^2 B a matrix each way over the bus, pinned; cuSOLVER's workspace beside it
// Numerics  backward stable: eigenvalues within a few eps n lambda_1 of cpu/'s

#include "bellwether/kernels/gpu_spectra.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/cusolver.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr size_t kPassBytesMax = size_t{64} << 20;

thread_local std::string last_error;

bool Ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  last_error = std::string(what) + ": " + cudaGetErrorString(error);
  return false;
}

bool Solved(int status, const char* what) {
  if (status == Cusolver::kSuccess) return true;
  last_error = std::string(what) + ": cuSOLVER's status " + std::to_string(status);
  return false;
}

// Device memory that grows, with its pinned twin on the host if wanted.
struct Buffer {
  const bool twin;
  void* device = nullptr;
  void* host = nullptr;
  size_t bytes = 0;

  explicit Buffer(bool with_twin) : twin(with_twin) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Release(); }

  bool Reserve(size_t wanted) {
    if (wanted <= bytes) return true;
    Release();
    if (!Ok(cudaMalloc(&device, wanted), "memory for spectra") ||
        (twin && !Ok(cudaMallocHost(&host, wanted), "pinned memory for spectra"))) {
      return false;
    }
    bytes = wanted;
    return true;
  }
  void Release() {
    cudaFreeHost(host);
    cudaFree(device);
    device = host = nullptr;
    bytes = 0;
  }
};

}  // namespace

Cusolver::~Cusolver() {
  if (library_ != nullptr) dlclose(library_);
}

bool Cusolver::Load(const char* name, std::string* error) {
  std::vector<std::string> names = {"libcusolver.so.12", "libcusolver.so.11", "libcusolver.so"};
  if (name != nullptr && name[0] != '\0') names = {name};
  for (const std::string& each : names) {
    library_ = dlopen(each.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ != nullptr) break;
    if (error->empty()) *error = dlerror();
  }
  if (library_ == nullptr) return false;
  const auto find = [&](const char* symbol, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library_, symbol));
    if (*function == nullptr) *error = std::string("cuSOLVER is too old: it has no ") + symbol;
    return *function != nullptr;
  };
  return find("cusolverDnCreate", &create) && find("cusolverDnDestroy", &destroy) &&
         find("cusolverDnSetStream", &set_stream) && find("cusolverDnCreateParams", &create_params) &&
         find("cusolverDnDestroyParams", &destroy_params) && find("cusolverDnXsyevBatched_bufferSize", &buffer_size) &&
         find("cusolverDnXsyevBatched", &eigen);
}

class GpuSpectra {
 public:
  ~GpuSpectra() {
    if (params_ != nullptr) cusolver_.destroy_params(params_);
    if (handle_ != nullptr) cusolver_.destroy(handle_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  bool Open(const char* cusolver) {
    last_error.clear();
    return cusolver_.Load(cusolver, &last_error) && Ok(cudaSetDevice(0), "cudaSetDevice") &&
           Ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate") &&
           Solved(cusolver_.create(&handle_), "cusolverDnCreate") &&
           Solved(cusolver_.set_stream(handle_, stream_), "cusolverDnSetStream") &&
           Solved(cusolver_.create_params(&params_), "cusolverDnCreateParams");
  }

  bool Eigenvalues(int64_t n, int64_t count, const double* matrices, double* values) {
    if (n < 1 || n > 512 || count < 0) {
      last_error = "n = " + std::to_string(n) + ", count = " + std::to_string(count) + ": must be 1..512 and 0 or more";
      return false;
    }
    if (!Ok(cudaSetDevice(0), "cudaSetDevice")) return false;
    const size_t matrix_bytes = static_cast<size_t>(n * n) * sizeof(double);
    const auto pass = static_cast<int64_t>(std::max(size_t{1}, kPassBytesMax / matrix_bytes));
    // Nothing is written unless all of it is right.
    std::vector<double> found(static_cast<size_t>(n * count));
    for (int64_t begin = 0; begin < count; begin += pass) {
      const int64_t batch = std::min(pass, count - begin);
      if (!Pass(n, batch, matrices + begin * n * n, found.data() + begin * n)) return false;
    }
    std::copy(found.begin(), found.end(), values);
    return true;
  }

 private:
  bool Pass(int64_t n, int64_t batch, const double* matrices, double* values) {
    const size_t matrix_bytes = static_cast<size_t>(batch * n * n) * sizeof(double);
    const size_t value_bytes = static_cast<size_t>(batch * n) * sizeof(double);
    // Behind the values, what cuSOLVER says of each matrix.
    const size_t out_bytes = value_bytes + static_cast<size_t>(batch) * sizeof(int);
    if (!matrices_.Reserve(matrix_bytes) || !out_.Reserve(out_bytes)) return false;
    auto* const info = reinterpret_cast<int*>(static_cast<unsigned char*>(out_.device) + value_bytes);
    size_t device_bytes = 0, host_bytes = 0;
    if (!Solved(cusolver_.buffer_size(handle_, params_, Cusolver::kValuesOnly, Cusolver::kLower, n, CUDA_R_64F,
                                      matrices_.device, n, CUDA_R_64F, out_.device, CUDA_R_64F, &device_bytes,
                                      &host_bytes, batch),
                "cusolverDnXsyevBatched_bufferSize") ||
        !work_.Reserve(std::max(device_bytes, size_t{1}))) {
      return false;
    }
    host_work_.resize(host_bytes);
    std::memcpy(matrices_.host, matrices, matrix_bytes);
    if (!Ok(cudaMemcpyAsync(matrices_.device, matrices_.host, matrix_bytes, cudaMemcpyHostToDevice, stream_),
            "sending Gram matrices") ||
        !Solved(cusolver_.eigen(handle_, params_, Cusolver::kValuesOnly, Cusolver::kLower, n, CUDA_R_64F,
                                matrices_.device, n, CUDA_R_64F, out_.device, CUDA_R_64F, work_.device, device_bytes,
                                host_work_.data(), host_bytes, info, batch),
                "cusolverDnXsyevBatched") ||
        !Ok(cudaMemcpyAsync(out_.host, out_.device, out_bytes, cudaMemcpyDeviceToHost, stream_),
            "fetching eigenvalues") ||
        !Ok(cudaStreamSynchronize(stream_), "eigenvalues")) {
      return false;
    }
    const auto* const told = reinterpret_cast<const int*>(static_cast<const unsigned char*>(out_.host) + value_bytes);
    for (int64_t i = 0; i < batch; ++i) {
      if (told[i] == 0) continue;
      last_error = "cusolverDnXsyevBatched: info " + std::to_string(told[i]) + " for one of " + std::to_string(batch) +
                   " matrices";
      return false;
    }
    std::memcpy(values, out_.host, value_bytes);
    return true;
  }

  Cusolver cusolver_;
  Cusolver::Handle handle_ = nullptr;
  Cusolver::Params params_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Buffer matrices_{true}, out_{true}, work_{false};
  std::vector<unsigned char> host_work_;
};

}  // namespace bellwether::kernels::cuda

struct bw_spectra {
  bellwether::kernels::cuda::GpuSpectra spectra;
};

extern "C" {

const char* bw_spectra_error(void) { return bellwether::kernels::cuda::last_error.c_str(); }

int bw_spectra_open(bw_spectra** spectra, const char* cusolver) {
  auto* const opened = new bw_spectra;
  if (!opened->spectra.Open(cusolver)) {
    delete opened;
    return 1;
  }
  *spectra = opened;
  return 0;
}

void bw_spectra_close(bw_spectra* spectra) { delete spectra; }

int bw_spectra_eigenvalues(bw_spectra* spectra, int64_t n, int64_t count, const double* matrices, double* values) {
  return spectra->spectra.Eigenvalues(n, count, matrices, values) ? 0 : 1;
}

}  // extern "C"
