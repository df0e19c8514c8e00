// probe_unit.h: the work of the fast probe on one sequence and key head.
//
// Keys and values are packed once into panels of 8 doubles (simd.h); query rows
// then go in tiles.  A tile computes S and, with d_o, dP for the keys that any
// of its rows may see, and each row is reduced in two passes.  A mask's tensor
// replaces the scores that it hides in between.  The spread wants all keys of V: from
// the scores themselves where rows see most of them, else from the covariance of
// the keys.  Keys outside V are packed as zeros.

#ifndef BELLWETHER_KERNELS_CPU_PROBE_UNIT_H_
#define BELLWETHER_KERNELS_CPU_PROBE_UNIT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/element.h"
#include "cpu/gram.h"
#include "cpu/probe_mask.h"
#include "cpu/probe_rows.h"
#include "cpu/simd.h"

namespace bellwether::kernels::cpu {

// Rows of one unit: enough to pay for the packing, few enough to balance.
inline constexpr int64_t kUnitRows = 256;

// What is the same for all units of a call.
struct ProbePlan {
  explicit ProbePlan(const ProbeParams& params)
      : p(params),
        with_delta(params.d_o.data != nullptr),
        group(params.heads / params.kv_heads),
        rows(SampledRows(params)),
        chunks((group * rows + kUnitRows - 1) / kUnitRows),
        units(params.batch * params.kv_heads * chunks),
        panels((params.k_len + kPanel - 1) / kPanel),
        v_dim(with_delta ? params.v_dim : 0),
        padded_dim(PaddedRows(params.head_dim)),
        plain_v(VisibleKeys(params)),
        narrow_v(HasNarrowV(params)),
        v_by_head(params.visible.data != nullptr && params.visible.head_stride != 0 && group > 1) {
    // Multiply-adds of a unit: scores of keys that a row does not see, or K^T K and Q Cov.
    const int64_t unit_rows = std::min(kUnitRows, group * rows);
    by_covariance =
        !v_by_head && unit_rows * HiddenKeys() > params.k_len * params.head_dim / 2 + unit_rows * params.head_dim;
  }

  // Of a row, about.
  int64_t HiddenKeys() const {
    if (p.ranges.data != nullptr) {
      constexpr int64_t kTried = 64;  // rows
      const int64_t tried = std::min(kTried, p.q_len);
      int64_t hidden = 0;
      for (int64_t i = 0; i < tried; ++i) {
        const KeyRange keys = AllowedKeys(p, 0, i * p.q_len / tried);
        hidden += p.k_len - (keys.end - keys.begin);
      }
      return hidden / tried;
    }
    const int64_t causal = p.causal ? std::min(p.q_len, p.k_len) / 2 : 0;
    return p.window > 0 ? std::max(causal, p.k_len - p.window) : causal;
  }

  // Doubles that one worker needs, in this order; a multiple of a cache line.
  int64_t ScratchSize() const {
    const int64_t widest = std::max(p.head_dim, v_dim);
    return panels * kPanel * (p.head_dim + v_dim + 2 * kPanel) + kPanel * widest * 3 + 2 * padded_dim +
           (by_covariance ? padded_dim * (padded_dim + kGramColumns + kPanel) : 0) +
           (narrow_v || p.mask.data != nullptr ? panels * kPanel : 0);
  }

  const ProbeParams& p;
  const bool with_delta;
  const int64_t group, rows, chunks, units, panels, v_dim, padded_dim;
  const KeyRange plain_v;  // V without `visible`
  const bool narrow_v;     // V is not simply all keys,
  const bool v_by_head;    // and not the same for the group's heads
  bool by_covariance = false;
};

template <typename Element>
class ProbeUnit {
 public:
  ProbeUnit(const ProbePlan& plan, double* scratch)
      : plan_(plan),
        p_(plan.p),
        simd_(SelectSimdKernels()),
        widen_(simd_.widen[static_cast<int>(plan.p.dtype)]),
        score_stride_(plan.panels * kPanel) {
    const int64_t widest = std::max(p_.head_dim, plan.v_dim);
    keys_ = scratch;
    values_ = keys_ + score_stride_ * p_.head_dim;
    scores_ = values_ + score_stride_ * plan.v_dim;
    dp_ = scores_ + score_stride_ * kPanel;
    unpacked_ = dp_ + score_stride_ * kPanel;
    queries_ = unpacked_ + kPanel * widest;
    gradients_ = queries_ + kPanel * widest;
    mean_ = gradients_ + kPanel * widest;
    covariance_ = mean_ + 2 * plan.padded_dim;
    chunk_ = covariance_ + plan.padded_dim * plan.padded_dim;
    turned_ = chunk_ + kGramColumns * plan.padded_dim;
    row_ = plan.by_covariance ? turned_ + kPanel * plan.padded_dim : covariance_;
  }

  // Rows [first, last) of the group's heads laid end to end; sums [group][stat].
  KeySums Run(int64_t batch, int64_t kv_head, int64_t first, int64_t last, double* sums) {
    batch_ = batch;
    kv_head_ = kv_head;
    for (int64_t h = 0; h < plan_.group; ++h) ClearSums(sums + h * kProbeStatCount);
    const KeySums keys = PackKeys();
    if (plan_.with_delta) {
      PackPanels(
          p_.v, plan_.v_dim, values_, [](int64_t) { return true; }, [](int64_t, int64_t) {});
    }
    if (plan_.by_covariance && keys_finite_) ComputeCovariance();
    for (int64_t i = first; i < last; i += simd_.tile_rows) {
      RunTile(i, std::min(i + simd_.tile_rows, last), sums);
    }
    return keys;
  }

 private:
  struct TileRow {
    int64_t head, row;
    int64_t sample;  // which of the head's sampled rows it is
    KeyRange keys;
  };

  int64_t QueryHead(const TileRow& row) const { return kv_head_ * plan_.group + row.head; }

  bool InV(int64_t query_head, int64_t key) const { return IsVisible(p_, plan_.plain_v, batch_, query_head, key); }

  // Converts rows of [k_len][dim], or zeros where not wanted(row), and lays them out in
  // panels; after each panel calls visit(panel, rows in it) while unpacked_ holds them as
  // [row][dim].
  template <typename Wanted, typename Visit>
  void PackPanels(const Tensor4& from, int64_t dim, double* panels, const Wanted& wanted, const Visit& visit) {
    for (int64_t panel = 0; panel < plan_.panels; ++panel) {
      const int64_t count = std::min(kPanel, p_.k_len - panel * kPanel);
      for (int64_t lane = 0; lane < count; ++lane) {
        const int64_t row = panel * kPanel + lane;
        double* const to = unpacked_ + lane * dim;
        if (wanted(row)) {
          widen_(RowOf<Element>(from, batch_, kv_head_, row), dim, to);
        } else {
          std::fill(to, to + dim, 0.0);
        }
      }
      std::fill(unpacked_ + count * dim, unpacked_ + kPanel * dim, 0.0);
      simd_.transpose(unpacked_, dim, panels + panel * kPanel * dim);
      visit(panel, count);
    }
  }

  KeySums PackKeys() {
    const int64_t dim = p_.head_dim;
    std::fill(mean_, mean_ + dim, 0.0);
    double norms = 0;
    v_size_ = 0;
    const auto wanted = [&](int64_t key) {
      const bool in_v = !plan_.narrow_v || IsVisibleToGroup(p_, plan_.plain_v, batch_, kv_head_, key);
      v_size_ += in_v;
      return in_v;
    };
    PackPanels(p_.k, dim, keys_, wanted, [&](int64_t panel, int64_t count) {
      for (int64_t lane = 0; lane < count; ++lane) simd_.add(unpacked_ + lane * dim, dim, mean_);
      double squares[kPanel];
      simd_.square_lanes(keys_ + panel * kPanel * dim, dim, squares);
      for (double square : squares) norms += std::sqrt(square);
    });
    keys_finite_ = std::isfinite(norms);
    if (v_size_ == 0) return {};
    const double n = static_cast<double>(v_size_);
    double squares = 0;
    for (int64_t c = 0; c < dim; ++c) {
      mean_[c] /= n;
      squares += mean_[c] * mean_[c];
    }
    const double coherence =
        keys_finite_ ? KeyCoherence(norms / n, std::sqrt(squares)) : std::numeric_limits<double>::quiet_NaN();
    return {1, coherence};
  }

  // covariance_ [padded_dim][padded_dim] = |V| Cov(K).
  void ComputeCovariance() {
    const int64_t padded = plan_.padded_dim;
    ComputeGram(p_.head_dim, p_.k_len, chunk_, covariance_, [&](int64_t c, int64_t j, int64_t count, double* out) {
      for (int64_t t = 0; t < count; ++t) {
        const int64_t key = j + t;
        const double* panel = keys_ + key / kPanel * kPanel * p_.head_dim;
        const bool in_v = !plan_.narrow_v || InV(kv_head_ * plan_.group, key);
        out[t * padded] = in_v ? panel[c * kPanel + key % kPanel] - mean_[c] : 0;
      }
    });
  }

  void RunTile(int64_t first, int64_t last, double* sums) {
    TileRow rows[kPanel];
    int64_t begin = p_.k_len, end = 0;
    const int64_t tile = simd_.tile_rows;
    std::fill(queries_, queries_ + tile * p_.head_dim, 0.0);
    std::fill(gradients_, gradients_ + tile * plan_.v_dim, 0.0);
    for (int64_t i = first; i < last; ++i) {
      const int64_t r = i - first;
      const int64_t head = i / plan_.rows;
      const int64_t query_head = kv_head_ * plan_.group + head;
      const int64_t row = RowAt(p_, p_.seed, batch_, query_head, i % plan_.rows);
      rows[r] = {head, row, i % plan_.rows, AllowedKeys(p_, batch_, row)};
      if (rows[r].keys.begin < rows[r].keys.end) {
        begin = std::min(begin, rows[r].keys.begin);
        end = std::max(end, rows[r].keys.end);
      }
      const Element* q = RowOf<Element>(p_.q, batch_, query_head, row);
      widen_(q, p_.head_dim, unpacked_);
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        queries_[c * tile + r] = unpacked_[c] * static_cast<double>(p_.scale);
      }
      if (!plan_.with_delta) continue;
      const Element* d_o = RowOf<Element>(p_.d_o, batch_, query_head, row);
      widen_(d_o, plan_.v_dim, unpacked_);
      for (int64_t c = 0; c < plan_.v_dim; ++c) gradients_[c * tile + r] = unpacked_[c];
    }
    if (begin >= end) return;  // No row of the tile may see a key.
    Multiply(begin, end);
    for (int64_t r = 0; r < last - first; ++r) {
      if (rows[r].keys.begin == rows[r].keys.end) continue;
      AddTileRow(r, rows[r], sums + rows[r].head * kProbeStatCount);
    }
  }

  // scores_ and dp_ for keys [begin, end), scores for all keys where the spread
  // is taken from them.
  void Multiply(int64_t begin, int64_t end) {
    const int64_t tile = simd_.tile_rows;
    const int64_t first = begin / kPanel, last = (end + kPanel - 1) / kPanel;
    const bool all = !plan_.by_covariance;
    for (int64_t panel = all ? 0 : first; panel < (all ? plan_.panels : last); ++panel) {
      simd_.tile(queries_, tile, keys_ + panel * kPanel * p_.head_dim, kPanel, p_.head_dim, scores_ + panel * kPanel,
                 score_stride_);
    }
    for (int64_t panel = first; plan_.with_delta && panel < last; ++panel) {
      simd_.tile(gradients_, tile, values_ + panel * kPanel * plan_.v_dim, kPanel, plan_.v_dim, dp_ + panel * kPanel,
                 score_stride_);
    }
    if (!plan_.by_covariance || !keys_finite_) return;
    for (int64_t c = 0; c < plan_.padded_dim; c += kPanel) {
      simd_.tile(queries_, tile, covariance_ + c, plan_.padded_dim, p_.head_dim, turned_ + c, plan_.padded_dim);
    }
  }

  void MeasureDrift(int64_t r, const TileRow& row, RowStats& stats) {
    if (plan_.v_by_head) return MeasureDriftOfHead(r, row, stats);
    if (!keys_finite_ || v_size_ == 0) {
      stats.common_mode = stats.spread = std::numeric_limits<double>::quiet_NaN();
      return;
    }
    const int64_t tile = simd_.tile_rows;
    const double* scores = scores_ + r * score_stride_;
    const double mean = simd_.dot(queries_ + r, tile, mean_, p_.head_dim);
    const double squares = plan_.by_covariance
                               ? simd_.dot(queries_ + r, tile, turned_ + r * plan_.padded_dim, p_.head_dim)
                               : simd_.spread(plan_.narrow_v ? ScoresInV(r, row, mean) : scores, p_.k_len, mean);
    stats.common_mode = std::fabs(mean);
    stats.spread = std::sqrt(std::max(squares, 0.0) / static_cast<double>(v_size_));
  }

  // V is the head's own: mean and spread from the scores.
  void MeasureDriftOfHead(int64_t r, const TileRow& row, RowStats& stats) {
    const double* scores = scores_ + r * score_stride_;
    double total = 0, n = 0;
    for (int64_t j = 0; j < p_.k_len; ++j) {
      if (!InV(QueryHead(row), j)) continue;
      total += scores[j];
      n += 1;
    }
    const double mean = total / n;  // NaN of no keys.
    if (!std::isfinite(mean)) {
      stats.common_mode = stats.spread = std::numeric_limits<double>::quiet_NaN();
      return;
    }
    stats.common_mode = std::fabs(mean);
    stats.spread = std::sqrt(simd_.spread(ScoresInV(r, row, mean), p_.k_len, mean) / n);
  }

  // Row r's scores, `other` in the place of keys outside V.
  const double* ScoresInV(int64_t r, const TileRow& row, double other) {
    const double* scores = scores_ + r * score_stride_;
    for (int64_t j = 0; j < p_.k_len; ++j) row_[j] = InV(QueryHead(row), j) ? scores[j] : other;
    return row_;
  }

  void AddTileRow(int64_t r, const TileRow& row, double* sums) {
    RowStats stats;
    const int64_t first = row.keys.begin / kPanel, last = (row.keys.end + kPanel - 1) / kPanel;
    double* scores = scores_ + r * score_stride_ + first * kPanel;
    double* dp = dp_ + r * score_stride_ + first * kPanel;
    const int64_t offset = row.keys.begin - first * kPanel;
    MeasureDrift(r, row, stats);
    HideEdges(row.keys, first, last, kMaskedScore, scores);
    if (plan_.with_delta) HideEdges(row.keys, first, last, 0.0, dp);
    stats.keys = row.keys.end - row.keys.begin;
    if (p_.mask.data != nullptr) {
      stats.keys = HideMasked(row, scores + offset, plan_.with_delta ? dp + offset : nullptr);
      if (stats.keys == 0) return;
    }
    ScoreScan scan = simd_.scan(scores, last - first);
    if (scan.nonfinite) return AddNonfiniteRow(sums);
    if (p_.sinks != nullptr && IsBadSink(p_.sinks[QueryHead(row)])) return AddNonfiniteRow(sums);
    if (p_.softcap > 0) {
      simd_.cap(scores, last - first, static_cast<double>(p_.softcap));
      scan = simd_.scan(scores, last - first);
    }
    if (IsBiased()) {
      AddBias(row.keys, scores + offset);
      scan = simd_.scan(scores, last - first);
      if (scan.nonfinite) return AddNonfiniteRow(sums);
    }
    if (plan_.with_delta) stats.delta_lp = DeltaLp(r, row);
    const ScoreSums total = simd_.sum(scores, plan_.with_delta ? dp : nullptr, last - first, scan.first);
    stats.first = scan.first;
    stats.second = stats.keys > 1 ? scan.second : scan.first;
    stats.l = stats.l_keys = total.l;
    stats.weighted_score = total.weighted_score;
    stats.weighted_dp = total.weighted_dp;
    if (row.keys.begin == 0 && scores[0] != kMaskedScore) stats.first_key = std::exp(scores[0] - scan.first);
    if (p_.sinks != nullptr) MergeSink(static_cast<double>(p_.sinks[QueryHead(row)]), stats);
    AddRow(stats, plan_.with_delta, sums);
  }

  bool IsBiased() const { return p_.mask.data != nullptr && p_.mask.dtype != MaskDType::kBool; }

  // Reads the mask's row into row_, and hides what it hides; returns the keys that are
  // left.  scores and dp (or null) start at the first allowed key.
  int64_t HideMasked(const TileRow& row, double* scores, double* dp) {
    ReadMask(p_.mask, batch_, QueryHead(row), p_.mask.by_sample ? row.sample : row.row, row.keys, row_);
    const int64_t count = row.keys.end - row.keys.begin;
    int64_t left = count;
    for (int64_t j = 0; j < count; ++j) {
      if (row_[j] != kHiddenBias) continue;
      scores[j] = kMaskedScore;
      if (dp != nullptr) dp[j] = 0;
      --left;
    }
    return left;
  }

  void AddBias(KeyRange keys, double* scores) const {
    for (int64_t j = 0; j < keys.end - keys.begin; ++j) {
      if (row_[j] != kHiddenBias) scores[j] += row_[j];
    }
  }

  // Overwrites the lanes of panels [first, last) that lie outside `keys`;
  // `values` starts at panel `first`.
  static void HideEdges(KeyRange keys, int64_t first, int64_t last, double with, double* values) {
    std::fill(values, values + (keys.begin - first * kPanel), with);
    std::fill(values + (keys.end - first * kPanel), values + (last - first) * kPanel, with);
  }

  double DeltaLp(int64_t r, const TileRow& row) {
    widen_(RowOf<Element>(p_.o, batch_, QueryHead(row), row.row), plan_.v_dim, unpacked_);
    return simd_.dot(gradients_ + r, simd_.tile_rows, unpacked_, plan_.v_dim);
  }

  const ProbePlan& plan_;
  const ProbeParams& p_;
  const SimdKernels& simd_;
  void (*const widen_)(const void*, int64_t, double*);
  const int64_t score_stride_;
  int64_t batch_ = 0, kv_head_ = 0;
  int64_t v_size_ = 0;  // keys that a head of the group has in V
  bool keys_finite_ = true;
  double *keys_, *values_;                 // [panel][channel][8]
  double *scores_, *dp_;                   // [tile row][k_len padded]
  double* unpacked_;                       // [8][channel]; one row while a tile runs
  double *queries_, *gradients_;           // [channel][tile row]; queries hold scale q
  double* mean_;                           // [head_dim] kbar
  double *covariance_, *chunk_, *turned_;  // turned_ [tile row][padded_dim] = |V| Cov q
  double* row_;                            // [k_len padded] of one row: scores in V, then the mask
};

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_PROBE_UNIT_H_
