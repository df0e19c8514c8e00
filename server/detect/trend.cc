#include "server/detect/trend.h"

#include <algorithm>
#include <cmath>

namespace bellwether::server {

Eta EtaTo(const Trend& trend, double level, double steps_max) {
  Eta eta;
  if (trend.points == 0 || trend.slope <= 0) return eta;
  const double distance = std::max(0.0, std::log(level) - trend.log_level);
  eta.steps = distance / trend.slope;
  if (eta.steps > steps_max) return Eta{};
  eta.known = true;
  eta.lower_steps = trend.slope_upper > 0 ? std::min(eta.steps, distance / trend.slope_upper) : eta.steps;
  eta.upper_steps = trend.slope_lower > 0 ? std::min(steps_max, distance / trend.slope_lower) : steps_max;
  return eta;
}

}  // namespace bellwether::server
