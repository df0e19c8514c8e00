// Host side of the Hopper forward: tensor maps, tile order, instantiation.

#include <cuda_runtime.h>

#include "cuda/attention_convert.h"
#include "cuda/sm90/attention.h"
#include "cuda/sm90/attention_fwd_launch.h"
#include "cuda/sm90/tensor_map.h"
#include "error.h"

namespace bellwether::kernels::cuda::sm90 {
namespace {

// K and V of the heads that run together stay in L2 (50 MB), with room for Q, O.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

}  // namespace

Status AttentionForward(const AttentionForwardParams& a, int multiprocessors, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const FwdLauncher launcher = FindFwdLauncher(a);
  const int64_t row_tiles = CountTiles(a, a.q_len, launcher.rows);
  // The kernel's tile arithmetic is 32-bit.
  constexpr int64_t kMax = 1 << 30;
  if (a.q_len + a.k_len >= kMax || a.heads * row_tiles > kMax) {
    return Fail(Status::kUnsupported, "q_len + k_len or the number of tiles is above 2^30");
  }

  FwdMaps maps = {};
  const TensorMapShape out = OutputShape(a);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("q", a.q, QueryShape(a), a.dtype, launcher.rows, &maps.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("k", a.k, KeyShape(a), a.dtype, launcher.cols, &maps.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("v", a.v, ValueShape(a), a.dtype, launcher.cols, &maps.v));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("o", a.o, out, a.dtype, launcher.out_rows, &maps.o));
  if (a.o_lo.data != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(
        EncodeTensorMap("o_lo", a.o_lo, out, DType::kBFloat16, launcher.out_rows, &maps.o_lo));
  }

  FwdParams p = {ToFwdParams(a), nullptr, 0};
  p.counter = static_cast<int*>(a.workspace);
  p.tiles = static_cast<int>(a.heads * row_tiles);
  p.section_keys = static_cast<int>(kSectionBytes / (4 * a.head_dim));
  if (p.counter != nullptr && cudaMemsetAsync(p.counter, 0, sizeof(*p.counter), stream) != cudaSuccess) {
    return Fail(Status::kDeviceError, "the workspace could not be cleared");
  }
  const Status status = launcher.launch(p, maps, multiprocessors, stream);
  return status == Status::kOk ? status : Fail(status, "the attention kernel did not launch");
}

}  // namespace bellwether::kernels::cuda::sm90
