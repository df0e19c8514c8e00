#include "server/detect/trend.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace bellwether::server {
namespace {

double NthOf(std::vector<double>* values, size_t n) {
  const auto at = values->begin() + static_cast<ptrdiff_t>(n);
  std::nth_element(values->begin(), at, values->end());
  return *at;
}

// Share of the variance that the least-squares line explains; 0 if there is
// none to explain.
double LeastSquaresR2(const std::vector<double>& x,
                      const std::vector<double>& y) {
  const auto n = static_cast<double>(x.size());
  double mean_x = 0;
  double mean_y = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    mean_x += x[i] / n;
    mean_y += y[i] / n;
  }
  double xx = 0;
  double xy = 0;
  double yy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    xy += (x[i] - mean_x) * (y[i] - mean_y);
    yy += (y[i] - mean_y) * (y[i] - mean_y);
  }
  return xx > 0 && yy > 0 ? xy * xy / (xx * yy) : 0;
}

}  // namespace

double Trend::doubling_steps() const {
  return slope > 0 ? std::log(2.0) / slope
                   : std::numeric_limits<double>::infinity();
}

Trend FitTrend(std::span<const float> values, std::span<const float> steps,
               int points_min, double r2_min, TrendScratch* scratch) {
  auto& time = scratch->time;
  auto& log_value = scratch->log_value;
  auto& slopes = scratch->slopes;
  auto& residuals = scratch->residuals;
  time.clear();
  log_value.clear();
  slopes.clear();
  residuals.clear();
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]) || values[i] <= 0) continue;
    time.push_back(steps[i]);
    log_value.push_back(std::log(static_cast<double>(values[i])));
  }
  Trend trend;
  const int n = static_cast<int>(time.size());
  if (n < std::max(points_min, 3)) return trend;
  if (LeastSquaresR2(time, log_value) < r2_min) return trend;
  int64_t sign_sum = 0;
  for (int i = 0; i < n; ++i) {
    for (int j = i + 1; j < n; ++j) {
      const double rise = log_value[j] - log_value[i];
      sign_sum += (rise > 0) - (rise < 0);
      if (time[j] > time[i]) slopes.push_back(rise / (time[j] - time[i]));
    }
  }
  if (slopes.empty()) return trend;
  trend.points = n;
  trend.slope = NthOf(&slopes, slopes.size() / 2);

  double mean_time = 0;
  double mean_log = 0;
  for (int i = 0; i < n; ++i) {
    mean_time += time[i] / n;
    mean_log += log_value[i] / n;
    residuals.push_back(log_value[i] - trend.slope * time[i]);
  }
  std::vector<double>& sorted = residuals;
  std::nth_element(sorted.begin(), sorted.begin() + n / 2, sorted.end());
  const double intercept = sorted[n / 2];
  trend.log_level = intercept + trend.slope * time[n - 1];
  double left = 0;
  double total = 0;
  double product = 0;
  double last = 0;
  for (int i = 0; i < n; ++i) {
    const double residual = log_value[i] - intercept - trend.slope * time[i];
    left += residual * residual;
    total += (log_value[i] - mean_log) * (log_value[i] - mean_log);
    if (i > 0) product += residual * last;
    last = residual;
  }
  trend.r2 = total > 0 ? std::max(0.0, 1 - left / total) : 0;
  // Residuals that are only rounding tell nothing of correlation.
  const double phi =
      left > 1e-12 * total ? std::clamp(product / left, 0.0, 0.9) : 0;
  const double variance =
      n * (n - 1.0) * (2.0 * n + 5.0) / 18.0 * (1 + phi) / (1 - phi);
  const double sign_sum_shrunk =
      static_cast<double>(sign_sum - ((sign_sum > 0) - (sign_sum < 0)));
  trend.z = sign_sum_shrunk / std::sqrt(variance);

  const double half = 1.2816 * std::sqrt(variance) / 2;  // 80 % of a normal.
  const double middle = static_cast<double>(slopes.size()) / 2;
  const double last_rank = static_cast<double>(slopes.size() - 1);
  trend.slope_lower = NthOf(
      &slopes, static_cast<size_t>(std::clamp(middle - half, 0.0, last_rank)));
  trend.slope_upper = NthOf(
      &slopes, static_cast<size_t>(std::clamp(middle + half, 0.0, last_rank)));
  return trend;
}

Eta EtaTo(const Trend& trend, double level, double steps_max) {
  Eta eta;
  if (trend.points == 0 || trend.slope <= 0) return eta;
  const double distance = std::max(0.0, std::log(level) - trend.log_level);
  eta.steps = distance / trend.slope;
  if (eta.steps > steps_max) return Eta{};
  eta.known = true;
  eta.lower_steps = trend.slope_upper > 0
                        ? std::min(eta.steps, distance / trend.slope_upper)
                        : eta.steps;
  eta.upper_steps = trend.slope_lower > 0
                        ? std::min(steps_max, distance / trend.slope_lower)
                        : steps_max;
  return eta;
}

}  // namespace bellwether::server
