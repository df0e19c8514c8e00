// Host side of the Hopper backward: tensor maps, workspace, tile order.

#include <cuda_runtime.h>

#include "cuda/attention_convert.h"
#include "cuda/attention_workspace.h"
#include "cuda/sm90/attention.h"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/tensor_map.h"
#include "error.h"

namespace bellwether::kernels::cuda::sm90 {
namespace {

// Q, dO and the dQ sums of the heads that run together stay in L2.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

}  // namespace

Status AttentionBackward(const AttentionBackwardParams& b, void* stream) {
  const AttentionForwardParams& a = b.forward;
  const BwdLauncher launcher = FindBwdLauncher(b);
  const int64_t key_tiles = CountTiles(a, a.k_len, launcher.cols);
  // The grid's y and z and the kernel's tile arithmetic.
  if (a.q_len + a.k_len > (1 << 28) || a.batch > 65535 || a.heads > 65535 || a.sequences > (1 << 20) ||
      a.kv_heads * key_tiles > (1 << 29)) {
    return Fail(Status::kUnsupported, "batch, heads, a length or their product is too large");
  }

  BwdMaps maps;
  const TensorMapShape q = QueryShape(a), kv = KeyShape(a);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("q", a.q, q, a.dtype, launcher.rows, &maps.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("d_o", b.d_o, q, a.dtype, launcher.rows, &maps.d_o));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("k", a.k, kv, a.dtype, launcher.key_box, &maps.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("v", a.v, kv, a.dtype, launcher.key_box, &maps.v));

  AttentionBwdParams p = ToBwdParams(b);
  PlaceWorkspace(b, &p);
  if (!launcher.counts) p.errors = nullptr;
  p.key_tiles = static_cast<int>(key_tiles);
  p.section_queries = static_cast<int>(kSectionBytes / (8 * a.head_dim));
  const Status status = launcher.launch(p, maps, static_cast<cudaStream_t>(stream));
  return status == Status::kOk ? status : Fail(status, "the backward kernels did not launch");
}

}  // namespace bellwether::kernels::cuda::sm90
