#include "server/detect/sequence_watch.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"

namespace bellwether::server {
namespace {

// As client_lib/python/bellwether/_step/sequence_losses.py begins its event.
constexpr std::string_view kWords = "largest losses of sequences: ";

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

bool SequenceWatch::Observe(const StepSample& sample, const Context& context) {
  findings_.clear();
  const float loss = sample.scalar(SignalId::kLossSequenceMax);
  const float labels = sample.scalar(SignalId::kLossTokens), same = sample.scalar(SignalId::kLossRepeatedTokens);
  const bool has_labels = IsNumber(labels) && IsNumber(same) && labels > 0 && labels >= options_.labels;
  if (!IsNumber(loss) && !has_labels) return false;
  seen_ = true;
  news_.Begin(sample.step, context.quiet_steps);
  if (context.excused) {
    // While something is wrong it would be learnt.
    if (news_.wrong_lately()) return false;
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
  findings_.reserve(2);
  if (has_labels) {
    const auto limit = static_cast<float>(options_.repeated_share);
    const float share = same / labels;
    const bool off = repeated_.past.known() && share >= limit && repeated_.past.high() < options_.usual_share;
    if (Finding* const found =
            Take(share, off, limit, SignalId::kLossRepeatedShare, "repeated", sample.step, &repeated_)) {
      found->score = 2;
      found->cause = "repeated tokens";
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
      found->cause = "sequences out of their past";
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
  return true;
}

}  // namespace bellwether::server
