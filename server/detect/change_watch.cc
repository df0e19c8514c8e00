#include "server/detect/change_watch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/detect/median.h"

namespace bellwether::server {
namespace {

constexpr size_t kNewestMax = 64;
constexpr size_t kNewestMin = 8;  // Fewer values are no level.
constexpr size_t kCurveMax = 128;
constexpr size_t kValueOf = 5;  // The loss now is the median of so many values.

double MedianOfNewest(const std::vector<float>& values, size_t count) {
  const size_t n = std::min(count, values.size());
  return MedianOr(0, {values.end() - static_cast<ptrdiff_t>(n), values.end()});
}

double SpreadOf(const std::vector<float>& values, double level) {
  std::vector<double> off;
  for (const float value : values) off.push_back(std::abs(value - level));
  return kDeviationOfMedian * MedianOr(0, std::move(off));
}

}  // namespace

void ChangeWatch::Observe(int64_t step, float loss) {
  if (!std::isfinite(loss)) return;
  last_step_ = step;
  if (newest_.size() == kNewestMax) newest_.erase(newest_.begin());
  newest_.push_back(loss);
  if (curve_steps_.empty() || step - curve_steps_.back() >= curve_stride_) {
    if (curve_.size() == kCurveMax) {
      for (size_t i = 1; 2 * i < kCurveMax; ++i) {
        curve_steps_[i] = curve_steps_[2 * i];
        curve_[i] = curve_[2 * i];
      }
      curve_steps_.resize(kCurveMax / 2);
      curve_.resize(kCurveMax / 2);
      curve_stride_ *= 2;
    }
    curve_steps_.push_back(step);
    curve_.push_back(static_cast<float>(MedianOfNewest(newest_, kNewestMax)));
  }

  if (!known_ || (!holds_ && step > until_)) return;
  const double rise = holds_ ? HoldRise() : BeginRise();
  if (rise > 0 && loss > level_ + rise) {
    if (above_ == 0 && !holds_) since_ = step;
    ++above_;
    below_ = 0;
    holds_ = holds_ || (above_ > 1 && step - since_ >= options_.change_hold_steps);
  } else {
    above_ = 0;
    ++below_;
    if (holds_ && below_ > options_.change_hold_steps) holds_ = false;
  }
}

bool ChangeWatch::start_is_known() const { return gain() >= options_.change_rise_of_level * std::abs(level_); }

double ChangeWatch::LostRise() const {
  return start_is_known() ? options_.change_lost_of_gain * gain() : options_.change_lost_of_level * std::abs(level_);
}

double ChangeWatch::BeginRise() const {
  const double far = std::max(options_.change_rise_of_gain * gain(), options_.change_rise_of_level * std::abs(level_));
  double noise = spread_;
  // Fewer sequences a batch: the values scatter more and mean the same.
  if (change_.kind == EventKind::kBatchSize) noise = std::max(noise, ScatterOfNeighbours(newest_));
  return std::max(may_move_ ? LostRise() : std::min(far, LostRise()), options_.rise_sigma * noise);
}

double ChangeWatch::HoldRise() const {
  if (may_move_) return BeginRise();
  const double off_course = std::max(options_.rise_of_gain * gain(), options_.rise_of_minimum * std::abs(level_));
  return std::min(BeginRise(), std::max(off_course, options_.rise_sigma * spread_));
}

double ChangeWatch::LevelAt(int64_t step) const {
  // The entry before it: losses fall, so that is rather too high than too low.
  size_t at = 0;
  while (at + 1 < curve_steps_.size() && curve_steps_[at + 1] <= step) ++at;
  return curve_[at];
}

void ChangeWatch::Keep(double level, double spread, double start) {
  known_ = true;
  level_ = level;
  spread_ = spread;
  start_ = std::max(start, level);
}

void ChangeWatch::BeginAnew() {
  holds_ = false;
  above_ = below_ = 0;
}

bool ChangeWatch::Announce(const AnnouncedChange& change, double start, const LossCourse& course,
                           int64_t settle_steps) {
  const bool restored = change.kind == EventKind::kRestore;
  const bool off_course = course.off_since >= 0;
  if (restored && !curve_.empty() && change.to >= 0 && change.to <= static_cast<double>(last_step_)) {
    // The checkpoint is of behind the rise.
    if (off_course && change.to >= static_cast<double>(course.off_since)) return true;
    const double spread =
        newest_.size() < kNewestMin ? spread_ : SpreadOf(newest_, MedianOfNewest(newest_, kNewestMax));
    // An exploded loss scatters; the spread of before it is kept.
    Keep(LevelAt(static_cast<int64_t>(change.to)), holds_ ? spread_ : off_course ? course.scatter : spread, start);
    may_move_ = false;
    of_checkpoint_ = true;
    change_ = change;
    kept_step_ = change.step;
    until_ = change.step + options_.change_steps;
    newest_.clear();
    BeginAnew();
    return false;
  }
  // The same restore, told again and with less.
  if (restored && of_checkpoint_ && change.step - kept_step_ <= settle_steps) return false;
  // What has risen with one change is not excused by the next.
  if (holds_ && !restored) return true;
  const bool may_move = restored || change.kind == EventKind::kData || change.kind == EventKind::kSequenceLength;
  const bool settled = !known_ || change.step - kept_step_ > settle_steps;
  if (settled && !holds_ && newest_.size() >= kNewestMin) {
    const double value = MedianOfNewest(newest_, kValueOf);
    double level = MedianOfNewest(newest_, kNewestMax);
    double spread = SpreadOf(newest_, level);
    if (off_course && course.minimum < level) {
      level = course.minimum;
      spread = course.scatter;
    }
    Keep(level, spread, start);
    kept_step_ = change.step;
    may_move_ = may_move;
    of_checkpoint_ = false;
    change_ = change;
    BeginAnew();
    if (off_course && !restored && value > level_ + BeginRise()) {
      known_ = false;
      return true;
    }
    newest_.clear();
  } else if (!known_) {
    return false;
  } else if (change.kind == EventKind::kLearningRate && change_.kind == EventKind::kLearningRate && !settled) {
    if (!std::isfinite(change_.from)) change_.from = change.from;
    if (std::isfinite(change.to)) change_.to = change.to;
  } else {
    may_move_ = may_move || (may_move_ && !settled);
    if (settled || restored || change_.kind != EventKind::kLearningRate) change_ = change;
  }
  if (restored) {
    kept_step_ = change.step;
    of_checkpoint_ = false;
    BeginAnew();
  }
  until_ = change.step + options_.change_steps;
  return false;
}

bool ChangeWatch::Rewind(int64_t step, double start, const LossCourse& course) {
  const bool risen =
      Announce({.kind = EventKind::kRestore, .step = step, .to = static_cast<double>(step)}, start, course, 0);
  while (curve_steps_.size() > 1 && curve_steps_.back() > step) {
    curve_steps_.pop_back();
    curve_.pop_back();
  }
  last_step_ = std::min(last_step_, step);
  return risen;
}

void ChangeWatch::Find(int64_t step, std::vector<Finding>* out) const {
  if (!holds_) return;
  const double value = MedianOfNewest(newest_, kValueOf);
  const double rise = HoldRise();
  const int64_t lasted = step - since_;
  const bool lost = start_is_known() && value >= level_ + LostRise();
  const bool critical = may_move_ ? lasted >= options_.persist_steps : lost || lasted >= options_.critical_steps;
  Finding& finding = out->emplace_back(Finding::OfRun(Rule::kLoss, critical ? Severity::kCritical : Severity::kWarning,
                                                      {.signal = "loss",
                                                       .value = value,
                                                       .threshold = level_ + rise,
                                                       .baseline = level_,
                                                       .first_step = since_,
                                                       .detector = "level before"}));
  finding.stage = 5;
  finding.summary = absl::StrFormat("the loss has gone from %.2g to %.2g after %s", level_, value, WordsOf(change_));
  finding.note = finding.summary;
  finding.advice = AdviceOn(change_);
  if (change_.kind == EventKind::kLearningRate && change_.to > change_.from) finding.cause = "learning rate too high";
}

bool ChangeWatch::Consistent() const {
  return newest_.size() <= kNewestMax && curve_.size() <= kCurveMax && curve_.size() == curve_steps_.size() &&
         curve_stride_ >= 1;
}

}  // namespace bellwether::server
