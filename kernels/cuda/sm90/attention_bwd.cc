// Host side of the Hopper backward: tensor maps, workspace, tile order.

#include <cuda_runtime.h>

#include "cuda/sm90/attention.h"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/convert.h"
#include "cuda/sm90/tensor_map.h"
#include "error.h"

namespace bellwether::kernels::cuda::sm90 {
namespace {

// Q, dO and the dQ sums of the heads that run together stay in L2.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

int64_t PaddedDim(const AttentionForwardParams& a) { return a.head_dim <= 64 ? 64 : 128; }

// Sizes of the workspace's arrays, in elements of 4 bytes; each a multiple of 16 bytes.
struct WorkspaceLayout {
  int64_t rows_per_head, rows;  // padded; of one head (and sequence), of all
  int64_t chunks;               // of keys, of one kv head
  int64_t turns, key_sums, key_mean;

  explicit WorkspaceLayout(const AttentionForwardParams& a) {
    const int64_t sequences = IsPacked(a) ? a.sequences : a.batch;
    rows_per_head = IsPacked(a) ? CountTiles(a, a.q_len, kBwdRowPadding) * kBwdRowPadding
                                : (a.q_len + kBwdRowPadding - 1) / kBwdRowPadding * kBwdRowPadding;
    rows = rows_per_head * a.heads * (IsPacked(a) ? 1 : a.batch);
    chunks = CountTiles(a, a.k_len, kMeanKeys);
    turns = rows / 64 * 8;  // steps have 64 or 128 rows
    key_sums = a.kv_heads * chunks * PaddedDim(a);
    key_mean = a.kv_heads * sequences * PaddedDim(a);
  }
};

BwdParams ToBwdParams(const AttentionBackwardParams& b) {
  const AttentionForwardParams& a = b.forward;
  BwdParams p = {};
  p.seq = ToSequenceParams(a);
  p.score = ToScoreParams(a);
  p.o = a.o.data;
  p.o_lo = a.o_lo.data;
  p.d_o = b.d_o.data;
  p.lse = a.lse;
  p.anchor = a.anchor;
  p.rounded_sum = a.rounded_sum;
  p.k = a.k.data;
  p.dq = const_cast<void*>(b.dq.data);
  p.dk = const_cast<void*>(b.dk.data);
  p.dv = const_cast<void*>(b.dv.data);
  p.k_stride = ToStrides(a, a.k);
  p.o_stride = ToStrides(a, a.o);
  p.o_lo_stride = ToStrides(a, a.o_lo);
  p.d_o_stride = ToStrides(a, b.d_o);
  p.dq_stride = ToStrides(a, b.dq);
  p.dk_stride = ToStrides(a, b.dk);
  p.dv_stride = ToStrides(a, b.dv);
  p.lse_batch_stride = IsPacked(a) ? 0 : a.lse_batch_stride;
  p.lse_head_stride = a.lse_head_stride;
  p.stats = a.stats;
  p.stat_stride = a.stat_stride;
  p.scale = a.scale;
  p.rounded = a.mode == AttentionMode::kHpm;
  p.center = b.center;
  return p;
}

void PlaceWorkspace(const AttentionBackwardParams& b, const WorkspaceLayout& layout, BwdParams* p) {
  auto* at = static_cast<float*>(b.workspace);
  const auto take = [&](int64_t count) {
    float* const begin = at;
    at += count;
    return begin;
  };
  p->dq_sum = take(layout.rows * PaddedDim(b.forward));
  p->lse_log2 = take(layout.rows);
  p->delta = take(layout.rows);
  p->inverse = take(layout.rows);
  float* const ds_sum = take(layout.rows);
  int* const turns = reinterpret_cast<int*>(take(layout.turns));
  p->key_sums = take(layout.key_sums);
  p->key_mean = take(layout.key_mean);
  p->ds_sum = b.center || b.forward.stats != nullptr ? ds_sum : nullptr;
  p->turns = b.deterministic ? turns : nullptr;
  p->rows_per_head = layout.rows_per_head;
  p->rows_per_sequence = IsPacked(b.forward) ? 0 : layout.rows_per_head * b.forward.heads;
  p->chunks = static_cast<int>(layout.chunks);
}

}  // namespace

size_t BackwardWorkspaceBytes(const AttentionForwardParams& a) {
  const WorkspaceLayout layout(a);
  return static_cast<size_t>(layout.rows * (PaddedDim(a) + 4) + layout.turns + layout.key_sums + layout.key_mean) *
         sizeof(float);
}

Status AttentionBackward(const AttentionBackwardParams& b, void* stream) {
  const AttentionForwardParams& a = b.forward;
  int multiprocessors = 0;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(GetMultiprocessors(&multiprocessors));
  const BwdLauncher launcher = FindBwdLauncher(b);
  if (launcher.launch == nullptr) {
    return Fail(Status::kUnsupported, "head_dim is %lld, but only up to 128 is built",
                static_cast<long long>(a.head_dim));
  }
  const int64_t key_tiles = CountTiles(a, a.k_len, kBwdKeys);
  // The grid's y and z and the kernel's tile arithmetic.
  if (a.q_len + a.k_len > (1 << 28) || a.batch > 65535 || a.heads > 65535 || a.sequences > (1 << 20) ||
      a.kv_heads * key_tiles > (1 << 30)) {
    return Fail(Status::kUnsupported, "batch, heads, a length or their product is too large");
  }

  BwdMaps maps;
  const TensorMapShape q = QueryShape(a), kv = KeyShape(a);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("q", a.q, q, a.dtype, launcher.rows, &maps.q));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("d_o", b.d_o, q, a.dtype, launcher.rows, &maps.d_o));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("k", a.k, kv, a.dtype, kBwdKeys, &maps.k));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(EncodeTensorMap("v", a.v, kv, a.dtype, kBwdKeys, &maps.v));

  BwdParams p = ToBwdParams(b);
  PlaceWorkspace(b, WorkspaceLayout(a), &p);
  p.key_tiles = static_cast<int>(key_tiles);
  p.section_queries = static_cast<int>(kSectionBytes / (8 * a.head_dim));
  const Status status = launcher.launch(p, maps, static_cast<cudaStream_t>(stream));
  return status == Status::kOk ? status : Fail(status, "the backward kernels did not launch");
}

}  // namespace bellwether::kernels::cuda::sm90
