// attention_sequence.h: which rows and keys belong together, and how they are
// laid out for the inner loops of simd.h.

#ifndef BELLWETHER_KERNELS_CPU_ATTENTION_SEQUENCE_H_
#define BELLWETHER_KERNELS_CPU_ATTENTION_SEQUENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "bellwether/kernels/attention.h"
#include "cpu/element.h"
#include "cpu/simd.h"
#include "error.h"

namespace bellwether::kernels::cpu {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr double kLn2 = 0.6931471805599453;

inline int64_t RoundUp(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

// One sequence: a batch entry, or a part of the only one.  Of its keys those from
// `seen_begin` to `seen_end` - 1 exist for a row; the others are padding.
struct AttentionSequence {
  int64_t batch, q_begin, q_len, k_begin, k_len, seen_begin, seen_end;
};

inline int64_t SequenceCount(const AttentionForwardParams& p) {
  return p.cu_seqlens_q != nullptr && p.batch != 0 ? p.sequences : p.batch;
}

inline AttentionSequence SequenceAt(const AttentionForwardParams& p, int64_t i) {
  if (p.cu_seqlens_q != nullptr) {
    const int32_t *q = p.cu_seqlens_q + i, *k = p.cu_seqlens_k + i;
    return {0, q[0], q[1] - q[0], k[0], k[1] - k[0], 0, k[1] - k[0]};
  }
  if (p.key_bounds == nullptr) return {i, 0, p.q_len, 0, p.k_len, 0, p.k_len};
  const int64_t end = std::clamp<int64_t>(p.key_bounds[2 * i + 1], 0, p.k_len);
  return {i, 0, p.q_len, 0, p.k_len, std::clamp<int64_t>(p.key_bounds[2 * i], 0, end), end};
}

inline Status CheckAttentionSequences(const AttentionForwardParams& p) {
  if (p.cu_seqlens_q == nullptr) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckCuSeqlens("cu_seqlens_q", p.cu_seqlens_q, p.sequences, p.q_len));
  return CheckCuSeqlens("cu_seqlens_k", p.cu_seqlens_k, p.sequences, p.k_len);
}

// Keys of the longest sequence.
inline int64_t LongestKeys(const AttentionForwardParams& p) {
  int64_t longest = 0;
  for (int64_t i = 0; i < SequenceCount(p); ++i) {
    longest = std::max(longest, SequenceAt(p, i).k_len);
  }
  return longest;
}

// q.k to S, in place.
inline void ToScores(const AttentionForwardParams& p, double* dots, int64_t count) {
  const auto scale = static_cast<double>(p.scale), cap = static_cast<double>(p.softcap);
  for (int64_t j = 0; j < count; ++j) dots[j] *= scale;
  for (int64_t j = 0; cap > 0 && j < count; ++j) dots[j] = cap * std::tanh(dots[j] / cap);
}

// Keys [first, end) that a row may see; empty if first >= end.
struct AllowedKeys {
  int64_t first, end;
};

inline AllowedKeys AllowedKeysOf(const AttentionForwardParams& p, const AttentionSequence& s, int64_t row) {
  const int64_t diagonal = row + s.k_len - s.q_len;
  return {p.window > 0 ? std::max(s.seen_begin, diagonal - p.window + 1) : s.seen_begin,
          p.causal ? std::min(s.seen_end, diagonal + 1) : s.seen_end};
}

// `count` rows of one head as doubles, 0 where a row ends.
template <typename Element>
class RowPacker {
 public:
  RowPacker(const SimdKernels& simd, DType dtype, int64_t dim)
      : simd_(simd), widen_(simd.widen[static_cast<int>(dtype)]), dim_(dim), width_(RoundUp(dim)) {}

  // out[row][RoundUp(dim)]; rows count..padded-1 are 0.
  void Rows(const Tensor4& t, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t padded,
            double* out) const {
    for (int64_t i = 0; i < count; ++i) {
      widen_(RowOf<Element>(t, batch, head, first + i), dim_, out + i * width_);
      std::fill(out + i * width_ + dim_, out + (i + 1) * width_, 0.0);
    }
    std::fill(out + count * width_, out + padded * width_, 0.0);
  }

  // The keys or values of a sequence; rows of padding are 0, whatever they hold.
  void Keys(const Tensor4& t, const AttentionSequence& s, int64_t head, int64_t padded, double* out) const {
    std::fill(out, out + s.seen_begin * width_, 0.0);
    Rows(t, s.batch, head, s.k_begin + s.seen_begin, s.seen_end - s.seen_begin, padded - s.seen_begin,
         out + s.seen_begin * width_);
  }

  // From Rows() of a multiple of kPanel rows: out[panel][dim][kPanel].
  void Panels(const double* rows, int64_t count, double* out) const {
    for (int64_t first = 0; first < count; first += kPanel) {
      simd_.transpose(rows + first * width_, width_, out + first * width_);
    }
  }

  int64_t width() const { return width_; }

 private:
  const SimdKernels& simd_;
  void (*const widen_)(const void*, int64_t, double*);
  const int64_t dim_, width_;
};

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_ATTENTION_SEQUENCE_H_
