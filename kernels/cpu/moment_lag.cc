// One thread: what a step has of it is less than a thread costs.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backends.h"
#include "cpu/element.h"
#include "moment_lag_parts.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int64_t kChains = 8;  // Of additions that do not wait for each other.

struct Found {
  double lag = 0, saturated = 0;
};

template <typename Grad, typename Moment>
Found LagOf(const MomentLagPart& part, const Grad* g, const Moment* v, double factor) {
  const double step = part.steps + (part.steps_at != nullptr ? static_cast<double>(*part.steps_at) : 0.0);
  const double correction = 1 - std::pow(part.beta2, step);
  const double of_v = part.beta2 / correction, of_square = (1 - part.beta2) / correction;
  const double least = part.eps * part.eps;
  const float largest = LargestOf(part.grad_dtype);
  double lags[kChains] = {}, saturated[kChains] = {};
  for (int64_t from = 0; from < part.count; from += kChains) {
    float x[kChains] = {}, moment[kChains] = {};  // What there is not adds nothing.
    const int64_t there = std::min(kChains, part.count - from);
    for (int64_t i = 0; i < there; ++i) {
      x[i] = ToFloat(g[(from + i) * part.stride]);
      moment[i] = ToFloat(v[(from + i) * part.stride]);
    }
    for (int64_t i = 0; i < kChains; ++i) {
      const bool finite = std::fabs(x[i]) < INFINITY && std::fabs(moment[i]) < INFINITY;
      const double value = finite ? static_cast<double>(x[i]) * factor : 0;
      const double square = value * value;
      const double expected = std::max(of_v * static_cast<double>(finite ? moment[i] : 0) + of_square * square, least);
      lags[i] += square > 0 ? square / expected : 0;
      saturated[i] += std::fabs(x[i]) < largest ? 0 : 1;  // No NaN is.
    }
  }
  Found found;
  for (const double lag : lags) found.lag += lag;
  for (const double count : saturated) found.saturated += count;
  found.lag /= static_cast<double>(part.count);
  return found;
}

}  // namespace

Status MomentLags(const MomentLagsParams& p) {
  if (p.skip != nullptr && *p.skip > 0) return Status::kOk;
  const double factor = p.scale != nullptr ? 1 / static_cast<double>(*p.scale) : 1.0;
  for (int64_t i = 0; i < p.count; ++i) {
    const MomentLagPart& part = p.parts[i];
    if (part.grad == nullptr) continue;
    double* const out = p.out + i * kMomentLagStatCount;
    WithElement(part.grad_dtype, [&]<typename Grad>(const Grad*) {
      WithElement(part.second_dtype, [&]<typename Moment>(const Moment*) {
        const Found found =
            LagOf(part, static_cast<const Grad*>(part.grad), static_cast<const Moment*>(part.second), factor);
        out[kMomentLagMax] = std::max(out[kMomentLagMax], found.lag);
        out[kMomentLagSaturated] += found.saturated;
      });
    });
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
