#include "server/detect/impulse.h"

#include <algorithm>
#include <cmath>

#include "server/detect/multiplicity.h"

namespace bellwether::server {

BankReading ImpulseBank::Update(size_t cell, double value) {
  BankReading reading;
  if (!std::isfinite(value)) return reading;
  if (alarming_.empty()) alarming_.assign(cells_, 0);
  BaselineBank::Baseline baseline;
  if (!baselines_.Read(cell, &baseline)) {
    baselines_.Push(cell, value);
    return reading;
  }
  const double z = (value - baseline.mean) / baseline.deviation;
  const bool both = options_.direction == RuleDirection::kBoth;
  reading.scored = true;
  reading.score = both ? std::abs(z) : options_.direction == RuleDirection::kUp ? z : -z;
  reading.mean = baseline.mean;
  reading.deviation = baseline.deviation;
  reading.alarm = reading.score >= options_.sigmas;
  reading.p = std::min(1.0, (both ? 2 : 1) * NormalTail(reading.score));
  if (!reading.alarm) {
    alarming_[cell] = 0;
    baselines_.Push(cell, value);
  } else if (++alarming_[cell] >= options_.relearn) {
    alarming_[cell] = 0;
    baselines_.Forget(cell);
  }
  return reading;
}

void ImpulseBank::ForgetAll() {
  baselines_.ForgetAll();
  std::fill(alarming_.begin(), alarming_.end(), uint16_t{0});
}

}  // namespace bellwether::server
