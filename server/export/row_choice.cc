#include "server/export/row_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace bellwether::server {
namespace {

float Distance(float value) { return std::isnan(value) ? std::numeric_limits<float>::infinity() : std::abs(value); }

}  // namespace

std::vector<ChosenRow> RowChoice::Choose(const RunSnapshot& run, int64_t now_ns) {
  if (options_.rows_top == 0 || run.row_values == nullptr) return {};
  std::vector<ChosenRow> top;
  for (size_t signal = 0; signal < kRowSignals.size(); ++signal) {
    const auto values = run.row_values->of(signal);
    std::vector<std::pair<float, int32_t>> ranked;
    for (size_t row = 0; row < values.size(); ++row) {
      if (IsNotMeasured(values[row]) || values[row] == 0) continue;
      ranked.emplace_back(-Distance(values[row]), static_cast<int32_t>(row));
    }
    const size_t count = std::min(ranked.size(), static_cast<size_t>(options_.rows_top));
    std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(count), ranked.end());
    for (size_t i = 0; i < count; ++i) top.push_back({signal, ranked[i].second});
  }
  return held_.Hold(run.record.id, top, now_ns, [&](const ChosenRow& chosen) {
    const auto values = run.row_values->of(chosen.signal);
    const auto row = static_cast<size_t>(chosen.row);
    return row >= values.size() || IsNotMeasured(values[row]);
  });
}

}  // namespace bellwether::server
