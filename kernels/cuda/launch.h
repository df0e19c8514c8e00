// launch.h: what the launchers of the statistics share: the current device, how a
// tensor may be read, and a launch in clusters.  Private to kernels/cuda.

#ifndef BELLWETHER_KERNELS_CUDA_LAUNCH_H_
#define BELLWETHER_KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels::cuda {

inline constexpr int kVectorBytes = 16;
inline constexpr int kClusterMax = 8;  // what every Hopper GPU can schedule

struct Gpu {
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int shared_bytes_max = 0;  // of one block
};

// kUnavailable without a GPU, kUnsupported before compute capability 8.0.
Status FindGpu(Gpu* gpu);

// Whether the rows are whole vectors of 16 bytes that lie on multiples of 16 bytes.
bool IsVectorized(DType dtype, const Tensor4& t, int64_t batch, int64_t heads, int64_t tokens, int64_t dim);

// How many blocks share a unit of `parts` parts, so that `units` units fill the GPU:
// a power of two, 1 before Hopper, which has no clusters.
int ClusterSize(const Gpu& gpu, int64_t units, int64_t parts);

// The sentence of a failed launch.
Status LaunchResult(cudaError_t error, const char* kernel);

struct Grid {
  int64_t units = 0;
  int cluster = 1;  // blocks of a unit
  int threads = 0;
  int shared_bytes = 0;
};

template <class Params>
Status LaunchClusters(void (*kernel)(Params), const Params& params, const Grid& grid, void* stream, const char* name) {
  cudaError_t error = cudaSuccess;
  // Without being asked a launch has 48 KiB, and the kernel's own arrays count: 16 KiB at most.
  if (grid.shared_bytes > (48 - 16) * 1024) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes);
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.units * grid.cluster));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = grid.cluster > 1 ? 1 : 0;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, params);
  return LaunchResult(error, name);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAUNCH_H_
