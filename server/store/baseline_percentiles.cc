#include "server/store/baseline_percentiles.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

constexpr size_t kProbs = kBandProbs.size();

// Share of the band's values that are <= x: its quantiles joined by lines.
double ShareBelow(const Band& band, double x) {
  const auto& at = band.quantiles;
  if (x < at.front()) return 0;
  if (x >= at.back()) return 1;
  // The last of several equal quantiles: there the share jumps.
  const auto above = static_cast<size_t>(std::upper_bound(at.begin(), at.end(), x) - at.begin());
  const double low = at[above - 1], high = at[above];
  return kBandProbs[above - 1] + (kBandProbs[above] - kBandProbs[above - 1]) * (x - low) / (high - low);
}

// The smallest x that at least `prob` of the mixture lies at or below.
double MixtureQuantile(const std::vector<const Band*>& bands, double prob, double low, double high) {
  const auto reaches = [&](double x) {
    double share = 0;
    for (const Band* const band : bands) share += ShareBelow(*band, x);
    return share >= prob * static_cast<double>(bands.size());
  };
  if (reaches(low)) return low;
  // However far apart the two are: the largest float is 2^277 of the smallest.
  while (high - low > 1e-9 * std::max(std::abs(low), std::abs(high))) {
    const double middle = low + 0.5 * (high - low);
    if (middle <= low || middle >= high) break;
    (reaches(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace

int64_t BandBegin(int range) {
  if (range <= 0) return 0;
  const int octave = (range - 1) / 2;
  return (range % 2 == 1 ? int64_t{128} : int64_t{181}) << octave;  // 181 = 128 sqrt(2)
}

int BandRangeOf(int64_t step) {
  int range = 0;
  while (range + 1 < kBandRanges && BandBegin(range + 1) <= step) ++range;
  return range;
}

std::string KindOf(const RunDescription& run) {
  const Layout& layout = run.layout;
  const AttentionTraits& attention = run.attention;
  std::string kind =
      absl::StrCat(run.model.empty() ? "model" : run.model, " ", layout.layers, " layers x ", layout.heads, " heads");
  if (layout.kv_heads != layout.heads) absl::StrAppend(&kind, " (", layout.kv_heads, " key heads)");
  if (layout.head_dim > 0) absl::StrAppend(&kind, " of ", layout.head_dim);
  if (layout.seq_len > 0) absl::StrAppend(&kind, ", ", layout.seq_len, " tokens");
  if (attention.causal) absl::StrAppend(&kind, ", causal");
  if (attention.window > 0) absl::StrAppend(&kind, ", window ", attention.window);
  if (attention.qk_norm) absl::StrAppend(&kind, ", QK-norm");
  if (attention.softcap != 0) absl::StrAppend(&kind, ", softcap ", attention.softcap);
  if (attention.centred) absl::StrAppend(&kind, ", keys centred");
  // Its steps are not those of training.
  if (run.step_from_attach) absl::StrAppend(&kind, ", steps counted from attaching");
  absl::StrAppend(&kind, "; ", attention.kernel.empty() ? "unknown kernel" : attention.kernel, ", ",
                  attention.score_dtype.empty() ? "unknown dtype" : attention.score_dtype);
  return kind;
}

bool ChangesKind(EventKind kind) {
  return kind == EventKind::kCentringOn || kind == EventKind::kCentringOff || kind == EventKind::kAttentionMode;
}

bool DescribeBand(std::vector<float>* values, Band* band) {
  std::erase_if(*values, [](float value) { return !std::isfinite(value); });
  if (values->empty()) return false;
  std::sort(values->begin(), values->end());
  band->values = static_cast<uint32_t>(std::min<size_t>(values->size(), std::numeric_limits<uint32_t>::max()));
  for (size_t i = 0; i < kProbs; ++i) {
    const double at = kBandProbs[i] * static_cast<double>(values->size() - 1);
    const auto below = static_cast<size_t>(at);
    const double low = (*values)[below], high = (*values)[std::min(below + 1, values->size() - 1)];
    band->quantiles[i] = static_cast<float>(low + (at - static_cast<double>(below)) * (high - low));
  }
  return true;
}

const std::string& OwnNameOf(const BaselinePercentiles& run, const Band& band) {
  static const std::string* const kNone = new std::string;
  return band.own == 0 ? *kNone : run.own[band.own - 1u];
}

SiblingBand MergeBands(const std::vector<const Band*>& bands) {
  SiblingBand merged;
  if (bands.empty()) return merged;
  merged.runs = static_cast<uint32_t>(bands.size());
  merged.step_begin = BandBegin(bands.front()->range);
  merged.step_end = BandBegin(bands.front()->range + 1);
  merged.min = std::numeric_limits<double>::infinity();
  merged.max = -merged.min;
  for (const Band* const band : bands) {
    merged.min = std::min<double>(merged.min, band->quantiles.front());
    merged.max = std::max<double>(merged.max, band->quantiles.back());
  }
  merged.p01 = MixtureQuantile(bands, 0.01, merged.min, merged.max);
  merged.p50 = MixtureQuantile(bands, 0.5, merged.min, merged.max);
  merged.p99 = MixtureQuantile(bands, 0.99, merged.min, merged.max);
  return merged;
}

}  // namespace bellwether::server
