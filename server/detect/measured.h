// measured.h: what kind of number a value of a sample is.  What was not measured is none.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_MEASURED_H_
#define BELLWETHER_SERVER_DETECT_MEASURED_H_

#include <cmath>
#include <cstddef>
#include <span>

#include "server/model/step_sample.h"

namespace bellwether::server {

// That of a row which others of the sample may have, and these may not.
inline float ValueAt(std::span<const float> values, size_t row) {
  return row < values.size() ? values[row] : NotMeasured();
}
// NotMeasured() is a NaN.
inline bool IsNumber(float value) { return std::isfinite(value); }
inline bool IsAtLeast0(float value) { return IsNumber(value) && value >= 0; }
inline bool IsAbove0(float value) { return IsNumber(value) && value > 0; }

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_MEASURED_H_
