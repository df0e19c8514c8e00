#include "server/detect/baseline_bank.h"

#include <algorithm>
#include <cmath>

namespace bellwether::server {
namespace {

constexpr double kPhiMax = 0.9;

}  // namespace

double BaselineBank::Baseline::widening() const { return std::sqrt((1 + phi) / (1 - phi)); }

bool BaselineBank::Read(size_t cell, Baseline* baseline) const {
  if (count_.empty() || count_[cell] < window_) return false;
  // A full ring's oldest value is the next to go.
  const auto at = [&](size_t age) {
    return static_cast<double>(values_[(next_[cell] + age) % window_ * cells_ + cell]);
  };
  double sum = 0;
  for (size_t i = 0; i < window_; ++i) sum += at(i);
  const double n = static_cast<double>(window_);
  const double mean = sum / n;
  double squares = 0;
  double products = 0;
  double last = 0;
  for (size_t i = 0; i < window_; ++i) {
    const double off = at(i) - mean;
    squares += off * off;
    products += off * last;
    last = off;
  }
  baseline->mean = mean;
  baseline->deviation = std::max(std::sqrt(squares / (n - 1)), 1e-6 * std::abs(mean) + 1e-12);
  baseline->phi = squares > 0 ? std::clamp(products / squares, 0.0, kPhiMax) : 0;
  return true;
}

void BaselineBank::Push(size_t cell, double value) {
  if (!std::isfinite(value)) return;
  if (count_.empty()) {
    values_.assign(window_ * cells_, 0);
    next_.assign(cells_, 0);
    count_.assign(cells_, 0);
  }
  values_[next_[cell] * cells_ + cell] = static_cast<float>(value);
  next_[cell] = static_cast<uint16_t>((next_[cell] + 1) % window_);
  count_[cell] = static_cast<uint16_t>(std::min<size_t>(count_[cell] + 1u, window_));
}

void BaselineBank::Forget(size_t cell) {
  if (!count_.empty()) count_[cell] = next_[cell] = 0;
}

void BaselineBank::ForgetAll() {
  std::fill(count_.begin(), count_.end(), uint16_t{0});
  std::fill(next_.begin(), next_.end(), uint16_t{0});
}

size_t BaselineBank::memory_bytes() const {
  return values_.capacity() * sizeof(float) + (next_.capacity() + count_.capacity()) * sizeof(uint16_t);
}

bool BaselineBank::Consistent() const {
  if (count_.empty()) return values_.empty() && next_.empty();
  const auto fits = [this](uint16_t n, size_t most) { return n <= most; };
  return values_.size() == window_ * cells_ && next_.size() == cells_ && count_.size() == cells_ &&
         std::all_of(next_.begin(), next_.end(), [&](uint16_t n) { return fits(n, window_ - 1); }) &&
         std::all_of(count_.begin(), count_.end(), [&](uint16_t n) { return fits(n, window_); });
}

}  // namespace bellwether::server
