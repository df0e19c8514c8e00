#include "bellwether/kernels/trend.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "trend_parts.h"

namespace bellwether::kernels {
namespace {

double NthOf(std::vector<double>* values, size_t n) {
  const auto at = values->begin() + static_cast<ptrdiff_t>(n);
  std::nth_element(values->begin(), at, values->end());
  return *at;
}

}  // namespace

double Trend::doubling_steps() const { return slope > 0 ? kLn2 / slope : std::numeric_limits<double>::infinity(); }

Trend FitTrend(const float* values, const float* steps, int count, int points_min, double r2_min,
               TrendScratch* scratch) {
  auto& time = scratch->time;
  auto& log_value = scratch->log_value;
  auto& slopes = scratch->slopes;
  auto& residuals = scratch->residuals;
  time.clear();
  log_value.clear();
  slopes.clear();
  residuals.clear();
  for (int i = 0; i < count; ++i) {
    if (!IsPositive(values[i])) continue;
    time.push_back(steps[i]);
    log_value.push_back(LogOf(values[i]));
  }
  Trend trend;
  const int n = static_cast<int>(time.size());
  if (n < std::max(points_min, 3)) return trend;
  if (LeastSquaresR2(time.data(), log_value.data(), n) < r2_min) return trend;
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
  for (int i = 0; i < n; ++i) residuals.push_back(log_value[i] - trend.slope * time[i]);
  const double intercept = NthOf(&residuals, static_cast<size_t>(n / 2));
  trend.log_level = intercept + trend.slope * time[n - 1];
  const LineFit fit = FitOfLine(time.data(), log_value.data(), n, trend.slope, intercept);
  trend.r2 = fit.r2;
  trend.z = Shrunk(sign_sum) / std::sqrt(fit.variance);

  const double half = 1.2816 * std::sqrt(fit.variance) / 2;  // 80 % of a normal.
  const double middle = static_cast<double>(slopes.size()) / 2;
  const double last_rank = static_cast<double>(slopes.size() - 1);
  trend.slope_lower = NthOf(&slopes, static_cast<size_t>(std::clamp(middle - half, 0.0, last_rank)));
  trend.slope_upper = NthOf(&slopes, static_cast<size_t>(std::clamp(middle + half, 0.0, last_rank)));
  return trend;
}

}  // namespace bellwether::kernels
