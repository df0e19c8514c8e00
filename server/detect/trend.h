// trend.h: a trend (kernels/trend.h) and when it will reach a level.
//
// Pure functions of their arguments; safe from any thread with own scratch.

#ifndef BELLWETHER_SERVER_DETECT_TREND_H_
#define BELLWETHER_SERVER_DETECT_TREND_H_

#include <span>
#include <vector>

#include "bellwether/kernels/trend.h"
#include "server/model/alert_transition.h"

namespace bellwether::server {

using kernels::Trend;
using kernels::TrendScratch;

// `values` oldest first, with their steps: as many.
inline Trend FitTrend(std::span<const float> values, std::span<const float> steps, int points_min, double r2_min,
                      TrendScratch* scratch) {
  return kernels::FitTrend(values.data(), steps.data(), static_cast<int>(values.size()), points_min, r2_min, scratch);
}

// Steps until exp(log_level + slope t) = `level`.  Unknown if it is not growing
// or further than `steps_max` away; an upper bound beyond that is steps_max.
Eta EtaTo(const Trend& trend, double level, double steps_max);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_TREND_H_
