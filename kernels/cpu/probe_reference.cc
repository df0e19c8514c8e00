// The definition of probe.h, row by row in double.  Written to be read.

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "backends.h"
#include "cpu/element.h"
#include "cpu/probe_mask.h"
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

// A key that a row may see.
struct AllowedKey {
  int64_t key;
  double raw;    // score before cap and mask
  double score;  // S
};

template <typename Element>
class Reference {
 public:
  explicit Reference(const ProbeParams& p) : p_(p), plain_(VisibleKeys(p)), bias_(static_cast<size_t>(p.k_len)) {}

  void Run() {
    const int64_t group = p_.heads / p_.kv_heads;
    std::vector<double> sums(static_cast<size_t>(p_.heads * kProbeStatCount));
    for (int64_t h = 0; h < p_.heads; ++h) ClearSums(&sums[static_cast<size_t>(h * kProbeStatCount)]);
    std::vector<KeySums> keys(static_cast<size_t>(p_.kv_heads));
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t g = 0; g < p_.kv_heads; ++g) {
        AddKeys(b, g, keys[static_cast<size_t>(g)]);
        for (int64_t h = g * group; h < (g + 1) * group; ++h) {
          for (int64_t i = 0; i < SampledRows(p_); ++i) {
            AddOneRow(b, g, h, i, &sums[static_cast<size_t>(h * kProbeStatCount)]);
          }
        }
      }
    }
    for (int64_t h = 0; h < p_.heads; ++h) {
      StoreSums(p_, h, &sums[static_cast<size_t>(h * kProbeStatCount)]);
    }
    if (p_.kv_out == nullptr) return;
    for (int64_t g = 0; g < p_.kv_heads; ++g) StoreKeySums(p_, g, keys[static_cast<size_t>(g)]);
  }

 private:
  // Coherence of the keys that some head of the group may see.
  void AddKeys(int64_t b, int64_t g, KeySums& sums) const {
    std::vector<double> total(static_cast<size_t>(p_.head_dim));
    double norms = 0;
    bool any = false;
    for (int64_t j = 0; j < p_.k_len; ++j) {
      if (!IsVisibleToGroup(p_, plain_, b, g, j)) continue;
      any = true;
      const Element* k = RowOf<Element>(p_.k, b, g, j);
      norms += std::sqrt(Dot(k, k, p_.head_dim));
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        total[static_cast<size_t>(c)] += static_cast<double>(ToFloat(k[c]));
      }
    }
    if (!any) return;
    double squares = 0;
    for (double x : total) squares += x * x;
    sums.sequences += 1;
    sums.coherence += std::isfinite(norms) ? KeyCoherence(norms, std::sqrt(squares)) : kNan;
  }

  double RawScore(int64_t b, int64_t g, const Element* q, int64_t key) const {
    return static_cast<double>(p_.scale) * Dot(q, RowOf<Element>(p_.k, b, g, key), p_.head_dim);
  }

  void AddOneRow(int64_t b, int64_t g, int64_t h, int64_t sample, double* sums) {
    const int64_t row = RowAt(p_, p_.seed, b, h, sample);
    const Element* q = RowOf<Element>(p_.q, b, h, row);
    FindAllowed(b, g, h, row, sample, q);
    if (allowed_.empty()) return;
    for (const AllowedKey& key : allowed_) {
      if (!IsFiniteScore(key.raw) || !IsFiniteScore(key.score)) return AddNonfiniteRow(sums);
    }
    if (p_.sinks != nullptr && IsBadSink(p_.sinks[h])) return AddNonfiniteRow(sums);
    RowStats stats;
    MeasureDrift(b, g, h, q, stats);
    MeasureSoftmax(b, g, h, row, stats);
    AddRow(stats, p_.d_o.data != nullptr, sums);
  }

  // A_T and its scores.
  void FindAllowed(int64_t b, int64_t g, int64_t h, int64_t row, int64_t sample, const Element* q) {
    const KeyRange keys = AllowedKeys(p_, b, row);
    std::fill(bias_.begin(), bias_.end(), 0.0);
    if (p_.mask.data != nullptr) ReadMask(p_.mask, b, h, p_.mask.by_sample ? sample : row, keys, bias_.data());
    allowed_.clear();
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const double bias = bias_[static_cast<size_t>(j - keys.begin)];
      if (bias == kHiddenBias) continue;
      const double raw = RawScore(b, g, q, j);
      allowed_.push_back({j, raw, Capped(raw) + bias});
    }
  }

  // The raw scores' mean over V is scale q.kbar, their variance scale^2 q^T Cov q.
  void MeasureDrift(int64_t b, int64_t g, int64_t h, const Element* q, RowStats& stats) {
    std::vector<double> raw;
    for (int64_t j = 0; j < p_.k_len; ++j) {
      if (IsVisible(p_, plain_, b, h, j)) raw.push_back(RawScore(b, g, q, j));
    }
    const double n = static_cast<double>(raw.size());
    double mean = 0, variance = 0;
    for (double s : raw) mean += s / n;
    for (double s : raw) variance += (s - mean) * (s - mean) / n;
    const bool keys_finite = std::isfinite(mean) && !raw.empty();
    stats.common_mode = keys_finite ? std::fabs(mean) : kNan;
    stats.spread = keys_finite ? std::sqrt(variance) : kNan;
  }

  void MeasureSoftmax(int64_t b, int64_t g, int64_t h, int64_t row, RowStats& stats) const {
    const bool with_delta = p_.d_o.data != nullptr;
    const Element* d_o = with_delta ? RowOf<Element>(p_.d_o, b, h, row) : nullptr;
    if (with_delta) stats.delta_lp = Dot(d_o, RowOf<Element>(p_.o, b, h, row), p_.v_dim);
    stats.keys = static_cast<int64_t>(allowed_.size());
    stats.first = stats.second = -kInfinity;
    for (const AllowedKey& key : allowed_) {
      stats.second = std::max(stats.second, std::min(key.score, stats.first));
      stats.first = std::max(stats.first, key.score);
    }
    stats.l_keys = 0;
    for (const AllowedKey& key : allowed_) {
      const double x = key.score - stats.first;
      const double weight = std::exp(x);
      stats.l_keys += weight;
      stats.weighted_score += weight * x;
      if (key.key == 0) stats.first_key = weight;
      if (with_delta) {
        stats.weighted_dp += weight * Dot(d_o, RowOf<Element>(p_.v, b, g, key.key), p_.v_dim);
      }
    }
    stats.l = stats.l_keys;
    if (p_.sinks != nullptr) MergeSink(static_cast<double>(p_.sinks[h]), stats);
  }

  double Capped(double s) const {
    const double cap = static_cast<double>(p_.softcap);
    return cap > 0 ? cap * std::tanh(s / cap) : s;
  }

  const ProbeParams& p_;
  const KeyRange plain_;
  std::vector<double> bias_;         // Of one row.
  std::vector<AllowedKey> allowed_;  // Of one row.
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
