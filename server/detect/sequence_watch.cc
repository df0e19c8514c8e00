#include "server/detect/sequence_watch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"

namespace bellwether::server {
namespace {

// As client_lib/python/bellwether/_step/sequence_losses.py begins its event.
constexpr std::string_view kWords = "largest losses of sequences: ";
// Steps in a row: without a label that counts, and with labels that are nearly all the same, or the same batch.
constexpr int32_t kMaskedSteps = 2;
constexpr int32_t kConstantSteps = 8;
constexpr int32_t kSameSteps = 8;
// Of these many changes none may have come later than a third step that was the same.
constexpr int32_t kSameChanges = 32;
constexpr int32_t kSameLongest = 3;
constexpr int32_t kLabelSteps = 32;
// In units of odd_batches.h: the loss is up, or labels repeat as never before.
constexpr double kLossUp = 2;
constexpr double kRepeatedMore = 3;
constexpr int32_t kStepsMax = 1 << 30;

// "at step 200", "of steps 200 to 203"
std::string StepsFrom(int64_t first, int64_t last) {
  return first == last ? absl::StrCat("step ", first) : absl::StrCat("steps ", first, " to ", last);
}

}  // namespace

void SequenceWatch::OnEvent(const RunEvent& event) {
  if (event.kind != EventKind::kAnnotation || !event.text.starts_with(kWords)) return;
  if (event.text.size() > kSequenceWordsMax + kWords.size()) return;
  // Of several ranks the one with the largest; what is no number is beyond all.
  const bool larger = !std::isfinite(event.value) || event.value > words_loss_;
  if (event.step == words_step_ && !larger) return;
  if (event.step < words_step_) return;
  words_step_ = event.step;
  words_loss_ = std::isfinite(event.value) ? event.value : HUGE_VAL;
  words_ = event.text.substr(kWords.size());
}

void SequenceWatch::Rewind() {
  repeated_ = {};
  loss_ = {};
  odd_.Clear();
  nothing_ = false;
  masked_ = had_labels_ = constant_ = same_ = same_longest_ = same_changes_ = 0;
  same_labels_ = same_repeated_ = -1;
  odd_told_ = -1;
  words_step_ = -1;
  news_ = {};
  words_.clear();
  findings_.clear();
}

Finding* SequenceWatch::Take(float value, bool off, float threshold, SignalId signal, const char* detector,
                             int64_t step, Course* course) {
  if (!off) {
    course->off = 0;
    course->past.Add(value);
    return nullptr;
  }
  const bool begins = course->off++ == 0;
  if (begins) course->since = step;
  if (course->off >= options_.relearn_values) {
    *course = {};
    return nullptr;
  }
  const auto severity = course->off >= options_.hold_values ? Severity::kWarning : Severity::kInfo;
  Finding& finding = findings_.emplace_back(Finding::OfRun(Rule::kSequences, severity,
                                                           {.signal = FindSignal(signal)->name,
                                                            .value = value,
                                                            .threshold = threshold,
                                                            .baseline = course->past.high(),
                                                            .first_step = course->since,
                                                            .detector = detector}));
  if (begins) finding.news = news_.Take();
  news_.NoteWrong(step);
  return &finding;
}

void SequenceWatch::AddNothing(SignalId signal, const char* detector, double value, double threshold, int32_t count,
                               int64_t since, std::string summary) {
  Finding& finding = findings_.emplace_back(Finding::OfRun(Rule::kSequences, Severity::kWarning,
                                                           {.signal = FindSignal(signal)->name,
                                                            .value = value,
                                                            .threshold = threshold,
                                                            .first_step = since,
                                                            .detector = detector}));
  finding.score = 4;
  finding.cause = "nothing to learn";
  finding.summary = absl::StrCat("nothing is learned: ", summary, ", in ", count, " steps, since step ", since);
}

bool SequenceWatch::FindNothing(const StepSample& sample) {
  const float labels = sample.scalar(SignalId::kLossTokens), same = sample.scalar(SignalId::kLossRepeatedTokens);
  const float given = sample.scalar(SignalId::kLossGivenTokens);
  if (!IsNumber(labels)) return false;
  const auto count = [&sample](bool holds, int32_t* steps, int64_t* since) {
    if (holds && *steps == 0) *since = sample.step;
    *steps = holds ? std::min(*steps + 1, kStepsMax) : 0;
  };
  count(labels == 0 && given > 0, &masked_, &masked_since_);
  if (labels > 0) had_labels_ = std::min(had_labels_ + 1, kStepsMax);
  if (masked_ >= kMaskedSteps && had_labels_ >= kLabelSteps) {
    AddNothing(SignalId::kLossMaskedShare, "masked", 1, 1, masked_, masked_since_, "no label counts, all are masked");
    return true;
  }
  if (!(labels > 0) || labels < options_.labels || !IsNumber(same)) return false;
  const float share = same / labels;
  const bool repeats = share >= options_.repeated_share;
  const bool more = constant_ > 0 || odd_.score_of_repeated() >= kRepeatedMore;
  count(repeats && more && (constant_ >= kConstantSteps || odd_.score_of_mean() < kLossUp), &constant_,
        &constant_since_);
  if (constant_ >= kConstantSteps) {
    AddNothing(SignalId::kLossRepeatedShare, "constant", share, options_.repeated_share, constant_, constant_since_,
               absl::StrFormat("%.3g %% of the labels are the same as the one before", 100.0 * share));
    return true;
  }
  if (labels == same_labels_ && same == same_repeated_) {
    same_ = std::min(same_ + 1, kStepsMax);
  } else {
    // What has come again and again is how the data is.  A batch that came again was none before.
    if (same_ < kSameSteps || same_changes_ < kSameChanges) same_longest_ = std::max(same_longest_, same_);
    if (same_ > 0) same_changes_ = std::min(same_changes_ + 1, kStepsMax);
    same_ = 1;
    same_since_ = sample.step;
    same_labels_ = labels;
    same_repeated_ = same;
  }
  if (same_ < kSameSteps || same_changes_ < kSameChanges || same_longest_ > kSameLongest) return false;
  AddNothing(SignalId::kLossTokens, "same", labels, labels, same_, same_since_,
             absl::StrFormat("the batch is the same: exactly %.0f labels count, and %.0f of them are the same as the "
                             "one before",
                             labels, same));
  return true;
}

void SequenceWatch::FindOdd(const StepSample& sample) {
  if (!odd_.found() && !odd_.ended()) return;
  // What each step says by itself is in it.
  bool news = odd_.first_step() != odd_told_ || odd_.ended();
  for (const Finding& single : findings_) news |= single.news;
  odd_told_ = odd_.first_step();
  findings_.clear();
  Finding& finding = findings_.emplace_back(
      Finding::OfRun(Rule::kSequences, Severity::kWarning,
                     {.signal = FindSignal(seen_ ? SignalId::kLossSequenceMax : SignalId::kLoss)->name,
                      .value = seen_ ? odd_.worst_largest() : odd_.worst_mean(),
                      .threshold = seen_ ? odd_.usual_largest() : odd_.usual_mean(),
                      .baseline = seen_ ? odd_.usual_largest() : odd_.usual_mean(),
                      .first_step = odd_.first_step(),
                      .detector = "odd"}));
  finding.score = 3;
  finding.cause = "bad data";
  finding.news = news && news_.Take();
  finding.summary = absl::StrFormat("the data of %s is not like that before: %d batches are odd",
                                    StepsFrom(odd_.first_step(), odd_.last_step()), odd_.count());
  if (odd_.worst_largest() > 0 && odd_.usual_largest() > 0) {
    absl::StrAppendFormat(&finding.summary, "; a sequence has lost %.4g, where the largest of a step loses %.4g",
                          odd_.worst_largest(), odd_.usual_largest());
  }
  if (odd_.worst_mean() > 0 && odd_.usual_mean() > 0) {
    absl::StrAppendFormat(&finding.summary, "; the mean was up to %.4g instead of %.4g", odd_.worst_mean(),
                          odd_.usual_mean());
  }
  if (odd_.worst_repeated() >= options_.usual_share) {
    absl::StrAppendFormat(&finding.summary, "; up to %.3g %% of the labels were the same as the one before",
                          100 * odd_.worst_repeated());
  }
  if (words_step_ >= odd_.first_step() && words_step_ <= sample.step) {
    finding.note = words_;
    absl::StrAppend(&finding.summary, "; losses and ids of the largest of step ", words_step_, ": ", words_);
  }
  if (odd_.ended()) absl::StrAppend(&finding.summary, "; the batches since are usual");
  if (odd_.found()) news_.NoteWrong(sample.step);
}

bool SequenceWatch::ObserveMean(const StepSample& sample, const Context& context) {
  const float mean = sample.scalar(SignalId::kLoss);
  if (!IsNumber(mean)) return false;
  news_.Begin(sample.step, context.quiet_steps);
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  const OddBatches::Batch batch{.step = sample.step, .mean = mean, .largest = kNone, .repeated = kNone};
  if (context.excused) {
    if (!news_.wrong_lately()) odd_.Learn(batch);
    return false;
  }
  odd_.Observe(batch, options_.relearn_values, context.rate_rose);
  FindOdd(sample);
  return true;
}

bool SequenceWatch::Observe(const StepSample& sample, const Context& context) {
  findings_.clear();
  const float loss = sample.scalar(SignalId::kLossSequenceMax);
  const float labels = sample.scalar(SignalId::kLossTokens), same = sample.scalar(SignalId::kLossRepeatedTokens);
  const bool has_labels = IsNumber(labels) && IsNumber(same) && labels > 0 && labels >= options_.labels;
  const bool masked = labels == 0 && sample.scalar(SignalId::kLossGivenTokens) > 0;
  if (!IsNumber(loss) && !has_labels && !masked) return !seen_ && ObserveMean(sample, context);
  seen_ = true;
  news_.Begin(sample.step, context.quiet_steps);
  // While something is wrong it would be learnt.
  const bool learns = context.excused && !news_.wrong_lately();
  if (!masked && !nothing_) {
    constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
    const float sum = sample.scalar(SignalId::kLossSequenceSum), sequences = sample.scalar(SignalId::kLossSequences);
    const OddBatches::Batch batch{.step = sample.step,
                                  .mean = IsNumber(sum) && sequences > 0 ? sum / sequences : kNone,
                                  .largest = IsNumber(loss) ? loss : kNone,
                                  .repeated = has_labels ? same / labels : kNone};
    if (learns) odd_.Learn(batch);
    if (!context.excused) odd_.Observe(batch, options_.relearn_values, context.rate_rose);
  }
  // A change that was announced makes no labels vanish.
  nothing_ = FindNothing(sample);
  if (nothing_) return true;
  if (context.excused) {
    if (!learns) return false;
    if (has_labels) repeated_.past.Add(same / labels);
    if (IsNumber(loss) && loss > 0) loss_.past.Add(loss);
    excused_ = true;
    return false;
  }
  if (excused_) {
    repeated_.past.Close();
    loss_.past.Close();
    excused_ = false;
  }
  findings_.reserve(3);
  if (has_labels) {
    const auto limit = static_cast<float>(options_.repeated_share);
    const float share = same / labels;
    const bool off = repeated_.past.known() && share >= limit && repeated_.past.high() < options_.usual_share;
    if (Finding* const found =
            Take(share, off, limit, SignalId::kLossRepeatedShare, "repeated", sample.step, &repeated_)) {
      found->score = 2;
      found->cause = "bad data";
      // Labels that are easy are no harm at once; where they stay so there is nothing to learn.
      if (odd_.score_of_mean() < kLossUp) found->severity = Severity::kInfo;
      found->summary = absl::StrFormat(
          "%.3g %% of the labels are the same as the one before, at step %d; in the past at most %.3g %%",
          100.0 * share, sample.step, 100.0 * repeated_.past.high());
    }
  }
  if (IsNumber(loss) && loss > 0) {
    float limit = 0;
    const bool known = loss_.past.known();
    if (known) {
      const double high = loss_.past.high(), low = loss_.past.low();
      limit = static_cast<float>(std::max({high * options_.rise_factor, high + options_.range_factor * (high - low),
                                           high * std::pow(high / low, options_.range_factor)}));
    }
    if (Finding* const found =
            Take(loss, known && loss > limit, limit, SignalId::kLossSequenceMax, "past", sample.step, &loss_)) {
      found->score = 1;
      // What grows from step to step, or is so of all sequences, is not the data's.
      if (odd_.looks_bad()) found->cause = "bad data";
      found->summary =
          absl::StrFormat("a sequence has lost %.4g at step %d, where the largest of a step has lost %.4g to %.4g",
                          loss, sample.step, loss_.past.low(), loss_.past.high());
      if (words_step_ == sample.step) {
        found->note = words_;
        absl::StrAppend(&found->summary, "; losses and ids of the largest: ", words_);
      }
    }
  }
  if (findings_.size() == 2) {
    Finding &first = findings_.front(), &second = findings_.back();
    if (second.severity > first.severity) {
      std::swap(first, second);
      std::swap(first.score, second.score);
    }
    absl::StrAppend(&first.summary, "; ", second.summary);
    first.news |= second.news;  // The alert is told by its first finding.
  }
  FindOdd(sample);
  return true;
}

}  // namespace bellwether::server
