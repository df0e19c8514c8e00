#include "server/detect/cusum.h"

#include <algorithm>
#include <cmath>

namespace bellwether::server {
namespace {

constexpr double kOvershoot = 0.583;  // Of a normal step beyond a level, in deviations.

}  // namespace

CusumBank::CusumBank(size_t cells, const Options& options)
    : options_(options), cells_(cells), baselines_(cells, options.window) {}

double CusumBank::Score(size_t cell) const {
  switch (options_.direction) {
    case RuleDirection::kUp:
      return up_[cell];
    case RuleDirection::kDown:
      return down_[cell];
    case RuleDirection::kBoth:
      break;
  }
  return std::max(up_[cell], down_[cell]);
}

BankReading CusumBank::Update(size_t cell, double value) {
  BankReading reading;
  if (!std::isfinite(value)) return reading;
  if (up_.empty()) {
    up_.assign(cells_, 0);
    down_.assign(cells_, 0);
    alarming_.assign(cells_, 0);
  }
  BaselineBank::Baseline baseline;
  if (!baselines_.Read(cell, &baseline)) {
    baselines_.Push(cell, value);
    return reading;
  }
  reading.deviation = baseline.deviation * baseline.widening();
  const double z = (value - baseline.mean) / reading.deviation;
  const auto grown = [this](double sum, double by) {
    return static_cast<float>(std::clamp(sum + by - options_.k, 0.0, 2 * options_.h));
  };
  up_[cell] = grown(up_[cell], z);
  down_[cell] = grown(down_[cell], -z);
  reading.scored = true;
  reading.score = Score(cell);
  reading.mean = baseline.mean;
  reading.alarm = reading.score > options_.h;
  const double sides = options_.direction == RuleDirection::kBoth ? 2 : 1;
  reading.p = reading.score > 0 ? std::min(1.0, sides * std::exp(-2 * options_.k * (reading.score + kOvershoot))) : 1;
  if (!reading.alarm) {
    alarming_[cell] = 0;
    if (std::max(up_[cell], down_[cell]) <= options_.h / 2) baselines_.Push(cell, value);
  } else if (++alarming_[cell] >= options_.relearn) {
    alarming_[cell] = 0;
    up_[cell] = down_[cell] = 0;
    baselines_.Forget(cell);
  }
  return reading;
}

void CusumBank::ForgetAll() {
  baselines_.ForgetAll();
  std::fill(up_.begin(), up_.end(), 0.0f);
  std::fill(down_.begin(), down_.end(), 0.0f);
  std::fill(alarming_.begin(), alarming_.end(), uint16_t{0});
}

size_t CusumBank::memory_bytes() const {
  return baselines_.memory_bytes() + (up_.capacity() + down_.capacity()) * sizeof(float) +
         alarming_.capacity() * sizeof(uint16_t);
}

bool CusumBank::Consistent() const {
  const size_t size = up_.size();
  return baselines_.Consistent() && (size == 0 || size == cells_) && down_.size() == size && alarming_.size() == size;
}

}  // namespace bellwether::server
