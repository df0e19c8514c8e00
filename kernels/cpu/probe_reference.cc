// The definition of probe.h, row by row in double.  Written to be read.

#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "backends.h"
#include "cpu/element.h"
#include "cpu/probe_rows.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <typename Element>
double Dot(const Element* a, const Element* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) {
    sum += static_cast<double>(ToFloat(a[c])) * static_cast<double>(ToFloat(b[c]));
  }
  return sum;
}

bool IsFiniteScore(double score) { return std::isfinite(static_cast<float>(score)); }

template <typename Element>
class Reference {
 public:
  explicit Reference(const ProbeParams& p) : p_(p), raw_(static_cast<size_t>(p.k_len)) {}

  void Run() {
    const int64_t group = p_.heads / p_.kv_heads;
    std::vector<double> sums(static_cast<size_t>(p_.heads * kProbeStatCount));
    for (int64_t h = 0; h < p_.heads; ++h) ClearSums(&sums[static_cast<size_t>(h * kProbeStatCount)]);
    std::vector<double> coherence(static_cast<size_t>(p_.kv_heads));
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t g = 0; g < p_.kv_heads; ++g) {
        coherence[static_cast<size_t>(g)] += MeasureKeys(b, g);
        for (int64_t h = g * group; h < (g + 1) * group; ++h) {
          for (int64_t i = 0; i < SampledRows(p_); ++i) {
            AddOneRow(b, g, h, RowAt(p_, p_.seed, b, h, i), &sums[static_cast<size_t>(h * kProbeStatCount)]);
          }
        }
      }
    }
    for (int64_t h = 0; h < p_.heads; ++h) {
      StoreSums(p_, h, &sums[static_cast<size_t>(h * kProbeStatCount)]);
    }
    if (p_.kv_out == nullptr) return;
    for (int64_t g = 0; g < p_.kv_heads; ++g) {
      p_.kv_out[kProbeKvSequences * p_.kv_stat_stride + g] += static_cast<float>(p_.batch);
      p_.kv_out[kProbeKvKeyCoherenceSum * p_.kv_stat_stride + g] +=
          static_cast<float>(coherence[static_cast<size_t>(g)]);
    }
  }

 private:
  // Coherence of the keys; remembers whether they are all finite.
  double MeasureKeys(int64_t b, int64_t g) {
    std::vector<double> mean(static_cast<size_t>(p_.head_dim));
    double norms = 0;
    for (int64_t j = 0; j < p_.k_len; ++j) {
      const Element* k = RowOf<Element>(p_.k, b, g, j);
      norms += std::sqrt(Dot(k, k, p_.head_dim));
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        mean[static_cast<size_t>(c)] += static_cast<double>(ToFloat(k[c]));
      }
    }
    double squares = 0;
    for (double x : mean) squares += x * x;
    const double n = static_cast<double>(p_.k_len);
    keys_finite_ = std::isfinite(norms);
    return keys_finite_ ? KeyCoherence(norms / n, std::sqrt(squares) / n) : kNan;
  }

  void AddOneRow(int64_t b, int64_t g, int64_t h, int64_t row, double* sums) {
    const KeyRange allowed = AllowedKeys(p_, row);
    if (allowed.begin == allowed.end) return;
    const Element* q = RowOf<Element>(p_.q, b, h, row);
    for (int64_t j = 0; j < p_.k_len; ++j) {
      raw_[static_cast<size_t>(j)] = static_cast<double>(p_.scale) * Dot(q, RowOf<Element>(p_.k, b, g, j), p_.head_dim);
    }
    for (int64_t j = allowed.begin; j < allowed.end; ++j) {
      if (!IsFiniteScore(raw_[static_cast<size_t>(j)])) return AddNonfiniteRow(sums);
    }
    RowStats stats;
    MeasureDrift(stats);
    MeasureSoftmax(b, g, h, row, allowed, stats);
    AddRow(stats, p_.d_o.data != nullptr, sums);
  }

  // The scores' mean over all keys is scale q.kbar, their variance
  // scale^2 q^T Cov q.
  void MeasureDrift(RowStats& stats) {
    if (!keys_finite_) {
      stats.common_mode = stats.spread = kNan;
      return;
    }
    const double n = static_cast<double>(p_.k_len);
    double mean = 0, variance = 0;
    for (double s : raw_) mean += s / n;
    for (double s : raw_) variance += (s - mean) * (s - mean) / n;
    stats.common_mode = std::fabs(mean);
    stats.spread = std::sqrt(variance);
  }

  void MeasureSoftmax(int64_t b, int64_t g, int64_t h, int64_t row, KeyRange allowed, RowStats& stats) {
    const bool with_delta = p_.d_o.data != nullptr;
    const Element* d_o = with_delta ? RowOf<Element>(p_.d_o, b, h, row) : nullptr;
    if (with_delta) stats.delta_lp = Dot(d_o, RowOf<Element>(p_.o, b, h, row), p_.v_dim);
    stats.keys = allowed.end - allowed.begin;
    stats.first = stats.second = -kInfinity;
    for (int64_t j = allowed.begin; j < allowed.end; ++j) {
      const double s = Capped(raw_[static_cast<size_t>(j)]);
      stats.second = std::max(stats.second, std::min(s, stats.first));
      stats.first = std::max(stats.first, s);
    }
    stats.l = 0;
    for (int64_t j = allowed.begin; j < allowed.end; ++j) {
      const double x = Capped(raw_[static_cast<size_t>(j)]) - stats.first;
      const double weight = std::exp(x);
      stats.l += weight;
      stats.weighted_score += weight * x;
      if (with_delta) {
        stats.weighted_dp += weight * Dot(d_o, RowOf<Element>(p_.v, b, g, j), p_.v_dim);
      }
    }
    if (allowed.begin == 0) stats.sink = std::exp(Capped(raw_[0]) - stats.first) / stats.l;
  }

  double Capped(double s) const {
    const double cap = static_cast<double>(p_.softcap);
    return cap > 0 ? cap * std::tanh(s / cap) : s;
  }

  const ProbeParams& p_;
  std::vector<double> raw_;  // Scores of one row against all keys, before the cap.
  bool keys_finite_ = true;
};

}  // namespace

Status ProbeReference(const ProbeParams& p) {
  if (p.batch == 0 || p.q_len == 0 || p.k_len == 0) return Status::kOk;
  try {
    WithElement(p.dtype, [&]<typename Element>(const Element*) { Reference<Element>(p).Run(); });
  } catch (const std::bad_alloc&) {
    return Fail(Status::kDeviceError, "out of memory for one row of scores");
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
