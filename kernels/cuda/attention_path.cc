#include "cuda/attention_path.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int64_t kHeadDimMax = 256;  // of both paths
constexpr char kVariable[] = "BELLWETHER_ATTENTION_PATH";

struct Capability {
  int major, minor;
};

Status GetGpu(Capability* capability, AttentionGpu* gpu) {
  int device = 0;
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, device) == cudaSuccess;
  };
  if (cudaGetDevice(&device) == cudaSuccess && get(&capability->major, cudaDevAttrComputeCapabilityMajor) &&
      get(&capability->minor, cudaDevAttrComputeCapabilityMinor) &&
      get(&gpu->multiprocessors, cudaDevAttrMultiProcessorCount) &&
      get(&gpu->shared_bytes_max, cudaDevAttrMaxSharedMemoryPerBlockOptin) &&
      get(&gpu->shared_bytes_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor)) {
    return Status::kOk;
  }
  return Fail(Status::kUnavailable, "no CUDA device can be used");
}

}  // namespace

Status ChooseAttentionPath(int64_t widest_dim, AttentionGpu* gpu) {
  Capability capability = {};
  BELLWETHER_KERNELS_RETURN_IF_ERROR(GetGpu(&capability, gpu));
  const bool hopper = capability.major == 9 && capability.minor == 0;
  gpu->path = hopper ? AttentionPath::kSm90 : AttentionPath::kSm80;
  if (const char* const forced = std::getenv(kVariable); forced != nullptr) {
    if (std::strcmp(forced, "sm80") == 0) {
      gpu->path = AttentionPath::kSm80;
    } else if (std::strcmp(forced, "sm90") == 0) {
      gpu->path = AttentionPath::kSm90;
    } else {
      return Fail(Status::kInvalidArgument, "%s is \"%.40s\", but must be sm80 or sm90", kVariable, forced);
    }
  }
  if (capability.major < 8 || (gpu->path == AttentionPath::kSm90 && !hopper)) {
    return Fail(Status::kUnsupported, "the GPU has compute capability %d.%d, but %s needs %s", capability.major,
                capability.minor, gpu->path == AttentionPath::kSm90 ? "path sm90" : "attention",
                gpu->path == AttentionPath::kSm90 ? "9.0" : "8.0 or later");
  }
  if (widest_dim > kHeadDimMax) {
    return Fail(Status::kUnsupported, "head_dim or v_dim is %lld, but path %s has only 1..%lld",
                static_cast<long long>(widest_dim), gpu->path == AttentionPath::kSm90 ? "sm90" : "sm80",
                static_cast<long long>(kHeadDimMax));
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cuda
