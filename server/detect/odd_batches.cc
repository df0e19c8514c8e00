#include "server/detect/odd_batches.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "server/detect/neighbours.h"

namespace bellwether::server {
namespace {

constexpr size_t kLeastPast = 32;
// Of a look, that odd batches by chance are so many.
constexpr double kChance = 3e-6;
constexpr double kMemory = 1024;  // Steps, of how often one is odd.
// What a run that has shown no odd batch is taken to have had, of so many steps.
constexpr double kPriorOdd = 0.2, kPriorLooks = 100;
constexpr size_t kFarWindow = 4;
// Scores of the mean, the largest and the repeated share.
constexpr double kOddMean = 3, kOddLargest = 4.5, kOddRepeated = 3;
constexpr double kFarMean = 5, kFarLargest = 6.5, kFarRepeated = 5;
// Of what lies above the mean, or repeats.
constexpr double kBadScore = 2.5;
// Of the mean where labels repeat: they are easy where they are as they should be.
constexpr double kUp = 2;
constexpr double kUsual = 2;
constexpr double kAtOnce = 1.5;  // Times the furthest that neighbours lay apart.
// Times the first loss; that says something once the loss has fallen by so much.
constexpr double kWorseThanChance = 1.1, kLearned = 1.5;
constexpr int32_t kBadLeast = 2;
// What a unit of score is at least: shares of the median, and of all labels.
constexpr std::array<double, 3> kUnitOfMedian = {0.02, 0.05, 0.02};
constexpr double kUnitOfLabels = 0.03;

bool Known(float value) { return std::isfinite(value); }

// Fewest of `window` that chance has at most in kChance of looks, at `rate` each.
int32_t Needed(int32_t least, int32_t window, double rate) {
  double ways = 1;
  for (int32_t k = 1; k <= window; ++k) {
    ways *= static_cast<double>(window - k + 1) / k;
    if (k >= least && ways * std::pow(rate, k) <= kChance) return k;
  }
  return window + 1;
}

}  // namespace

void OddBatches::Recent::Push(float value) {
  if (values.size() < kPast) {
    values.push_back(value);
    return;
  }
  values[next % kPast] = value;
  next = static_cast<uint32_t>((next + 1) % kPast);
}

bool OddBatches::Consistent() const {
  return std::all_of(recent_.begin(), recent_.end(), [](const Recent& r) { return r.values.size() <= kPast; });
}

std::array<float, OddBatches::kSeries> OddBatches::SeriesOf(const Batch& batch) {
  return {batch.mean, batch.largest, batch.largest - batch.mean, batch.repeated};
}

void OddBatches::Add(const std::array<float, kSeries>& values) {
  for (size_t i = 0; i < kSeries; ++i) {
    if (Known(values[i])) recent_[i].Push(values[i]);
  }
}

void OddBatches::Score(const std::array<float, kSeries>& values) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  usual_mean_ = usual_largest_ = kNone;
  for (size_t i = 0; i < kSeries; ++i) {
    scores_[i] = kNone;
    std::array<float, kPast> sorted;
    const std::vector<float>& past = recent_[i].values;
    if (past.size() < kLeastPast || !Known(values[i])) continue;
    std::copy(past.begin(), past.end(), sorted.begin());
    const auto end = sorted.begin() + static_cast<ptrdiff_t>(past.size());
    const auto middle = sorted.begin() + static_cast<ptrdiff_t>(past.size() / 2);
    const auto high = sorted.begin() + static_cast<ptrdiff_t>(past.size() * 9 / 10);
    std::nth_element(sorted.begin(), high, end);
    std::nth_element(sorted.begin(), middle, high);
    const double least = i == kRepeated ? kUnitOfLabels : kUnitOfMedian[i] * std::abs(*middle);
    scores_[i] = (values[i] - *middle) / std::max<double>({*high - *middle, least, 1e-9});
    if (i == kMean) usual_mean_ = *middle;
    if (i == kLargest) usual_largest_ = *middle;
  }
}

bool OddBatches::Leaves(const std::array<float, kSeries>& values) const {
  constexpr std::pair<Series, double> kOdd[] = {{kMean, kOddMean}, {kLargest, kOddLargest}, {kRepeated, kOddRepeated}};
  return std::any_of(std::begin(kOdd), std::end(kOdd), [&](const auto& each) {
    const auto& [series, limit] = each;
    if (!(scores_[series] >= limit)) return false;
    const Recent& recent = recent_[series];
    // The oldest first.
    std::vector<double> past(recent.values.begin() + static_cast<ptrdiff_t>(recent.next), recent.values.end());
    past.insert(past.end(), recent.values.begin(), recent.values.begin() + static_cast<ptrdiff_t>(recent.next));
    return InAnyOrder(past) || values[series] - past.back() >= kAtOnce * FurthestNeighbours(past);
  });
}

void OddBatches::CloseGroup() {
  if (!found_) {
    odd_rate_ += group_;
    far_rate_ += group_far_;
  }
  group_ = group_far_ = 0;
  found_ = false;
  newest_ = {};
}

void OddBatches::Learn(const Batch& batch) {
  if (group_ > 0) CloseGroup();
  quiet_ = 0;
  in_row_ = 0;
  const std::array<float, kSeries> values = SeriesOf(batch);
  if (start_ == 0 && Known(batch.mean)) start_ = batch.mean;
  Score(values);
  Add(values);
}

void OddBatches::Observe(const Batch& batch, int32_t relearn, bool rates_rose) {
  if (found_ && quiet_ == kQuiet) CloseGroup();
  const std::array<float, kSeries> values = SeriesOf(batch);
  if (start_ == 0 && Known(batch.mean)) start_ = batch.mean;
  Score(values);
  const double mean = scores_[kMean], largest = scores_[kLargest], repeated = scores_[kRepeated];
  // A comparison with what is not known is false.
  const bool odd = mean >= kOddMean || largest >= kOddLargest || repeated >= kOddRepeated;
  const bool far = mean >= kFarMean || largest >= kFarLargest || repeated >= kFarRepeated;
  const bool learned = start_ >= kLearned * usual_mean_;
  const bool bad = scores_[kAbove] >= kBadScore || (repeated >= kBadScore && !(mean < kUp)) ||
                   (learned && batch.mean > kWorseThanChance * start_) || (std::isnan(mean) && largest >= kOddLargest);
  looks_ = looks_ * (1 - 1 / kMemory) + 1;
  odd_rate_ *= 1 - 1 / kMemory;
  far_rate_ *= 1 - 1 / kMemory;
  std::rotate(newest_.rbegin(), newest_.rbegin() + 1, newest_.rend());
  newest_[0] = {.level = static_cast<uint8_t>(odd ? (far ? 2 : 1) : 0), .bad = odd && bad};
  if (odd) {
    if (group_ == 0) {
      group_first_ = batch.step;
      group_jumped_ = before_ < kUsual && !rates_rose && Leaves(values);
      worst_mean_ = worst_largest_ = worst_repeated_ = 0;
    }
    group_last_ = batch.step;
    ++group_;
    if (far) ++group_far_;
    quiet_ = 0;
    if (Known(batch.mean)) worst_mean_ = std::max<double>(worst_mean_, batch.mean);
    if (Known(batch.largest)) worst_largest_ = std::max<double>(worst_largest_, batch.largest);
    if (Known(batch.repeated)) worst_repeated_ = std::max<double>(worst_repeated_, batch.repeated);
    const auto number = [this](size_t window, uint8_t level) {
      return static_cast<int32_t>(std::count_if(newest_.begin(), newest_.begin() + static_cast<ptrdiff_t>(window),
                                                [level](const Odd& o) { return o.level >= level; }));
    };
    const auto rate = [this](double count) { return (count + kPriorOdd) / (looks_ + kPriorLooks); };
    const auto bads = std::count_if(newest_.begin(), newest_.end(), [](const Odd& o) { return o.bad; });
    const bool many = number(kFarWindow, 2) >= Needed(2, kFarWindow, rate(far_rate_)) ||
                      number(kQuiet, 1) >= Needed(3, kQuiet, rate(odd_rate_));
    if (group_jumped_ && bads >= kBadLeast && many) found_ = true;
  } else if (group_ > 0 && ++quiet_ == kQuiet && !found_) {
    CloseGroup();
  }
  before_ = std::max(std::isnan(mean) ? 0 : mean, std::isnan(largest) ? 0 : largest);
  in_row_ = odd ? in_row_ + 1 : 0;
  if (in_row_ >= relearn) {  // The new normal.
    for (Recent& recent : recent_) recent = {};
    CloseGroup();
    in_row_ = 0;
    quiet_ = 0;
  }
  if (!odd) Add(values);
}

}  // namespace bellwether::server
