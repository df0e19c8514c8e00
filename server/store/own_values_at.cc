#include "server/store/own_values_at.h"

#include <algorithm>

#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Steps that are read whole; before them a value is looked for in as many stretches.
constexpr int64_t kNearSteps = 256;

}  // namespace

absl::StatusOr<std::vector<float>> OwnValuesAt(const SeriesStore& series, RunId run, const Layout& layout,
                                               const RunRows& rows, size_t signal, int64_t begin, int64_t end) {
  std::vector<int32_t> cells;
  for (size_t row = 0; row < rows.own_cells.size() && row < static_cast<size_t>(layout.own); ++row) {
    if (rows.own_cells[row].signal == static_cast<int32_t>(signal)) cells.push_back(static_cast<int32_t>(row));
  }
  const size_t count = std::min(cells.size(), kOwnCellsRead);
  const int64_t near = std::max(begin, end - kNearSteps);
  std::vector<float> values;
  for (size_t i = 0; i < count; ++i) {
    const SeriesKey key{.signal = MatrixOf(rows.own_signals[signal]), .layer = cells[i * cells.size() / count]};
    BW_ASSIGN_OR_RETURN(SeriesPoints points,
                        series.ReadSeries(run, layout, key, near, end, kNearSteps, SeriesStore::kNewestAttempt));
    if (points.mean.empty() && near > begin) {
      BW_ASSIGN_OR_RETURN(points,
                          series.ReadSeries(run, layout, key, begin, near, kNearSteps, SeriesStore::kNewestAttempt));
    }
    if (!points.mean.empty()) values.push_back(points.mean.back());
  }
  return values;
}

}  // namespace bellwether::server
