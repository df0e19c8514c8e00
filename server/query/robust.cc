#include "server/query/robust.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace bellwether::server {
namespace {

double Median(std::vector<double>* values) {
  const auto middle = values->begin() + static_cast<ptrdiff_t>(values->size() / 2);
  std::nth_element(values->begin(), middle, values->end());
  if (values->size() % 2 == 1) return *middle;
  // Halves first: their sum must not overflow.
  return 0.5 * *middle + 0.5 * *std::max_element(values->begin(), middle);
}

}  // namespace

double PeerStatistics::Score(double value) const {
  if (!std::isfinite(value) || !std::isfinite(median)) return std::numeric_limits<double>::quiet_NaN();
  return scale > 0 ? (value - median) / scale : 0;
}

PeerStatistics DescribePeers(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return {.median = std::numeric_limits<double>::quiet_NaN()};
  PeerStatistics peers{.median = Median(&values)};
  double sum = 0;
  for (double& value : values) {
    value = std::abs(value - peers.median);
    sum += value / static_cast<double>(values.size());
  }
  peers.scale = 1.4826 * Median(&values);
  if (peers.scale == 0) peers.scale = 1.2533 * sum;
  return peers;
}

}  // namespace bellwether::server
