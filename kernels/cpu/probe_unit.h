// probe_unit.h: the work of the fast probe on one sequence and key head.
//
// Keys and values are packed once into panels of 8 doubles (simd.h); query rows
// then go in tiles.  A tile computes S and, with d_o, dP for the keys that any
// of its rows may see, and each row is reduced in two passes.  The spread wants
// all keys: from the scores themselves where the mask hides few, else from the
// covariance of the keys.

#ifndef BELLWETHER_KERNELS_CPU_PROBE_UNIT_H_
#define BELLWETHER_KERNELS_CPU_PROBE_UNIT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/element.h"
#include "cpu/gram.h"
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
        padded_dim(PaddedRows(params.head_dim)) {
    // Multiply-adds of a unit: scores of masked keys, or K^T K and Q Cov.
    const int64_t unit_rows = std::min(kUnitRows, group * rows);
    int64_t hidden = params.causal ? std::min(params.q_len, params.k_len) / 2 : 0;
    if (params.window > 0) hidden = std::max(hidden, params.k_len - params.window);
    by_covariance = unit_rows * hidden > params.k_len * params.head_dim / 2 + unit_rows * params.head_dim;
  }

  // Doubles that one worker needs, in this order; a multiple of a cache line.
  int64_t ScratchSize() const {
    const int64_t widest = std::max(p.head_dim, v_dim);
    return panels * kPanel * (p.head_dim + v_dim + 2 * kPanel) + kPanel * widest * 3 + 2 * padded_dim +
           (by_covariance ? padded_dim * (padded_dim + kGramColumns + kPanel) : 0);
  }

  const ProbeParams& p;
  const bool with_delta;
  const int64_t group, rows, chunks, units, panels, v_dim, padded_dim;
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
  }

  // Rows [first, last) of the group's heads laid end to end; sums [group][stat].
  void Run(int64_t batch, int64_t kv_head, int64_t first, int64_t last, double* sums, double* coherence) {
    batch_ = batch;
    kv_head_ = kv_head;
    for (int64_t h = 0; h < plan_.group; ++h) ClearSums(sums + h * kProbeStatCount);
    PackKeys(coherence);
    if (plan_.with_delta) PackPanels(p_.v, plan_.v_dim, values_, [](int64_t, int64_t) {});
    if (plan_.by_covariance && keys_finite_) ComputeCovariance();
    for (int64_t i = first; i < last; i += simd_.tile_rows) {
      RunTile(i, std::min(i + simd_.tile_rows, last), sums);
    }
  }

 private:
  struct TileRow {
    int64_t head, row;
    KeyRange keys;
  };

  // Converts rows of [k_len][dim] and lays them out in panels; after each panel
  // calls visit(panel, rows in it) while unpacked_ holds them as [row][dim].
  template <typename Visit>
  void PackPanels(const Tensor4& from, int64_t dim, double* panels, const Visit& visit) {
    for (int64_t panel = 0; panel < plan_.panels; ++panel) {
      const int64_t count = std::min(kPanel, p_.k_len - panel * kPanel);
      for (int64_t lane = 0; lane < count; ++lane) {
        const Element* row = RowOf<Element>(from, batch_, kv_head_, panel * kPanel + lane);
        widen_(row, dim, unpacked_ + lane * dim);
      }
      std::fill(unpacked_ + count * dim, unpacked_ + kPanel * dim, 0.0);
      simd_.transpose(unpacked_, dim, panels + panel * kPanel * dim);
      visit(panel, count);
    }
  }

  void PackKeys(double* coherence) {
    const int64_t dim = p_.head_dim;
    std::fill(mean_, mean_ + dim, 0.0);
    double norms = 0;
    PackPanels(p_.k, dim, keys_, [&](int64_t panel, int64_t count) {
      for (int64_t lane = 0; lane < count; ++lane) simd_.add(unpacked_ + lane * dim, dim, mean_);
      double squares[kPanel];
      simd_.square_lanes(keys_ + panel * kPanel * dim, dim, squares);
      for (double square : squares) norms += std::sqrt(square);
    });
    keys_finite_ = std::isfinite(norms);
    const double n = static_cast<double>(p_.k_len);
    double squares = 0;
    for (int64_t c = 0; c < dim; ++c) {
      mean_[c] /= n;
      squares += mean_[c] * mean_[c];
    }
    *coherence = keys_finite_ ? KeyCoherence(norms / n, std::sqrt(squares)) : std::numeric_limits<double>::quiet_NaN();
  }

  // covariance_ [padded_dim][padded_dim] = k_len Cov(K).
  void ComputeCovariance() {
    const int64_t padded = plan_.padded_dim;
    ComputeGram(p_.head_dim, p_.k_len, chunk_, covariance_, [&](int64_t c, int64_t j, int64_t count, double* out) {
      for (int64_t t = 0; t < count; ++t) {
        const int64_t key = j + t;
        const double* panel = keys_ + key / kPanel * kPanel * p_.head_dim;
        out[t * padded] = panel[c * kPanel + key % kPanel] - mean_[c];
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
      rows[r] = {head, row, AllowedKeys(p_, row)};
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

  void MeasureDrift(int64_t r, RowStats& stats) {
    if (!keys_finite_) {
      stats.common_mode = stats.spread = std::numeric_limits<double>::quiet_NaN();
      return;
    }
    const int64_t tile = simd_.tile_rows;
    const double mean = simd_.dot(queries_ + r, tile, mean_, p_.head_dim);
    const double squares = plan_.by_covariance
                               ? simd_.dot(queries_ + r, tile, turned_ + r * plan_.padded_dim, p_.head_dim)
                               : simd_.spread(scores_ + r * score_stride_, p_.k_len, mean);
    stats.common_mode = std::fabs(mean);
    stats.spread = std::sqrt(std::max(squares, 0.0) / static_cast<double>(p_.k_len));
  }

  void AddTileRow(int64_t r, const TileRow& row, double* sums) {
    RowStats stats;
    MeasureDrift(r, stats);
    const int64_t first = row.keys.begin / kPanel, last = (row.keys.end + kPanel - 1) / kPanel;
    double* scores = scores_ + r * score_stride_ + first * kPanel;
    double* dp = dp_ + r * score_stride_ + first * kPanel;
    HideEdges(row.keys, first, last, kMaskedScore, scores);
    ScoreScan scan = simd_.scan(scores, last - first);
    if (scan.nonfinite) return AddNonfiniteRow(sums);
    if (p_.softcap > 0) {
      simd_.cap(scores, last - first, static_cast<double>(p_.softcap));
      scan = simd_.scan(scores, last - first);
    }
    if (plan_.with_delta) {
      HideEdges(row.keys, first, last, 0.0, dp);
      stats.delta_lp = DeltaLp(r, row);
    }
    const ScoreSums total = simd_.sum(scores, plan_.with_delta ? dp : nullptr, last - first, scan.first);
    stats.keys = row.keys.end - row.keys.begin;
    stats.first = scan.first;
    stats.second = stats.keys > 1 ? scan.second : scan.first;
    stats.l = total.l;
    stats.weighted_score = total.weighted_score;
    stats.weighted_dp = total.weighted_dp;
    if (row.keys.begin == 0) stats.sink = std::exp(scores[0] - scan.first) / total.l;
    AddRow(stats, plan_.with_delta, sums);
  }

  // Overwrites the lanes of panels [first, last) that lie outside `keys`;
  // `values` starts at panel `first`.
  static void HideEdges(KeyRange keys, int64_t first, int64_t last, double with, double* values) {
    std::fill(values, values + (keys.begin - first * kPanel), with);
    std::fill(values + (keys.end - first * kPanel), values + (last - first) * kPanel, with);
  }

  double DeltaLp(int64_t r, const TileRow& row) {
    const int64_t head = kv_head_ * plan_.group + row.head;
    widen_(RowOf<Element>(p_.o, batch_, head, row.row), plan_.v_dim, unpacked_);
    return simd_.dot(gradients_ + r, simd_.tile_rows, unpacked_, plan_.v_dim);
  }

  const ProbePlan& plan_;
  const ProbeParams& p_;
  const SimdKernels& simd_;
  void (*const widen_)(const void*, int64_t, double*);
  const int64_t score_stride_;
  int64_t batch_ = 0, kv_head_ = 0;
  bool keys_finite_ = true;
  double *keys_, *values_;                 // [panel][channel][8]
  double *scores_, *dp_;                   // [tile row][k_len padded]
  double* unpacked_;                       // [8][channel]; one row while a tile runs
  double *queries_, *gradients_;           // [channel][tile row]; queries hold scale q
  double* mean_;                           // [head_dim] kbar
  double *covariance_, *chunk_, *turned_;  // turned_ [tile row][padded_dim] = k_len Cov q
};

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_PROBE_UNIT_H_
