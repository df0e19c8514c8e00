#include "cuda/launch.h"

#include "error.h"

namespace bellwether::kernels::cuda {

Status FindGpu(Gpu* gpu) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  ask(&gpu->major, cudaDevAttrComputeCapabilityMajor);
  ask(&gpu->minor, cudaDevAttrComputeCapabilityMinor);
  ask(&gpu->multiprocessors, cudaDevAttrMultiProcessorCount);
  ask(&gpu->shared_bytes_max, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Fail(Status::kUnavailable, "backend is 1 (CUDA), but there is no GPU: %s", cudaGetErrorString(error));
  }
  if (gpu->major < 8) {
    return Fail(Status::kUnsupported, "the GPU has compute capability %d.%d, but must have 8.0 or later", gpu->major,
                gpu->minor);
  }
  return Status::kOk;
}

bool IsVectorized(DType dtype, const Tensor4& t, int64_t batch, int64_t heads, int64_t tokens, int64_t dim) {
  const int64_t width = kVectorBytes / SizeOf(dtype);
  const auto whole = [&](int64_t extent, int64_t stride) { return extent <= 1 || stride % width == 0; };
  return reinterpret_cast<uintptr_t>(t.data) % kVectorBytes == 0 && dim % width == 0 && whole(batch, t.batch_stride) &&
         whole(heads, t.head_stride) && whole(tokens, t.token_stride);
}

int ClusterSize(const Gpu& gpu, int64_t units, int64_t parts) {
  int blocks = 1;
  while (gpu.major >= 9 && blocks < kClusterMax && 2 * blocks <= parts && units * blocks < 2 * gpu.multiprocessors) {
    blocks *= 2;
  }
  return blocks;
}

Status LaunchResult(cudaError_t error, const char* kernel) {
  if (error == cudaSuccess) return Status::kOk;
  (void)cudaGetLastError();
  return Fail(Status::kDeviceError, "%s did not launch: %s", kernel, cudaGetErrorString(error));
}

}  // namespace bellwether::kernels::cuda
