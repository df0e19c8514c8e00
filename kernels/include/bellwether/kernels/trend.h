// trend.h: is this short series growing exponentially, and how fast.
//
//   z      Mann-Kendall: (S -+ 1) / sqrt(var S), S = the sum of the signs of
//          all x_j - x_i with i < j; widened by the lag-1 correlation phi of
//          the residuals, sqrt((1 + phi) / (1 - phi)).
//   slope  Theil-Sen: the median of (ln x_j - ln x_i) / (t_j - t_i).
//   r2     share of the variance of ln x that the line explains.
// The interval of the slope holds 80 %: the pairwise slopes at the ranks that
// the variance of S gives.
// Source: Sen, J. Am. Stat. Assoc. 63 (1968) 1379.
//
// Pure functions of their arguments; safe from any thread with own scratch.

#ifndef BELLWETHER_KERNELS_TREND_H_
#define BELLWETHER_KERNELS_TREND_H_

#include <vector>

namespace bellwether::kernels {

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

// `values` and their `steps`, `count` each, oldest first.  Values that are not
// finite or not above 0 are left out; fewer than `points_min` (or 3) left gives
// points = 0.  So does a series that no line explains to `r2_min`: the
// least-squares line explains most, so the one of the median slope cannot pass
// if that does not, and the costly part is saved.
Trend FitTrend(const float* values, const float* steps, int count, int points_min, double r2_min,
               TrendScratch* scratch);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_TREND_H_
