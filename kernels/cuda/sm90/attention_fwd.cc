// Host side of the Hopper forward: tensor maps, tile order, instantiation.

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/sm90/attention.h"
#include "cuda/sm90/attention_fwd_launch.h"
#include "cuda/sm90/tensor_map.h"
#include "error.h"

namespace bellwether::kernels::cuda::sm90 {
namespace {

// K and V of the heads that run together stay in L2 (50 MB), with room for Q, O.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

FwdStrides ToStrides(const Tensor4& t) { return {t.batch_stride, t.head_stride, t.token_stride}; }

}  // namespace

Status GetMultiprocessors(int* count) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return Fail(Status::kUnavailable, "no CUDA device can be used");
  }
  if (major != 9) {
    return Fail(Status::kUnsupported, "the GPU has compute capability %d.x, but 9.0 is built",
                major);
  }
  return Status::kOk;
}

Status AttentionForward(const AttentionForwardParams& a, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  int multiprocessors = 0;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(GetMultiprocessors(&multiprocessors));
  const FwdLauncher launcher = FindFwdLauncher(a);
  if (launcher.launch == nullptr) {
    return Fail(Status::kUnsupported, "head_dim is %lld, but only 64 and 128 are built",
                static_cast<long long>(a.head_dim));
  }

  const int64_t row_tiles = (a.q_len + launcher.rows - 1) / launcher.rows;
  const int64_t pairs = a.batch * a.heads;
  // The kernel's tile arithmetic is 32-bit.
  constexpr int64_t kMax = 1 << 30;
  if (a.q_len + a.k_len > kMax || pairs * row_tiles > kMax) {
    return Fail(Status::kUnsupported, "q_len + k_len or the number of tiles is above 2^30");
  }

  FwdMaps maps;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap(
      "q", a.q, {a.head_dim, a.q_len, a.heads, a.batch}, a.dtype, launcher.rows, &maps.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap(
      "k", a.k, {a.head_dim, a.k_len, a.kv_heads, a.batch}, a.dtype, launcher.cols, &maps.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap(
      "v", a.v, {a.head_dim, a.k_len, a.kv_heads, a.batch}, a.dtype, launcher.cols, &maps.v));

  const int64_t group = a.heads / a.kv_heads;
  const int64_t kv_bytes = 4 * a.k_len * a.head_dim;  // K and V of one head
  const int64_t section = std::max<int64_t>(1, kSectionBytes / kv_bytes) * group;
  constexpr float kLog2E = 1.44269504088896341f;
  FwdParams p = {};
  p.o = const_cast<void*>(a.o.data);
  p.o_lo = const_cast<void*>(a.o_lo.data);
  p.lse = a.lse;
  p.o_stride = ToStrides(a.o);
  p.o_lo_stride = ToStrides(a.o_lo);
  p.lse_batch_stride = a.lse_batch_stride;
  p.lse_head_stride = a.lse_head_stride;
  p.counter = static_cast<int*>(a.workspace);
  p.batch = static_cast<int>(a.batch);
  p.heads = static_cast<int>(a.heads);
  p.group = static_cast<int>(group);
  p.q_len = static_cast<int>(a.q_len);
  p.k_len = static_cast<int>(a.k_len);
  p.row_tiles = static_cast<int>(row_tiles);
  p.tiles = static_cast<int>(pairs * row_tiles);
  p.section = static_cast<int>(std::min(section, pairs));
  p.scale_log2 = a.scale * kLog2E;
  p.causal = a.causal;
  if (p.counter != nullptr &&
      cudaMemsetAsync(p.counter, 0, sizeof(*p.counter), stream) != cudaSuccess) {
    return Fail(Status::kDeviceError, "the workspace could not be cleared");
  }
  const Status status = launcher.launch(p, maps, multiprocessors, stream);
  return status == Status::kOk ? status : Fail(status, "the attention kernel did not launch");
}

}  // namespace bellwether::kernels::cuda::sm90
