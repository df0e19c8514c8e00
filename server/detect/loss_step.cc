#include "server/detect/loss_step.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/announced_change.h"
#include "server/detect/median.h"

namespace bellwether::server {
namespace {

constexpr size_t kFewest = 10, kMost = 64, kBefore = 64, kBeforeLeast = 32;
constexpr size_t kEach = 20;                         // Up to so many each number is asked for, then every second one.
constexpr size_t kEdge = 4;                          // Losses at the edges of what is new,
constexpr size_t kFoot = 8;                          // and before it.
constexpr double kCut = 3;                           // Deviations.
constexpr double kEdgePart = 0.4, kRisesPart = 0.5;  // Of the rise.
constexpr double kSlackPart = 0.15;                  // Of the rise, where the scatter is less.
constexpr double kAbove = 0.75;
constexpr double kLikelier = 2, kLikeliest = 4;  // Logarithms.
constexpr double kLikelierPart = 0.08;           // Of the squared standard errors of the rise.
constexpr size_t kRampBefore = 32;
// A rise is so many times how far the past has wandered, by means of so many.
constexpr double kWanders = 3;
constexpr size_t kBlock = 16;
constexpr size_t kRampEach = 2;
constexpr double kBack = 0.3;             // Of the rise: it is over.
constexpr int32_t kHeldMax = 1000;        // Then it is the new normal.
constexpr double kExplainedLeast = 1e-4;  // Deviation of the share, below which it explains nothing.

struct Moments {
  double mean = 0, variance = 0;
};

template <class It>
Moments MomentsOf(It begin, It end) {
  const auto count = static_cast<double>(end - begin);
  Moments found;
  found.mean = std::accumulate(begin, end, 0.0) / count;
  for (It it = begin; it != end; ++it) found.variance += (*it - found.mean) * (*it - found.mean) / count;
  return found;
}

template <class It>
double Middle(It begin, It end) {
  return MedianOr(0, {begin, end});
}

double Squares(const std::vector<double>& values, size_t begin, size_t end) {
  const auto at = [&values](size_t i) { return values.begin() + static_cast<ptrdiff_t>(i); };
  return begin == end ? 0 : MomentsOf(at(begin), at(end)).variance * static_cast<double>(end - begin);
}

// Whether two levels are likelier than one that rises from some value on, by kLikelier, around the change.
bool IsStep(const std::vector<double>& all_values, size_t count, double likelier) {
  const size_t before = std::min(all_values.size() - count, std::max(kRampBefore, 2 * count));
  const std::vector<double> values(all_values.end() - static_cast<ptrdiff_t>(count + before), all_values.end());
  const size_t size = values.size();
  const double step = Squares(values, 0, before) + Squares(values, before, size);
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(size);
  const double all = Squares(values, 0, size);
  double ramp = all;
  for (size_t from = 0; from + 2 < size; from += kRampEach) {
    const auto rising = static_cast<double>(size - from);
    const double x_mean = rising * (rising - 1) / 2 / static_cast<double>(size);
    double together = 0, square = 0;
    for (size_t i = 0; i < size; ++i) {
      const double x = (i < from ? 0 : static_cast<double>(i - from)) - x_mean;
      together += x * (values[i] - mean);
      square += x * x;
    }
    ramp = std::min(ramp, all - together * together / square);
  }
  return static_cast<double>(size) / 2 * std::log(std::max(ramp, 1e-300) / std::max(step, 1e-300)) >= likelier;
}

// A past that wanders looks like steps more easily: its scatter is more than that of neighbours.  And the surer a
// rise is, the surer can it be that it came at once.
double Likelier(const std::vector<double>& values, size_t count, const Moments& before, double errors) {
  const size_t old = values.size() - count;
  double neighbours = 0;
  for (size_t i = 1; i < old; ++i) {
    neighbours += (values[i] - values[i - 1]) * (values[i] - values[i - 1]) / static_cast<double>(2 * (old - 1));
  }
  const double wanders = std::max(1.0, before.variance / std::max(neighbours, 1e-300));
  return std::clamp(kLikelierPart * errors * errors, kLikelier, kLikeliest) * wanders * wanders;
}

// By how much the highest mean of a block of the past is above the past, scatter taken off.
double WanderOf(const std::vector<double>& values, size_t count, const Moments& before) {
  const size_t old = values.size() - count, block = std::min(count, kBlock);
  double highest = before.mean;
  for (size_t end = old; end >= block; end -= block) {
    const auto last = values.begin() + static_cast<ptrdiff_t>(end);
    highest = std::max(highest, MomentsOf(last - static_cast<ptrdiff_t>(block), last).mean);
  }
  return highest - before.mean - std::sqrt(before.variance / static_cast<double>(block));
}

// Where the last `size` values change their mean, near the newest `count`.
size_t Placed(const std::vector<double>& values, size_t count) {
  size_t best = count;
  double least = std::numeric_limits<double>::infinity();
  for (size_t i = count > kFoot + kEdge ? count - kFoot : kEdge; i <= count + kFoot && i + kFoot < values.size(); ++i) {
    const double squares = Squares(values, 0, values.size() - i) + Squares(values, values.size() - i, values.size());
    if (squares >= least) continue;
    least = squares;
    best = i;
  }
  return best;
}

// Few values are of one stretch of the data more easily: 1.5 more at 10, none from 20 on.
double MoreOfFew(size_t count) { return count >= kEach ? 0 : 0.15 * static_cast<double>(kEach - count); }

}  // namespace

bool LossStep::Consistent() const { return newest_.size() <= kMost + kBefore && higher_.Consistent(); }

void LossStep::Forget() {
  const LossOptions options = options_;
  *this = LossStep(options);
}

LossStep::Step LossStep::StepOf(const std::vector<double>& values, size_t count) const {
  const auto old_begin = values.begin(), begin = values.end() - static_cast<ptrdiff_t>(count), end = values.end();
  const double level = Middle(old_begin, begin);
  std::vector<double> off;
  off.reserve(values.size() - count);
  for (auto it = old_begin; it != begin; ++it) off.push_back(std::abs(*it - level));
  const double deviation = kDeviationOfMedian * MedianOr(0, std::move(off)) + 1e-9 * std::abs(level);
  std::vector<double> cut = values;
  for (double& value : cut) value = std::clamp(value, level - kCut * deviation, level + kCut * deviation);
  const auto middle = cut.end() - static_cast<ptrdiff_t>(count);
  const Moments before = MomentsOf(cut.begin(), middle), after = MomentsOf(middle, cut.end());
  const double rise = after.mean - before.mean;
  const double variance = std::max(before.variance, 0.64 * after.variance);
  const double error =
      std::sqrt(variance * (1.0 / static_cast<double>(count) + 1.0 / static_cast<double>(values.size() - count)));
  if (rise < options_.step_rise_of_level * std::abs(level) || rise < (options_.step_sigma + MoreOfFew(count)) * error) {
    return {};
  }
  if (rise < kWanders * WanderOf(cut, count, before)) return {};
  // By their middle, which some that are far off do not move.
  const double higher = std::max(rise, Middle(begin, end) - level);
  const auto half = static_cast<ptrdiff_t>(count / 2);
  constexpr auto edge = static_cast<ptrdiff_t>(kEdge), foot = static_cast<ptrdiff_t>(kFoot);
  const double slack = std::max(kSlackPart * higher, std::sqrt(variance));
  const double low = level + std::min(kEdgePart * higher, slack);
  const double high = level + higher - std::min((1 - kEdgePart) * higher, 1.5 * slack);
  const auto above = std::count_if(begin, end, [level](double value) { return value > level; });
  const bool sharp = Middle(begin - foot, begin) <= low && Middle(begin, begin + edge) >= high;
  const bool lasting = Middle(end - edge, end) >= level + kEdgePart * higher &&
                       static_cast<double>(above) >= kAbove * static_cast<double>(count);
  const bool flat = Middle(end - half, end) - Middle(begin, begin + half) <= kRisesPart * higher;
  if (!sharp || !lasting || !flat || !IsStep(cut, count, Likelier(cut, count, before, rise / error))) return {};
  return {.score = rise / error - MoreOfFew(count), .level = level, .rise = Middle(begin, end) - level};
}

std::vector<double> LossStep::Explained(size_t count) const {
  const size_t size = std::min(newest_.size(), count + kBefore), first = newest_.size() - size;
  const size_t old = size - count;
  double low = 1, high = 0, mean_share = 0, mean_loss = 0;
  std::vector<double> losses;
  losses.reserve(size);
  for (size_t i = first; i < newest_.size(); ++i) {
    if (!std::isfinite(newest_[i].repeated)) return {};
    losses.push_back(newest_[i].loss);
    if (losses.size() > old) continue;
    low = std::min<double>(low, newest_[i].repeated);
    high = std::max<double>(high, newest_[i].repeated);
    mean_share += newest_[i].repeated / static_cast<double>(old);
    mean_loss += newest_[i].loss / static_cast<double>(old);
  }
  double together = 0, square = 0;
  for (size_t i = 0; i < old; ++i) {
    const double share = newest_[first + i].repeated - mean_share;
    together += share * (losses[i] - mean_loss);
    square += share * share;
  }
  if (square < kExplainedLeast * kExplainedLeast * static_cast<double>(old)) return {};
  // What repeats is easy.
  const double slope = std::min(0.0, together / square);
  for (size_t i = 0; i < size; ++i) {
    losses[i] -= slope * (std::clamp<double>(newest_[first + i].repeated, low, high) - mean_share);
  }
  return losses;
}

void LossStep::Look() {
  Step best;
  size_t best_count = 0;
  double sum_new = 0;
  size_t taken = 0;
  for (size_t count = kFewest; count <= kMost && count + kBeforeLeast <= newest_.size();
       count += count < kEach ? 1 : 2) {
    for (; taken < count; ++taken) sum_new += newest_[newest_.size() - 1 - taken].loss;
    const size_t size = std::min(newest_.size(), count + kBefore);
    double sum_old = 0;
    for (size_t i = newest_.size() - size; i < newest_.size() - count; ++i) sum_old += newest_[i].loss;
    const double old = sum_old / static_cast<double>(size - count), now = sum_new / static_cast<double>(count);
    // Most losses fall: this is all that is asked of them.
    if (now - old < 0.5 * options_.step_rise_of_level * std::abs(old)) continue;
    std::vector<double> losses;
    losses.reserve(size);
    for (size_t i = newest_.size() - size; i < newest_.size(); ++i) losses.push_back(newest_[i].loss);
    const std::vector<double> explained = Explained(count);
    for (const std::vector<double>& values : {std::cref(losses), std::cref(explained)}) {
      if (values.empty()) continue;
      const Step found = StepOf(values, count);
      if (found.score <= best.score) continue;
      best = found;
      best_count = Placed(losses, count);
    }
  }
  if (best_count == 0) return;
  holds_ = true;
  held_ = 0;
  since_ = newest_[newest_.size() - best_count].step;
  level_ = best.level;
  value_ = best.level + best.rise;
  limit_ = best.level + options_.step_rise_of_level * std::abs(best.level);
}

void LossStep::Observe(int64_t step, float loss, float repeated, bool looks) {
  if (!std::isfinite(loss)) return;
  if (!(loss > 0)) return Forget();
  if (!looks && !holds()) return;
  higher_.Observe(step, loss, options_.step_rise_of_level * loss);
  if (newest_.size() == kMost + kBefore) newest_.erase(newest_.begin());
  newest_.push_back({.step = step, .loss = loss, .repeated = repeated});
  if (!holds_) return Look();
  std::vector<double> last;
  for (size_t i = newest_.size() - kFoot; i < newest_.size(); ++i) last.push_back(newest_[i].loss);
  const double now = MedianOr(0, std::move(last));
  if (now < level_ + kBack * (value_ - level_) || ++held_ >= kHeldMax) {
    holds_ = false;
    newest_.assign({{.step = step, .loss = loss, .repeated = repeated}});
  }
}

void LossStep::Find(std::vector<Finding>* found) const {
  const auto warns = [](const Finding& finding) { return finding.severity >= Severity::kWarning; };
  if (!higher_.holds() || std::any_of(found->begin(), found->end(), warns)) return;
  Finding finding = Finding::OfRun(Rule::kLoss, Severity::kWarning,
                                   {.signal = "loss",
                                    .value = higher_.value(),
                                    .threshold = higher_.highest(),
                                    .baseline = higher_.level(),
                                    .first_step = higher_.since(),
                                    .detector = kRankDetector});
  found->insert(found->begin(), std::move(finding));
}

void LossStep::Name(std::vector<Finding>* found) const {
  if (!holds()) return;
  const double level = holds_ ? level_ : higher_.level();
  const double value = holds_ ? value_ : higher_.value();
  for (Finding& finding : *found) {
    if (finding.severity < Severity::kWarning || !finding.cause.empty()) continue;
    finding.cause = "step change of the loss";
    finding.summary =
        absl::StrFormat("the loss has jumped from %.3g to %.3g at step %s and stays", level, value, StepWords(since()));
    finding.note = finding.summary;
    finding.advice = absl::StrCat(
        "Look at what changed at step ", StepWords(since()),
        ": the data and its labels, dropout, the loss itself. If it was not on purpose, go back to a checkpoint from "
        "before it.");
  }
}

}  // namespace bellwether::server
