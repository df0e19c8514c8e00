// attention_convert.h: the public parameters of attention as the kernels take them.

#ifndef BELLWETHER_KERNELS_CUDA_ATTENTION_CONVERT_H_
#define BELLWETHER_KERNELS_CUDA_ATTENTION_CONVERT_H_

#include <algorithm>

#include "bellwether/kernels/attention.h"
#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda {

// Whether the call needs masked kernels of the portable path.
inline bool IsMasked(const AttentionForwardParams& a) {
  return a.mask.data != nullptr || a.key_bounds != nullptr || a.sinks != nullptr;
}

// What decides the kernel.
inline int64_t WidestDim(const AttentionForwardParams& a) { return std::max(a.head_dim, ValueDim(a)); }

inline bool IsPacked(const AttentionForwardParams& a) { return a.cu_seqlens_q != nullptr; }

// Whether V is so much narrower than K that the backward has a kernel for it.
inline bool HasNarrowValues(const AttentionForwardParams& a) {
  return a.head_dim > 128 && a.head_dim <= 192 && ValueDim(a) <= 128;
}

// Whether the backward needs more than a plain or causal batch does.
inline bool IsGeneral(const AttentionBackwardParams& b) {
  const AttentionForwardParams& a = b.forward;
  return IsPacked(a) || a.key_bounds != nullptr || a.window > 0 || a.softcap > 0 || b.deterministic;
}

inline Strides ToStrides(const AttentionForwardParams& a, const Tensor4& t) {
  return {IsPacked(a) ? 0 : t.batch_stride, t.head_stride, t.token_stride};
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
  p.v_dim = static_cast<int>(ValueDim(a));
  p.window = std::min(a.window, 1 << 30);  // row + k_len - window stays an int
  p.causal = a.causal;
  p.key_bounds = a.key_bounds;
  return p;
}

inline ScoreParams ToScoreParams(const AttentionForwardParams& a) {
  const float scale = a.softcap == 0 ? a.scale : a.softcap;
  const float scale_log2 = scale * kLog2E;
  return {scale_log2, a.softcap == 0 ? 0.f : a.scale / a.softcap, scale, kTieWindow / scale_log2};
}

inline MaskParams ToMaskParams(const AttentionForwardParams& a) {
  const ProbeMask& mask = a.mask;
  const int64_t size = mask.dtype == MaskDType::kBool ? 1 : mask.dtype == MaskDType::kFloat32 ? 4 : 2;
  const auto even = [](int64_t n) { return n % 2 == 0; };
  const bool paired = mask.key_stride == 1 && reinterpret_cast<uintptr_t>(mask.data) % (2 * size) == 0 &&
                      even(a.k_len) && even(mask.row_stride) && even(mask.head_stride) && even(mask.batch_stride);
  return {mask, paired, 1 / (a.softcap == 0 ? a.scale : a.softcap), a.sinks};
}

inline PaperShift ToPaperShift(const AttentionForwardParams& a) {
  const double max = a.dtype == DType::kBFloat16 ? kPaperShiftMaxBFloat16 : kPaperShiftMaxFloat16;
  return {a.paper_beta, a.paper_eps * kLog2E, static_cast<float>(kPaperShiftMin), static_cast<float>(max)};
}

inline StatsParams ToStatsParams(const AttentionForwardParams& a) {
  const StatsRows rows = StatsRowsOf(a);
  const auto every = static_cast<uint32_t>(rows.every);
  const uint64_t inverse = ((uint64_t{1} << 32) + every - 1) / every;
  return {a.stats,
          a.stat_stride,
          every,
          static_cast<uint32_t>(rows.stride),
          static_cast<uint32_t>(rows.phase),
          static_cast<uint32_t>(inverse)};
}

// All but what a path adds itself.
inline AttentionFwdParams ToFwdParams(const AttentionForwardParams& a) {
  AttentionFwdParams p = {};
  p.seq = ToSequenceParams(a);
  p.score = ToScoreParams(a);
  p.paper = ToPaperShift(a);
  p.o = const_cast<void*>(a.o.data);
  p.o_lo = const_cast<void*>(a.o_lo.data);
  p.lse = a.lse;
  p.anchor = a.anchor;
  p.rounded_sum = a.rounded_sum;
  p.o_stride = ToStrides(a, a.o);
  p.o_lo_stride = ToStrides(a, a.o_lo);
  p.lse_batch_stride = IsPacked(a) ? 0 : a.lse_batch_stride;
  p.lse_head_stride = a.lse_head_stride;
  p.stats = ToStatsParams(a);
  p.seed = a.seed;
  p.mask = ToMaskParams(a);
  return p;
}

// All but the workspace and what a path adds itself.
inline AttentionBwdParams ToBwdParams(const AttentionBackwardParams& b) {
  const AttentionForwardParams& a = b.forward;
  AttentionBwdParams p = {};
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
  p.stats = ToStatsParams(a);
  p.scale = a.scale;
  p.rounded = a.mode == AttentionMode::kHpm;
  p.center = b.center;
  p.shares = 1;
  p.mask = ToMaskParams(a);
  p.d_sinks = b.d_sinks;
  return p;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_ATTENTION_CONVERT_H_
