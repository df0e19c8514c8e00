// trend.h: is this short series growing exponentially, how fast, and when will
// it reach a level.
//
//   z      Mann-Kendall: (S -+ 1) / sqrt(var S), S = the sum of the signs of
//          all x_j - x_i with i < j; widened by the lag-1 correlation phi of
//          the residuals, sqrt((1 + phi) / (1 - phi)).
//   slope  Theil-Sen: the median of (ln x_j - ln x_i) / (t_j - t_i).
//   r2     share of the variance of ln x that the line explains.
// The interval of the slope holds 80 %: the pairwise slopes at the ranks that
// the variance of S gives (Sen 1968).
//
// Pure functions of their arguments; safe from any thread with own scratch.

#ifndef BELLWETHER_SERVER_DETECT_TREND_H_
#define BELLWETHER_SERVER_DETECT_TREND_H_

#include <span>
#include <vector>

#include "server/store/transition.h"

namespace bellwether::server {

struct Trend {
  int points = 0;  // 0: too few, nothing else is set.
  double z = 0;
  double slope = 0;        // of ln x per step
  double slope_lower = 0;  // 80 % interval
  double slope_upper = 0;
  double r2 = 0;
  double log_level = 0;  // Of the line at the last point.
  // Infinite if not growing.
  double doubling_steps() const;
};

struct TrendScratch {
  std::vector<double> time, log_value, slopes, residuals;
};

// `values` oldest first, with their steps.  Values that are not finite or not
// above 0 are left out; fewer than `points_min` left gives points = 0.  So does
// a series that no line explains to `r2_min`: the least-squares line explains
// most, so the one of the median slope cannot pass if that does not, and the
// costly part is saved.
Trend FitTrend(std::span<const float> values, std::span<const float> steps,
               int points_min, double r2_min, TrendScratch* scratch);

// Steps until exp(log_level + slope t) = `level`.  Unknown if it is not growing
// or further than `steps_max` away; an upper bound beyond that is steps_max.
Eta EtaTo(const Trend& trend, double level, double steps_max);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_TREND_H_
