#include "server/export/row_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

namespace bellwether::server {
namespace {

float Distance(float value) { return std::isnan(value) ? std::numeric_limits<float>::infinity() : std::abs(value); }

}  // namespace

std::vector<ChosenRow> RowChoice::Choose(const RunSnapshot& run, int64_t now_ns) {
  if (options_.rows_top == 0 || run.row_values == nullptr) return {};
  const auto is_gone = [&](const ChosenRow& chosen) {
    const auto values = run.row_values->of(chosen.signal);
    const auto row = static_cast<size_t>(chosen.row);
    return row >= values.size() || IsNotMeasured(values[row]);
  };
  std::vector<ChosenRow> chosen, lately;
  for (size_t signal = 0; signal < kRowSignals.size(); ++signal) {
    if (IsOwnMatrix(signal)) continue;
    const auto values = run.row_values->of(signal);
    std::vector<std::pair<float, int32_t>> ranked;
    for (size_t row = 0; row < values.size(); ++row) {
      if (IsNotMeasured(values[row]) || values[row] == 0) continue;
      ranked.emplace_back(-Distance(values[row]), static_cast<int32_t>(row));
    }
    const size_t count = std::min(ranked.size(), static_cast<size_t>(options_.rows_top));
    std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(count), ranked.end());
    std::vector<ChosenRow> top;
    for (size_t i = 0; i < count; ++i) top.push_back({signal, ranked[i].second});
    const std::vector<ChosenRow> held = held_[signal].Hold(run.record.id, top, now_ns, is_gone);
    chosen.insert(chosen.end(), top.begin(), top.end());
    lately.insert(lately.end(), held.begin() + static_cast<std::ptrdiff_t>(count), held.end());
  }
  chosen.insert(chosen.end(), lately.begin(), lately.end());
  const std::vector<ChosenRow> own = held_own_.Hold(run.record.id, OwnTop(run), now_ns, is_gone);
  chosen.insert(chosen.end(), own.begin(), own.end());
  return chosen;
}

std::vector<ChosenRow> RowChoice::OwnTop(const RunSnapshot& run) const {
  if (run.rows == nullptr) return {};
  const std::vector<OwnCell>& cells = run.rows->own_cells;
  // Of each own signal: its cells, the furthest from zero first.
  std::map<int32_t, std::vector<std::pair<float, ChosenRow>>> by_signal;
  for (size_t signal = 0; signal < kRowSignals.size(); ++signal) {
    if (!IsOwnMatrix(signal)) continue;
    const auto values = run.row_values->of(signal);
    for (size_t row = 0; row < std::min(values.size(), cells.size()); ++row) {
      if (IsNotMeasured(values[row])) continue;
      by_signal[cells[row].signal].push_back({-Distance(values[row]), {signal, static_cast<int32_t>(row)}});
    }
  }
  const auto of_each = static_cast<size_t>(options_.rows_top);
  const size_t of_all = of_each * kOwnRowsFactor;
  std::vector<ChosenRow> top;
  for (auto& [signal, ranked] : by_signal) {
    const size_t count = std::min(ranked.size(), of_each);
    std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(count), ranked.end());
    ranked.resize(count);
  }
  for (size_t place = 0; place < of_each && top.size() < of_all; ++place) {
    for (const auto& [signal, ranked] : by_signal) {
      if (place < ranked.size() && top.size() < of_all) top.push_back(ranked[place].second);
    }
  }
  return top;
}

}  // namespace bellwether::server
