// Host side of the portable path: operands, workspace, tile order.

#include "cuda/sm80/attention.h"

#include <cuda_runtime.h>

#include "cuda/attention_convert.h"
#include "cuda/attention_workspace.h"
#include "cuda/sm80/attention_bwd_launch.h"
#include "cuda/sm80/attention_fwd_launch.h"
#include "error.h"

namespace bellwether::kernels::cuda::sm80 {
namespace {

// What the heads that run together read again should stay in L2: K and V, or Q, dO
// and the dQ sums.  GPUs of this path have 4 to 50 MB and more.
constexpr int64_t kSectionBytes = int64_t{16} << 20;

}  // namespace

Status AttentionForward(const AttentionForwardParams& a, int shared_bytes_sm, void* stream) {
  const FwdLauncher launcher = FindFwdLauncher(a, shared_bytes_sm);
  const int64_t tiles = a.heads * CountTiles(a, a.q_len, launcher.rows);
  // The kernel's tile arithmetic is 32-bit.
  constexpr int64_t kMax = 1 << 30;
  if (a.q_len + a.k_len >= kMax || tiles > kMax) {
    return Fail(Status::kUnsupported, "q_len + k_len or the number of tiles is above 2^30");
  }
  FwdParams p = {ToFwdParams(a)};
  p.section_keys = static_cast<int>(kSectionBytes / (4 * a.head_dim));
  p.q = a.q.data;
  p.k = a.k.data;
  p.v = a.v.data;
  p.q_stride = ToStrides(a, a.q);
  p.k_stride = ToStrides(a, a.k);
  p.v_stride = ToStrides(a, a.v);
  const Status status = launcher.launch(p, static_cast<int>(tiles), static_cast<cudaStream_t>(stream));
  return status == Status::kOk ? status : Fail(status, "the attention kernel did not launch");
}

Status AttentionBackward(const AttentionBackwardParams& b, int shared_bytes_max, void* stream) {
  const AttentionForwardParams& a = b.forward;
  const BwdLauncher launcher = FindBwdLauncher(b, shared_bytes_max);
  const int64_t key_tiles = CountTiles(a, a.k_len, launcher.cols);
  // The grid's y and z and the kernel's tile arithmetic.
  if (a.q_len + a.k_len > (1 << 28) || a.batch > 65535 || a.heads > 65535 || a.sequences > (1 << 20) ||
      a.kv_heads * key_tiles > (1 << 29)) {
    return Fail(Status::kUnsupported, "batch, heads, a length or their product is too large");
  }
  BwdParams p = {ToBwdParams(b)};
  PlaceWorkspace(b, &p);
  p.key_tiles = static_cast<int>(key_tiles);
  p.section_queries = static_cast<int>(kSectionBytes / (8 * a.head_dim));
  p.q = a.q.data;
  p.v = a.v.data;
  p.q_stride = ToStrides(a, a.q);
  p.v_stride = ToStrides(a, a.v);
  const Status status = launcher.launch(p, static_cast<cudaStream_t>(stream));
  return status == Status::kOk ? status : Fail(status, "the backward kernels did not launch");
}

}  // namespace bellwether::kernels::cuda::sm80
