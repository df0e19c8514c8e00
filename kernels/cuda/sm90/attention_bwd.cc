// Host side of the Hopper backward: tensor maps, workspace, tile order.

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/sm90/attention.h"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/tensor_map.h"
#include "error.h"

namespace bellwether::kernels::cuda::sm90 {
namespace {

constexpr int64_t kKeysPerTile = 128;
// Q, dO and the dQ sums of the heads that run together stay in L2; but no fewer
// than kSectionPairsMin of them, or the last long tiles run alone.
constexpr int64_t kSectionBytes = int64_t{32} << 20;
constexpr int64_t kSectionPairsMin = 4;

FwdStrides ToStrides(const Tensor4& t) { return {t.batch_stride, t.head_stride, t.token_stride}; }

int64_t PaddedRows(const AttentionForwardParams& p) {
  return (p.q_len + kBwdRowPadding - 1) / kBwdRowPadding * kBwdRowPadding;
}

}  // namespace

size_t BackwardWorkspaceBytes(const AttentionForwardParams& p) {
  return static_cast<size_t>(p.batch * p.heads * PaddedRows(p) * (p.head_dim + 2)) * sizeof(float);
}

Status AttentionBackward(const AttentionBackwardParams& b, void* stream) {
  const AttentionForwardParams& a = b.forward;
  int multiprocessors = 0;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(GetMultiprocessors(&multiprocessors));
  const BwdLauncher launcher = FindBwdLauncher(a);
  if (launcher.launch == nullptr) {
    return Fail(Status::kUnsupported, "head_dim is %lld, but only 64 and 128 are built",
                static_cast<long long>(a.head_dim));
  }
  const int64_t kv_tiles = (a.k_len + kKeysPerTile - 1) / kKeysPerTile;
  const int64_t pairs = a.batch * a.kv_heads, padded = PaddedRows(a);
  const int64_t group = a.heads / a.kv_heads;
  // The grid's y and z and the kernel's tile arithmetic.
  if (a.q_len + a.k_len > (1 << 27) || a.batch > 65535 || a.heads > 65535 || pairs * kv_tiles > (1 << 30)) {
    return Fail(Status::kUnsupported, "batch, heads, a length or their product is too large");
  }

  BwdMaps maps;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap(
      "q", a.q, {a.head_dim, a.q_len, a.heads, a.batch}, a.dtype, launcher.rows, &maps.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap(
      "d_o", b.d_o, {a.head_dim, a.q_len, a.heads, a.batch}, a.dtype, launcher.rows, &maps.d_o));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap(
      "k", a.k, {a.head_dim, a.k_len, a.kv_heads, a.batch}, a.dtype, kKeysPerTile, &maps.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap(
      "v", a.v, {a.head_dim, a.k_len, a.kv_heads, a.batch}, a.dtype, kKeysPerTile, &maps.v));

  constexpr float kLog2E = 1.44269504088896341f;
  const int64_t head_bytes = 8 * a.q_len * a.head_dim * group;
  BwdParams p = {};
  p.o = a.o.data;
  p.o_lo = a.o_lo.data;
  p.d_o = b.d_o.data;
  p.lse = a.lse;
  p.dq = const_cast<void*>(b.dq.data);
  p.dk = const_cast<void*>(b.dk.data);
  p.dv = const_cast<void*>(b.dv.data);
  p.o_stride = ToStrides(a.o);
  p.o_lo_stride = ToStrides(a.o_lo);
  p.d_o_stride = ToStrides(b.d_o);
  p.dq_stride = ToStrides(b.dq);
  p.dk_stride = ToStrides(b.dk);
  p.dv_stride = ToStrides(b.dv);
  p.lse_batch_stride = a.lse_batch_stride;
  p.lse_head_stride = a.lse_head_stride;
  p.dq_sum = static_cast<float*>(b.workspace);
  p.lse_log2 = p.dq_sum + a.batch * a.heads * padded * a.head_dim;
  p.delta = p.lse_log2 + a.batch * a.heads * padded;
  p.batch = static_cast<int>(a.batch);
  p.heads = static_cast<int>(a.heads);
  p.kv_heads = static_cast<int>(a.kv_heads);
  p.group = static_cast<int>(group);
  p.q_len = static_cast<int>(a.q_len);
  p.k_len = static_cast<int>(a.k_len);
  p.q_padded = static_cast<int>(padded);
  p.kv_tiles = static_cast<int>(kv_tiles);
  p.section = static_cast<int>(
      std::min<int64_t>(pairs, std::max(kSectionPairsMin, kSectionBytes / head_bytes)));
  p.scale = a.scale;
  p.scale_log2 = a.scale * kLog2E;
  p.causal = a.causal;
  const Status status = launcher.launch(p, maps, static_cast<cudaStream_t>(stream));
  return status == Status::kOk ? status : Fail(status, "the backward kernels did not launch");
}

}  // namespace bellwether::kernels::cuda::sm90
