#include "server/detect/tensor_pasts.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"

namespace bellwether::server {
namespace {

// Parameters that are named; of further ones their number is told.
constexpr size_t kParametersNamedMax = 8;
// That a sample must cover, with a past each, so that what they share is known.
constexpr size_t kPeersMin = 8;
constexpr double kScale = 256;

struct PastSignal {
  SignalId told, numerator, denominator;  // The squares of the two; kNone: 1.
  bool may_fall;                          // Without being off.
  const char* words;
};
constexpr PastSignal kPastSignals[] = {
    {SignalId::kTensorGradNorm, SignalId::kTensorGradSumsq, SignalId::kNone, false, "gradient norm"},
    {SignalId::kTensorUpdateRatio, SignalId::kTensorChangeSumsq, SignalId::kTensorChangeWeightSumsq, true,
     "update ratio"},
    {SignalId::kTensorMomentLag, SignalId::kTensorLagSum, SignalId::kTensorElements, true, "second-moment lag"},
};
constexpr size_t kUpdateRatio = 1;

int16_t Kept(double x) { return static_cast<int16_t>(std::lround(std::clamp(x * kScale, -32767.0, 32767.0))); }

// Of what it is held against; `none` where there is nothing.
template <class Past>
double Middle(const Past& past, double none) {
  return past.known() ? 0.5 * (past.low() + past.high()) / kScale : none;
}

}  // namespace

void TensorPasts::Rewind() {
  for (Signal& signal : signals_) {
    signal.rows.assign(signal.rows.size(), {});
    signal = {.rows = std::move(signal.rows)};
  }
  excused_ = false;
  news_ = {};
  findings_.clear();
}

size_t TensorPasts::memory_bytes() const {
  size_t bytes = 0;
  for (const Signal& signal : signals_) bytes += signal.rows.capacity() * sizeof(Series);
  return bytes;
}

bool TensorPasts::Consistent() const {
  return std::all_of(signals_.begin(), signals_.end(), [](const Signal& signal) {
    return signal.rows.size() <= static_cast<size_t>(kNamedRowsMax) && signal.all.past.Consistent() &&
           signal.waiting.size() < kPeersMin &&
           std::ranges::all_of(signal.waiting, [&](const Covered& one) { return one.row < signal.rows.size(); }) &&
           std::all_of(signal.rows.begin(), signal.rows.end(),
                       [](const Series& series) { return series.past.Consistent(); });
  });
}

TensorPasts::Limits TensorPasts::LimitsOf(const Series& series, double rise, bool may_fall) const {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  const Past& past = series.past;
  if (!past.known()) return {-kNone, kNone};
  const double low = past.low() / kScale, high = past.high() / kScale;
  const double reach = options_.range_factor * (high - low);
  const double up = std::max(high + std::max(reach, std::log(rise)), series.burst_high / kScale + std::log(rise));
  const double fall = std::log(options_.fall_factor);
  const double down = std::min(low - std::max(reach, fall), series.burst_low / kScale - fall);
  return {may_fall ? -kNone : down, up};
}

bool TensorPasts::Take(double x, const Limits& limits, int64_t step, Series* series) {
  // A change is learnt, but where something is off already: that would be learnt, too.
  if (excused_ && series->off > 0) return false;
  if (excused_ || (x >= limits.low && x <= limits.high)) {
    // What was over before it counted is no news when it comes again.
    if (series->off > 0 && series->off < options_.hold_samples) {
      if (series->last > series->past.high()) series->burst_high = std::max(series->burst_high, series->last);
      if (series->last < series->past.low()) series->burst_low = std::min(series->burst_low, series->last);
    }
    series->off = 0;
    series->past.Add(Kept(x));
    return false;
  }
  if (series->off++ == 0) series->since = static_cast<uint32_t>(step);
  if (series->off >= options_.relearn_samples) {
    *series = {};
    return false;
  }
  // The furthest that it was.
  const int16_t kept = Kept(x);
  series->last = series->off == 1  ? kept
                 : x > limits.high ? std::max(series->last, kept)
                                   : std::min(series->last, kept);
  if (series->off < options_.hold_samples) return false;
  any_news_ |= series->off == options_.hold_samples;
  return true;
}

void TensorPasts::Judge(size_t which, const StepSample& sample) {
  const PastSignal& info = kPastSignals[which];
  const auto over = sample.matrix(info.numerator);
  const bool divided = info.denominator != SignalId::kNone;
  const auto under = divided ? sample.matrix(info.denominator) : over;
  if (over.empty() || under.size() != over.size()) return;
  seen_ = true;
  Signal& signal = signals_[which];
  const size_t size = std::min(over.size(), static_cast<size_t>(kNamedRowsMax));
  if (signal.rows.size() < size) signal.rows.resize(size);
  covered_.clear();
  without_past_.clear();
  for (size_t i = 0; i < size; ++i) {
    // A tensor without a gradient, or that does not move, has no logarithm.
    if (!IsAbove0(over[i]) || (divided && !IsAbove0(under[i]))) continue;
    const double log = 0.5 * (std::log(over[i]) - (divided ? std::log(under[i]) : 0));
    (signal.rows[i].past.empty() ? without_past_ : covered_)
        .push_back({.row = static_cast<uint32_t>(i),
                    .step = static_cast<uint32_t>(sample.step),
                    .log = static_cast<float>(log)});
  }
  if (covered_.size() < kPeersMin && size >= kPeersMin) {
    // What comes again before there are enough has waited for a whole turn.
    const auto again = [&signal](const Covered& each) {
      return std::ranges::any_of(signal.waiting, [&each](const Covered& one) { return one.row == each.row; });
    };
    if (std::ranges::any_of(covered_, again)) JudgeWaiting(which);
    signal.waiting.insert(signal.waiting.end(), covered_.begin(), covered_.end());
    covered_.clear();
    if (signal.waiting.size() >= kPeersMin) covered_.swap(signal.waiting);
  }
  if (covered_.size() >= kPeersMin) JudgeShared(which, sample.step);
  for (const std::vector<Covered>* const each : {&covered_, &without_past_}) {
    for (const Covered& covered : *each) JudgeRow(which, covered);
  }
}

void TensorPasts::JudgeShared(size_t which, int64_t step) {
  const PastSignal& info = kPastSignals[which];
  Signal& signal = signals_[which];
  moved_.clear();
  for (const Covered& covered : covered_) {
    moved_.push_back(covered.log - signal.rows[covered.row].past.middle() / kScale);
  }
  const auto middle = moved_.begin() + static_cast<ptrdiff_t>(moved_.size() / 2);
  std::nth_element(moved_.begin(), middle, moved_.end());
  signal.shared = static_cast<float>(*middle);
  Limits limits = LimitsOf(signal.all, options_.shared_factor, info.may_fall);
  if (which == kUpdateRatio) limits.high = std::max(limits.high, signal.highest + std::log(options_.shared_factor));
  const double usual = Middle(signal.all.past, signal.shared);
  if (Take(signal.shared, limits, step, &signal.all)) {
    const bool falls = signal.shared < limits.low;
    all_off_.push_back({.signal = which,
                        .beyond = falls ? limits.low - signal.shared : signal.shared - limits.high,
                        .value = std::exp(signal.shared - usual),
                        .limit = std::exp((falls ? limits.low : limits.high) - usual),
                        .usual = 1,
                        .since = signal.all.since,
                        .samples = signal.all.off});
  }
  if (signal.all.off == 0) signal.highest = std::max(signal.highest, signal.shared);
}

void TensorPasts::JudgeRow(size_t which, const Covered& covered) {
  const PastSignal& info = kPastSignals[which];
  Signal& signal = signals_[which];
  Series& series = signal.rows[covered.row];
  const double x = covered.log - signal.shared;
  const Limits limits = LimitsOf(series, options_.rise_factor, info.may_fall);
  const double usual = Middle(series.past, x);
  if (!Take(x, limits, covered.step, &series)) return;
  const bool falls = x < limits.low;
  off_.push_back({.signal = which,
                  .row = covered.row,
                  .beyond = falls ? limits.low - x : x - limits.high,
                  .value = std::exp(covered.log),
                  .limit = std::exp((falls ? limits.low : limits.high) + signal.shared),
                  .usual = std::exp(usual + signal.shared),
                  .since = series.since,
                  .samples = series.off});
}

void TensorPasts::JudgeWaiting(size_t which) {
  for (const Covered& covered : signals_[which].waiting) JudgeRow(which, covered);
  signals_[which].waiting.clear();
}

bool TensorPasts::Observe(const StepSample& sample, const RowNames* names, const Context& context) {
  findings_.clear();
  // A part of a tensor may lie at a rank that is missing.
  if (!sample.complete || !sample.has(SignalId::kTensorGradSumsq)) return false;
  news_.Begin(sample.step, context.quiet_steps);
  off_.clear();
  all_off_.clear();
  any_news_ = false;
  if (excused_ != context.excused) {
    for (size_t which = 0; which < kSignals; ++which) JudgeWaiting(which);
  }
  if (excused_ && !context.excused) {
    for (Signal& signal : signals_) {
      signal.all.past.Close();
      for (Series& series : signal.rows) series.past.Close();
    }
  }
  excused_ = context.excused;
  for (size_t which = 0; which < kSignals; ++which) Judge(which, sample);
  if (off_.empty() && all_off_.empty()) return !excused_;
  news_.NoteWrong(sample.step);
  Tell(names);
  return true;
}

void TensorPasts::Tell(const RowNames* names) {
  std::stable_sort(off_.begin(), off_.end(), [](const Off& a, const Off& b) { return a.beyond > b.beyond; });
  const auto add = [this](const Off& off, const std::string& note) {
    const bool persists = off.samples >= options_.persist_samples;
    Finding& finding =
        findings_.emplace_back(Finding::OfRun(Rule::kParameters, persists ? Severity::kWarning : Severity::kInfo,
                                              {.signal = FindSignal(kPastSignals[off.signal].told)->name,
                                               .value = off.value,
                                               .threshold = off.limit,
                                               .baseline = off.usual,
                                               .first_step = off.since,
                                               .detector = "past"}));
    finding.note = note;
  };
  std::string text;
  int64_t since = std::numeric_limits<int64_t>::max();
  const auto word = [](double factor) { return factor < 1 ? "fallen" : "risen"; };
  for (const Off& off : all_off_) {
    add(off, "all parameters");
    absl::StrAppendFormat(&text, "%sthe %s of all parameters together has %s to %.3g times what it was",
                          text.empty() ? "" : "; ", kPastSignals[off.signal].words, word(off.value), off.value);
    since = std::min(since, off.since);
  }
  const size_t said = std::min(off_.size(), kParametersNamedMax);
  for (size_t i = 0; i < said; ++i) {
    const Off& off = off_[i];
    const std::string name = NameOr("tensor", names, off.row);
    add(off, name);
    since = std::min(since, off.since);
    const double factor = off.value / off.usual;
    absl::StrAppendFormat(&text, "%sthe %s of %s has %s to %.4g, from %.4g", text.empty() ? "" : "; ",
                          kPastSignals[off.signal].words, name, word(factor), off.value, off.usual);
  }
  if (said < off_.size()) absl::StrAppend(&text, "; and ", off_.size() - said, " more");
  absl::StrAppend(&text, ", since step ", since);
  // In this order; the alert's words are the worst's.
  std::stable_sort(findings_.begin(), findings_.end(),
                   [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  for (size_t i = 0; i < findings_.size(); ++i) findings_[i].score = static_cast<double>(findings_.size() - i);
  findings_.front().summary = std::move(text);
  findings_.front().news = any_news_ && news_.Take();
}

}  // namespace bellwether::server
