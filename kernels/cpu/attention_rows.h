// attention_rows.h: probabilities and their gradients of some rows of a call, in double.
//
// Keys and values of one sequence and key head are packed into panels of 8 (simd.h); rows of one
// query head go in tiles, as in probe_unit.h.

#ifndef BELLWETHER_KERNELS_CPU_ATTENTION_ROWS_H_
#define BELLWETHER_KERNELS_CPU_ATTENTION_ROWS_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "bellwether/kernels/attention_laws.h"
#include "cpu/element.h"
#include "cpu/probe_mask.h"
#include "cpu/simd.h"
#include "probe_sampling.h"

namespace bellwether::kernels::cpu {

// The numbers that a kernel's products round to: those of the type, of TF32 for float32.
struct LawGrid {
  explicit LawGrid(DType dtype) : bits(dtype == DType::kBFloat16 ? 8 : 11) {
    const int64_t exponent_min = dtype == DType::kFloat16 ? -14 : -126;
    simd = {(exponent_min + 1023) << 52, int64_t{bits - 1} << 52};
  }
  double Ulp(double x) const {
    const int64_t field = std::bit_cast<int64_t>(x) & 0x7ff0000000000000;
    return std::bit_cast<double>(std::max(field, simd.least) - simd.drop);
  }
  double Variance(double x) const { return Ulp(x) * Ulp(x) / 12; }
  double Rounded(double x) const {
    const double magic = Ulp(x) * 0x1.8p52;
    return (x + magic) - magic;
  }

  struct Added {
    double error, variance;
  };
  // What rounding adds to a number inside of a kernel; of one factor of it where that is subnormal.
  Added Inside(double x, double factor) const {
    const bool subnormal = std::fabs(x * factor) < std::bit_cast<double>(simd.least);
    const double by = subnormal ? factor : 1, ulp = Ulp(x * by), magic = ulp * 0x1.8p52;
    return {((x * by + magic) - magic) / by - x, std::min(ulp * ulp / (12 * by * by), x * x)};
  }

  int bits;  // of the significand, with the leading one
  SimdGrid simd;
};

// Some kernels round scale * dS where others round dS.
inline double DsFactor(const ProbeParams& p) {
  const double scale = std::fabs(static_cast<double>(p.scale));
  return scale > 0 ? std::min(scale, 1.0) : 1.0;
}

// How often the scores of attention out of matrix products are rounded behind the product: times the
// scale, where it is no power of two, and over the cap, tanh, times the cap.
inline int ScoreRoundings(const ProbeParams& p) {
  int exponent;
  const bool scaled = std::fabs(std::frexp(static_cast<double>(p.scale), &exponent)) != 0.5;
  return (scaled ? 1 : 0) + (p.softcap > 0 ? 3 : 0);
}

// What roundings of scores in fp32 give each P, as a variance over P^2.  top: the row's largest score.
inline double OfScoresInFp32(const ProbeParams& p, double top) {
  int exponent = 0;
  std::frexp(std::fabs(top) + 1, &exponent);  // Infinite or NaN: P is, too.
  const double ulp = std::ldexp(1.0, exponent - 24);
  const double roundings = kLawScoreRoundings * static_cast<double>(p.head_dim);
  const double variance = std::min(roundings * ulp * ulp / 12, kLawScoreVarianceMax);
  return std::expm1(variance) * std::exp(variance);
}

enum class RowKind {
  kSeeing,
  kBlank,    // sees no key, and its output is 0: no weights
  kLeftOut,  // sees no key, and its output is not finite, or no gradient comes to it: padding
  kUniform,  // sees no key, and comes out as a mean
  kUnknown   // sees no key, and what it comes out as is not known (ScoresOutlastTheMask)
};

// Whether p and dp of such a row are there.
inline bool HasWeights(RowKind kind) { return kind == RowKind::kSeeing || kind == RowKind::kUniform; }

// Whether a mask's tensor hides all of these keys of a row (of the tensor).
inline bool HidesAll(const ProbeParams& p, int64_t batch, int64_t head, int64_t mask_row, KeyRange keys,
                     double* scratch) {
  if (p.mask.data == nullptr) return false;
  ReadMask(p.mask, batch, head, mask_row, keys, scratch);
  return std::all_of(scratch, scratch + (keys.end - keys.begin), [](double bias) { return bias == kHiddenBias; });
}

// Whether a mask that adds the type's least number to all scores of a row leaves them different.  In
// float16 that is -65504, and sums are rounded to multiples of 32: scores from 16 on still count, and
// below -16 they become -inf.  In bfloat16 and float32 the number takes all scores in.
inline bool ScoresOutlastTheMask(const GradedAttention& of) {
  return of.arithmetic == LawArithmetic::kComposed && of.call.dtype == DType::kFloat16;
}

// o_square: of the row's output.
inline RowKind KindOf(bool unseeing, double o_square) {
  if (!unseeing) return RowKind::kSeeing;
  if (o_square == 0) return RowKind::kBlank;
  return std::isfinite(o_square) ? RowKind::kUniform : RowKind::kLeftOut;
}

// How often the last rounding of a result counts.
inline double ResultRoundings(const GradedAttention& of) { return of.arithmetic == LawArithmetic::kComposed ? 4 : 2; }

// How many rows PyTorch's flash attention for CPUs adds to dk and dv at a time.
constexpr int64_t AccumulatedRows(int64_t q_len) { return q_len >= 768 ? 256 : q_len >= 192 ? 64 : 32; }

inline double AccumulatedSteps(int64_t q_len) {
  return std::ceil(static_cast<double>(q_len) / static_cast<double>(AccumulatedRows(q_len)));
}

constexpr int64_t Padded(int64_t size) { return (size + kPanel - 1) / kPanel * kPanel; }

// One row of a tile, behind Run().  Arrays start at the panel of key `first`.
struct AttentionRow {
  int64_t row = 0;
  RowKind kind = RowKind::kBlank;
  int64_t first = 0, panels = 0;  // The keys from `first` on that p and dp hold.
  const double* p = nullptr;      // 0 of a key that is hidden
  const double* dp = nullptr;
  const double* slope = nullptr;  // of the softcap; null = none
  double weight = 0;              // sum p
  double delta = 0;               // sum p dp
  double delta_error = 0;         // dO . o - delta
  double abs_d_o_o = 0;           // sum |dO o|
  double o_variance = 0;          // sum dO^2 u(o)
  double of_score = 0;            // what roundings of the scores give each p, as a variance over p^2
  double of_row = 0;              // the part of it that all p of the row may have alike
};

template <typename Element>
class AttentionRows {
 public:
  static int64_t ScratchSize(const ProbeParams& p) {
    const int64_t keys = Padded(p.k_len);
    const int64_t widest = Padded(std::max(p.head_dim, p.v_dim));
    return keys * (p.head_dim + p.v_dim + 3 * kPanel + 1) + 5 * kPanel * widest;
  }

  // scratch: aligned, ScratchSize() of it.
  AttentionRows(const GradedAttention& of, double* scratch)
      : p_(of.call),
        composed_(of.arithmetic == LawArithmetic::kComposed),
        means_are_known_(!ScoresOutlastTheMask(of)),
        grid_(of.call.dtype),
        simd_(SelectSimdKernels()),
        widen_(simd_.widen[static_cast<int>(of.call.dtype)]),
        stride_(Padded(of.call.k_len)) {
    const int64_t widest = Padded(std::max(p_.head_dim, p_.v_dim));
    keys_ = scratch;
    values_ = keys_ + stride_ * p_.head_dim;
    scores_ = values_ + stride_ * p_.v_dim;
    dp_ = scores_ + stride_ * kPanel;
    slopes_ = dp_ + stride_ * kPanel;
    bias_ = slopes_ + stride_ * kPanel;
    unpacked_ = bias_ + stride_;
    queries_ = unpacked_ + kPanel * widest;
    gradients_ = queries_ + kPanel * widest;
    q_ = gradients_ + kPanel * widest;
    d_o_ = q_ + kPanel * widest;
  }

  int64_t TileRows() const { return simd_.tile_rows; }
  const LawGrid& Grid() const { return grid_; }

  void Pack(int64_t batch, int64_t kv_head) {
    batch_ = batch;
    kv_head_ = kv_head;
    PackPanels(p_.k, p_.head_dim, keys_);
    PackPanels(p_.v, p_.v_dim, values_);
  }

  // Computes `count` <= TileRows() rows of a query head.  rows: of the call; samples: of a mask by
  // sample.
  void Run(int64_t head, const int64_t* rows, const int64_t* samples, int64_t count, AttentionRow* out) {
    const int64_t tile = simd_.tile_rows, widest = Padded(std::max(p_.head_dim, p_.v_dim));
    std::fill(queries_, queries_ + tile * p_.head_dim, 0.0);
    std::fill(gradients_, gradients_ + tile * p_.v_dim, 0.0);
    KeyRange ranges[kPanel];
    int64_t begin = p_.k_len, end = 0;
    for (int64_t r = 0; r < count; ++r) {
      LoadRow(head, rows[r], r, widest, out[r]);
      ranges[r] = AllowedKeys(p_, batch_, rows[r]);
      const int64_t mask_row = p_.mask.by_sample ? samples[r] : rows[r];
      const bool empty = ranges[r].begin == ranges[r].end;
      out[r].kind = KindOf(empty || HidesAll(p_, batch_, head, mask_row, ranges[r], bias_), o_square_);
      if (out[r].kind == RowKind::kUniform) {
        const double* const d_o = Gradient(r);
        const bool counts = std::any_of(d_o, d_o + p_.v_dim, [](double x) { return x != 0; });
        if (!counts) out[r].kind = RowKind::kLeftOut;
        if (counts && !means_are_known_) out[r].kind = RowKind::kUnknown;
      }
      if (empty && out[r].kind == RowKind::kUniform) ranges[r] = {0, p_.k_len};
      if (!HasWeights(out[r].kind)) continue;
      begin = std::min(begin, ranges[r].begin);
      end = std::max(end, ranges[r].end);
    }
    if (begin >= end) return;
    Multiply(begin, end);
    for (int64_t r = 0; r < count; ++r) {
      if (!HasWeights(out[r].kind)) continue;
      Finish(head, r, p_.mask.by_sample ? samples[r] : rows[r], ranges[r], out[r]);
    }
  }

  // q and dO of row r of the tile.
  const double* Query(int64_t r) const { return q_ + r * Padded(std::max(p_.head_dim, p_.v_dim)); }
  const double* Gradient(int64_t r) const { return d_o_ + r * Padded(std::max(p_.head_dim, p_.v_dim)); }

 private:
  void PackPanels(const Tensor4& from, int64_t dim, double* panels) {
    for (int64_t panel = 0; panel * kPanel < stride_; ++panel) {
      const int64_t count = std::min(kPanel, p_.k_len - panel * kPanel);
      for (int64_t lane = 0; lane < count; ++lane) {
        widen_(RowOf<Element>(from, batch_, kv_head_, panel * kPanel + lane), dim, unpacked_ + lane * dim);
      }
      std::fill(unpacked_ + count * dim, unpacked_ + kPanel * dim, 0.0);
      simd_.transpose(unpacked_, dim, panels + panel * kPanel * dim);
    }
  }

  void LoadRow(int64_t head, int64_t row, int64_t r, int64_t widest, AttentionRow& out) {
    const int64_t tile = simd_.tile_rows;
    double* const q = q_ + r * widest;
    double* const d_o = d_o_ + r * widest;
    widen_(RowOf<Element>(p_.q, batch_, head, row), p_.head_dim, q);
    widen_(RowOf<Element>(p_.d_o, batch_, head, row), p_.v_dim, d_o);
    widen_(RowOf<Element>(p_.o, batch_, head, row), p_.v_dim, unpacked_);
    const double scale = composed_ ? 1.0 : static_cast<double>(p_.scale);
    for (int64_t c = 0; c < p_.head_dim; ++c) queries_[c * tile + r] = q[c] * scale;
    out = {};
    out.row = row;
    o_square_ = 0;
    for (int64_t c = 0; c < p_.v_dim; ++c) {
      gradients_[c * tile + r] = d_o[c];
      const double o = unpacked_[c], product = d_o[c] * o;
      o_square_ += o * o;
      out.delta_error += product;
      out.abs_d_o_o += std::fabs(product);
      out.o_variance += d_o[c] * d_o[c] * grid_.Variance(o);
    }
  }

  void Multiply(int64_t begin, int64_t end) {
    const int64_t tile = simd_.tile_rows;
    for (int64_t panel = begin / kPanel; panel < (end + kPanel - 1) / kPanel; ++panel) {
      simd_.tile(queries_, tile, keys_ + panel * kPanel * p_.head_dim, kPanel, p_.head_dim, scores_ + panel * kPanel,
                 stride_);
      simd_.tile(gradients_, tile, values_ + panel * kPanel * p_.v_dim, kPanel, p_.v_dim, dp_ + panel * kPanel,
                 stride_);
    }
  }

  // Overwrites the lanes of [first, first + 8 panels) that lie outside `keys`.
  static void HideEdges(KeyRange keys, int64_t first, int64_t panels, double with, double* values) {
    std::fill(values, values + (keys.begin - first), with);
    std::fill(values + (keys.end - first), values + panels * kPanel, with);
  }

  void Finish(int64_t head, int64_t r, int64_t mask_row, KeyRange keys, AttentionRow& out) {
    out.first = keys.begin / kPanel * kPanel;
    out.panels = (keys.end - out.first + kPanel - 1) / kPanel;
    double* const scores = scores_ + r * stride_ + out.first;
    double* const dp = dp_ + r * stride_ + out.first;
    const int64_t offset = keys.begin - out.first, count = keys.end - keys.begin;
    if (composed_) {
      simd_.round(scores, out.panels, static_cast<double>(p_.scale), grid_.simd);
      simd_.round(dp, out.panels, 1, grid_.simd);
    }
    HideEdges(keys, out.first, out.panels, kMaskedScore, scores);
    HideEdges(keys, out.first, out.panels, 0.0, dp);
    if (p_.softcap > 0) {
      simd_.cap(scores, out.panels, static_cast<double>(p_.softcap));
      double* const slopes = slopes_ + r * stride_ + out.first;
      for (int64_t j = 0; j < out.panels * kPanel; ++j) {
        const double tanh = scores[j] == kMaskedScore ? 0 : scores[j] / static_cast<double>(p_.softcap);
        slopes[j] = 1 - tanh * tanh;
      }
      out.slope = slopes;
    }
    if (out.kind == RowKind::kUniform) {
      std::fill(scores + offset, scores + offset + count, 0.0);
    } else if (p_.mask.data != nullptr) {
      ReadMask(p_.mask, batch_, head, mask_row, keys, bias_);
      for (int64_t j = 0; j < count; ++j) {
        const bool hidden = bias_[j] == kHiddenBias;
        scores[offset + j] = hidden ? kMaskedScore : scores[offset + j] + bias_[j];
        if (hidden) dp[offset + j] = 0;
      }
    }
    double top = simd_.scan(scores, out.panels).first;
    const bool with_sink = p_.sinks != nullptr;
    const double sink = with_sink ? static_cast<double>(p_.sinks[head]) : 0;
    if (with_sink) top = std::max(top, sink);
    // P moves with its score, and those that count are near the largest.
    out.of_row = OfScoresInFp32(p_, top);
    out.of_score = out.of_row;
    if (composed_) out.of_score += ScoreRoundings(p_) * grid_.Variance(std::fabs(top) + 1);
    const double of_keys = simd_.weigh(scores, out.panels, top);
    const double total = of_keys + (with_sink ? std::exp(sink - top) : 0);
    out.delta = simd_.normalise(scores, dp, out.panels, 1 / total);
    out.weight = of_keys / total;
    out.delta_error -= out.delta;
    out.p = scores;
    out.dp = dp;
  }

  const ProbeParams& p_;
  const bool composed_, means_are_known_;
  const LawGrid grid_;
  const SimdKernels& simd_;
  void (*const widen_)(const void*, int64_t, double*);
  const int64_t stride_;
  int64_t batch_ = 0, kv_head_ = 0;
  double o_square_ = 0;             // of the row that LoadRow() has read
  double *keys_, *values_;          // [panel][channel][8]
  double *scores_, *dp_, *slopes_;  // [tile row][k_len padded]
  double* bias_;                    // [k_len padded] of one row
  double* unpacked_;                // [8][channel]
  double *queries_, *gradients_;    // [channel][tile row]
  double *q_, *d_o_;                // [tile row][channel padded]
};

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_ATTENTION_ROWS_H_
