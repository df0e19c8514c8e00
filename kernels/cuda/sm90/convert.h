// convert.h: the public parameters of attention as the kernels take them.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_CONVERT_H_
#define BELLWETHER_KERNELS_CUDA_SM90_CONVERT_H_

#include <algorithm>

#include "bellwether/kernels/attention.h"
#include "cuda/attention_params.h"
#include "cuda/sm90/tensor_map.h"

namespace bellwether::kernels::cuda::sm90 {

inline bool IsPacked(const AttentionForwardParams& a) { return a.cu_seqlens_q != nullptr; }

inline Strides ToStrides(const AttentionForwardParams& a, const Tensor4& t) {
  return {IsPacked(a) ? 0 : t.batch_stride, t.head_stride, t.token_stride};
}

inline TensorMapShape QueryShape(const AttentionForwardParams& a) {
  return {a.head_dim, a.q_len, a.heads, a.batch, IsPacked(a)};
}

inline TensorMapShape KeyShape(const AttentionForwardParams& a) {
  return {a.head_dim, a.k_len, a.kv_heads, a.batch, IsPacked(a)};
}

// Numbers of tiles of `unit` tokens of all sequences, as sequences.cuh numbers them.
inline int64_t CountTiles(const AttentionForwardParams& a, int64_t tokens, int64_t unit) {
  return IsPacked(a) ? tokens / unit + a.sequences : a.batch * ((tokens + unit - 1) / unit);
}

inline SequenceParams ToSequenceParams(const AttentionForwardParams& a) {
  SequenceParams p = {};
  p.q_starts = a.cu_seqlens_q;
  p.k_starts = a.cu_seqlens_k;
  p.batch = static_cast<int>(IsPacked(a) ? a.sequences : a.batch);
  p.heads = static_cast<int>(a.heads);
  p.kv_heads = static_cast<int>(a.kv_heads);
  p.group = static_cast<int>(a.heads / a.kv_heads);
  p.q_len = static_cast<int>(a.q_len);
  p.k_len = static_cast<int>(a.k_len);
  p.head_dim = static_cast<int>(a.head_dim);
  p.window = std::min(a.window, 1 << 30);  // row + k_len - window stays an int
  p.causal = a.causal;
  return p;
}

inline ScoreParams ToScoreParams(const AttentionForwardParams& a) {
  if (a.softcap == 0) return {a.scale * kLog2E, 0.f, a.scale};
  return {a.softcap * kLog2E, a.scale / a.softcap, a.softcap};
}

inline PaperShift ToPaperShift(const AttentionForwardParams& a) {
  const double max = a.dtype == DType::kBFloat16 ? kPaperShiftMaxBFloat16 : kPaperShiftMaxFloat16;
  return {a.paper_beta, a.paper_eps * kLog2E, static_cast<float>(kPaperShiftMin), static_cast<float>(max)};
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_CONVERT_H_
