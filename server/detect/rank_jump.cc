#include "server/detect/rank_jump.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/detect/median.h"
#include "server/detect/neighbours.h"

namespace bellwether::server {
namespace {

constexpr double kRankBack = 0.3;       // Of what lies between the past's middle and its highest.
constexpr int32_t kRankHeldMax = 1000;  // Values; then it is the new normal.
constexpr ptrdiff_t kRankFoot = 8, kRankEdge = 4, kRankHalf = 4;
constexpr double kRankLow = 0.3, kRankHigh = 0.6, kRankRises = 0.4;  // Of the rise.
constexpr double kRankFar = 1.5;                                     // Times as far as the highest of the past,
constexpr double kRankWanders = 2;                                   // and as the past has wandered.
constexpr int32_t kRankWanderEach = 5;                               // Values.
constexpr float kRankForgets = 0.99f;                                // Each time.

template <class It>
double MiddleOf(It begin, It end) {
  std::vector<double> values;
  std::transform(begin, end, std::back_inserter(values), [](const auto& each) { return each.value; });
  return MedianOr(0, std::move(values));
}

}  // namespace

void RankJump::Forget() {
  values_.clear();
  since_ = -1;
  held_ = 0;
  wandered_ = 0;
}

// Of the past alone, which knows nothing of a jump that has just come.
void RankJump::Wander() {
  if (values_.size() < kRankPast + kRankNewest || ++held_ < kRankWanderEach) return;
  held_ = 0;
  const auto end = values_.begin() + kRankPast, newest = end - static_cast<ptrdiff_t>(kRankNewest);
  const double above = MiddleOf(newest, end) - MiddleOf(values_.begin(), newest);
  wandered_ = std::max(kRankForgets * wandered_, static_cast<float>(above));
}

double RankJump::NewestMiddle() const {
  const auto size = static_cast<ptrdiff_t>(std::min(values_.size(), kRankNewest));
  return MiddleOf(values_.end() - size, values_.end());
}

void RankJump::Look(double least) {
  if (values_.size() < kRankPast + kRankNewest) return;
  const auto old_end = values_.begin() + kRankPast;
  const auto by_value = [](const Value& a, const Value& b) { return a.value < b.value; };
  const float highest = std::max_element(values_.begin(), old_end, by_value)->value;
  const auto is_higher = [highest](const Value& each) { return each.value > highest; };
  if (std::count_if(old_end, values_.end(), is_higher) < static_cast<ptrdiff_t>(kRankHigher)) return;
  const double level = MiddleOf(values_.begin(), old_end), value = NewestMiddle();
  if (value - level < std::max({least, kRankFar * (highest - level), kRankWanders * wandered_})) return;
  const auto first = std::find_if(old_end, values_.end(), is_higher);
  const double rise = value - level;
  const bool sharp = MiddleOf(old_end - kRankFoot, old_end) <= level + kRankLow * rise &&
                     MiddleOf(first, first + kRankEdge) >= level + kRankHigh * rise;
  const bool flat =
      MiddleOf(values_.end() - kRankHalf, values_.end()) - MiddleOf(first, first + kRankHalf) <= kRankRises * rise;
  if (!sharp || !flat) return;
  std::vector<double> past;
  std::transform(values_.begin(), old_end, std::back_inserter(past), [](const Value& each) { return each.value; });
  const double at_once = static_cast<double>(first->value) - (first - 1)->value;
  if (!InAnyOrder(past) && at_once < kRankFar * FurthestNeighbours(past)) return;
  since_ = first->step;
  held_ = 0;
  level_ = level;
  highest_ = highest;
  value_ = value;
}

void RankJump::Observe(int64_t step, double value, double least) {
  if (values_.size() == kRankPast + kRankNewest) values_.erase(values_.begin());
  values_.push_back({.step = step, .value = static_cast<float>(value)});
  if (!holds()) {
    Wander();
    return Look(least);
  }
  value_ = NewestMiddle();
  if (value_ < level_ + kRankBack * (highest_ - level_) || ++held_ >= kRankHeldMax) Forget();
}

}  // namespace bellwether::server
