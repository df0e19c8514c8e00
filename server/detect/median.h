// median.h: the middle one of some values, of an even number the upper one of the two; and what follows from it.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_MEDIAN_H_
#define BELLWETHER_SERVER_DETECT_MEDIAN_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace bellwether::server {

// The median of absolute deviations, times this, is the standard deviation of a normal.
inline constexpr double kDeviationOfMedian = 1.4826;

// `none`: where there are no values.
inline double MedianOr(double none, std::vector<double> values) {
  if (values.empty()) return none;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// How far values scatter, as a standard deviation, by their neighbours alone: what rises or falls scatters no more for
// it.
inline double ScatterOfNeighbours(std::span<const float> values) {
  std::vector<double> moves;
  for (size_t i = 1; i < values.size(); ++i) moves.push_back(std::abs(values[i] - values[i - 1]));
  return kDeviationOfMedian / std::sqrt(2.0) * MedianOr(0, std::move(moves));
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_MEDIAN_H_
