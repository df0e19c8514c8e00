// median.h: the middle one of some values; of an even number the upper one of the two.
//
// A pure function; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_MEDIAN_H_
#define BELLWETHER_SERVER_DETECT_MEDIAN_H_

#include <algorithm>
#include <cstddef>
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

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_MEDIAN_H_
