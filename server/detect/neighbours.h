// neighbours.h: whether values of a series are like those next to them, and how far from these they lie.
//
// What asks how rare a value is takes values for independent.  Where neighbours are alike, values wander far in
// company, and only what leaves its neighbour at once is new.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_NEIGHBOURS_H_
#define BELLWETHER_SERVER_DETECT_NEIGHBOURS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace bellwether::server {

// The correlation of neighbours about the mean of all; 0 of values that are all the same.
inline double NeighbourCorrelation(const std::vector<double>& values) {
  double mean = 0, together = 0, square = 0;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    square += (values[i] - mean) * (values[i] - mean);
    if (i > 0) together += (values[i] - mean) * (values[i - 1] - mean);
  }
  return square > 0 ? together / square : 0;
}

// Whether one value says nothing of the next: less than three standard errors of values in any order.
inline bool InAnyOrder(const std::vector<double>& values) {
  return NeighbourCorrelation(values) * std::sqrt(static_cast<double>(values.size())) < 3;
}

// The furthest that a value lies from the one before it.
inline double FurthestNeighbours(const std::vector<double>& values) {
  double furthest = 0;
  for (size_t i = 1; i < values.size(); ++i) furthest = std::max(furthest, std::abs(values[i] - values[i - 1]));
  return furthest;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_NEIGHBOURS_H_
