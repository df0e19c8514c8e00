#include "server/detect/silence_watch.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "bellwether/signal_table.h"
#include "bellwether/signal_title.h"
#include "server/detect/parameter_role.h"

namespace bellwether::server {
namespace {

constexpr uint16_t kSilenceMax = std::numeric_limits<uint16_t>::max();
constexpr SignalId kSignalsOfRun[] = {SignalId::kLoss, SignalId::kGradNorm, SignalId::kLearningRate};
// Of the run's places: behind kSignalsOfRun, heads as such.
constexpr size_t kHeadsAtAll = std::size(kSignalsOfRun), kPlacesOfRun = kHeadsAtAll + 1;
// What trends of heads are judged by.
constexpr SignalId kJudged[] = {SignalId::kCommonModeSum, SignalId::kSpreadSum, SignalId::kTiedRowsBf16,
                                SignalId::kWqSigma,       SignalId::kLogitMax,  SignalId::kKeyLeakSum};
constexpr size_t kSilentNamedMax = 4;
constexpr char kSilenceDetector[] = "silence";

// "Largest logit" within a sentence.
std::string TitleInSentence(SignalId signal) {
  std::string title(SignalTitle(FindSignal(signal)->name));
  if (title.size() > 1 && absl::ascii_islower(static_cast<unsigned char>(title[1]))) {
    title[0] = absl::ascii_tolower(static_cast<unsigned char>(title[0]));
  }
  return title;
}

std::string SilentNames(const std::vector<std::string>& names, size_t all) {
  return absl::StrCat(absl::StrJoin(names, ", "),
                      all > names.size() ? absl::StrCat(" and ", all - names.size(), " more") : "");
}

// Those of `which`, as they stand in a sentence.
std::string TitlesOf(const std::vector<SignalId>& signals, const std::vector<size_t>& which) {
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(which.size(), kSilentNamedMax); ++i) {
    names.push_back(TitleInSentence(signals[which[i]]));
  }
  return SilentNames(names, which.size());
}

Fact SilenceFact(uint16_t samples, uint16_t limit, int64_t step, int32_t layer = -1) {
  return {.signal = kSamplesWithout,
          .where = {layer, -1},
          .value = static_cast<double>(samples),
          .threshold = static_cast<double>(limit),
          .first_step = step,
          .detector = kSilenceDetector};
}

}  // namespace

void SilenceWatch::Places::Grow(size_t size) {
  if (size <= without.size()) return;
  without.resize(size, 0);
  longest.resize(size, 0);
  reports.resize(size, 0);
}

void SilenceWatch::Places::Note(size_t place, bool reports_now) {
  if (!reports_now) {
    if (reports[place] > 0 && without[place] < kSilenceMax) ++without[place];
    return;
  }
  longest[place] = std::max(longest[place], without[place]);
  without[place] = 0;
  if (reports[place] < kReportsLeast) ++reports[place];
}

uint16_t SilenceWatch::Places::LimitOf(size_t place, uint16_t least) const {
  if (reports[place] < kReportsLeast) return kSilenceMax;
  return static_cast<uint16_t>(std::clamp<int>(kLongest * longest[place], least, kSilenceMax));
}

void SilenceWatch::Observe(const StepSample& sample) {
  step_ = sample.step;
  if (!sample.complete) return;
  ObserveHeads(sample);
  ObserveTensors(sample);
  ObserveRun(sample);
}

void SilenceWatch::ObserveHeads(const StepSample& sample) {
  const auto layers = static_cast<size_t>(sample.layout().layers);
  if (layers_ != sample.layout().layers) {
    layers_ = sample.layout().layers;
    signals_.clear();
    heads_ = {};
  }
  bool any = false;
  for (const SignalId id : sample.signals()) {
    if (!OfHeads(FindSignal(id)->granularity)) continue;
    any = true;
    if (std::find(signals_.begin(), signals_.end(), id) == signals_.end()) signals_.push_back(id);
  }
  if (!any) return;
  heads_.Grow(signals_.size() * layers);
  for (size_t signal = 0; signal < signals_.size(); ++signal) {
    const std::span<const float> values = sample.matrix(signals_[signal]);
    const size_t columns = layers == 0 ? 0 : values.size() / layers;
    for (size_t layer = 0; layer < layers; ++layer) {
      const std::span<const float> row = values.empty() ? values : values.subspan(layer * columns, columns);
      heads_.Note(signal * layers + layer,
                  std::any_of(row.begin(), row.end(), [](float value) { return !IsNotMeasured(value); }));
    }
  }
}

void SilenceWatch::ObserveTensors(const StepSample& sample) {
  std::vector<std::span<const float>> of_tensors;
  for (const SignalId id : sample.signals()) {
    if (FindSignal(id)->granularity == Granularity::kTensor) of_tensors.push_back(sample.matrix(id));
  }
  if (of_tensors.empty()) return;
  tensors_.Grow(static_cast<size_t>(std::max(sample.layout().tensors, 0)));
  for (size_t row = 0; row < tensors_.size(); ++row) {
    tensors_.Note(row, std::any_of(of_tensors.begin(), of_tensors.end(), [row](std::span<const float> values) {
                    return row < values.size() && !IsNotMeasured(values[row]);
                  }));
  }
}

void SilenceWatch::ObserveRun(const StepSample& sample) {
  bool here[kPlacesOfRun] = {};
  for (size_t i = 0; i < std::size(kSignalsOfRun); ++i) here[i] = !IsNotMeasured(sample.scalar(kSignalsOfRun[i]));
  here[kHeadsAtAll] = std::any_of(sample.signals().begin(), sample.signals().end(),
                                  [](SignalId id) { return OfHeads(FindSignal(id)->granularity); });
  if (std::none_of(std::begin(here), std::end(here), [](bool each) { return each; })) return;
  run_.Grow(kPlacesOfRun);
  for (size_t i = 0; i < kPlacesOfRun; ++i) run_.Note(i, here[i]);
  // A client that is told to cost less samples heads more rarely, and says so.
  if (const float period = sample.scalar(SignalId::kSamplingPeriod); std::isfinite(period) && period > 0) {
    run_.longest[kHeadsAtAll] =
        std::max(run_.longest[kHeadsAtAll], static_cast<uint16_t>(std::min(period, float{kSilenceMax})));
  }
}

std::vector<Finding> SilenceWatch::Find(const RowNames* tensors) {
  std::vector<Finding> findings;
  const size_t silent = FindOfRun(&findings) + FindHeads(&findings) + FindTensors(tensors, &findings);
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  if (findings.empty()) {  // Some places are not told of.
    told_ = 0;
  } else if (silent > told_ && silent >= 2 * size_t{told_}) {
    findings.front().news = told_ > 0;
    told_ = static_cast<uint32_t>(silent);
  }
  return findings;
}

size_t SilenceWatch::FindOfRun(std::vector<Finding>* findings) const {
  size_t all = 0;
  for (size_t i = 0; i < run_.size(); ++i) {
    if (!run_.IsSilent(i, kOthersLeast)) continue;
    ++all;
    const bool needed = i == kHeadsAtAll || kSignalsOfRun[i] == SignalId::kLoss;
    Finding& finding =
        findings->emplace_back(Finding::OfRun(Rule::kSilent, needed ? Severity::kWarning : Severity::kInfo,
                                              SilenceFact(run_.without[i], run_.LimitOf(i, kOthersLeast), step_)));
    finding.summary = i == kHeadsAtAll ? "attention is no longer measured, while other signals still come"
                                       : absl::StrCat("the ", TitleInSentence(kSignalsOfRun[i]),
                                                      " no longer comes, while other signals do");
    finding.advice = i == kHeadsAtAll ? "Look what changed in the job at that step: nothing of attention is judged."
                                      : "Look what changed in the job at that step: nothing of it is judged.";
  }
  return all;
}

// A layer of which most is silent, as where its attention is called in a new way, is worth a look.  Of less, what
// trends are judged by is information; a Gram matrix that cannot be trusted, for example, is left out by itself.
size_t SilenceWatch::FindHeads(std::vector<Finding>* findings) const {
  const auto layers = static_cast<size_t>(layers_);
  std::vector<size_t> silent_signals;  // In each layer that reported them.
  std::vector<size_t> there(signals_.size()), gone(signals_.size());
  size_t all = 0;
  for (size_t signal = 0; signal < signals_.size(); ++signal) {
    for (size_t layer = 0; layer < layers; ++layer) {
      there[signal] += heads_.reports[signal * layers + layer] == kReportsLeast;
      gone[signal] += heads_.IsSilent(signal * layers + layer, kHeadsLeast);
    }
    all += gone[signal];
    if (there[signal] > 0 && gone[signal] == there[signal]) silent_signals.push_back(signal);
  }
  for (size_t layer = 0; layer < layers && all > 0; ++layer) {
    std::vector<size_t> silent;  // What all layers lack is told of the signal.
    size_t reported = 0, longest = 0;
    bool judged = false;
    for (size_t signal = 0; signal < signals_.size(); ++signal) {
      const size_t place = signal * layers + layer;
      reported += heads_.reports[place] == kReportsLeast;
      if (gone[signal] == there[signal] || !heads_.IsSilent(place, kHeadsLeast)) continue;
      silent.push_back(signal);
      judged |= std::find(std::begin(kJudged), std::end(kJudged), signals_[signal]) != std::end(kJudged);
      if (silent.size() == 1 || heads_.without[place] > heads_.without[longest]) longest = place;
    }
    const bool most = 2 * silent.size() > reported;
    if (silent.empty() || (!most && !judged)) continue;
    Finding& finding =
        findings->emplace_back(Finding::OfRun(Rule::kSilent, most ? Severity::kWarning : Severity::kInfo,
                                              SilenceFact(heads_.without[longest], heads_.LimitOf(longest, kHeadsLeast),
                                                          step_, static_cast<int32_t>(layer))));
    finding.where.layer = static_cast<int32_t>(layer);
    finding.score = static_cast<double>(silent.size());
    finding.summary = absl::StrCat("layer ", layer, " no longer reports ", silent.size(), " of its ", reported,
                                   " signals of attention, while other layers do: ", TitlesOf(signals_, silent));
    finding.advice =
        "Look what changed in the layer at that step. What no longer comes is not judged there: it is not healthy.";
  }
  if (silent_signals.empty()) return all;
  const size_t place = silent_signals.front() * layers;
  Finding& finding = findings->emplace_back(Finding::OfRun(
      Rule::kSilent, Severity::kInfo, SilenceFact(heads_.without[place], heads_.LimitOf(place, kHeadsLeast), step_)));
  finding.summary = absl::StrCat("no layer reports any more: ", TitlesOf(signals_, silent_signals));
  finding.advice = "What no longer comes is not judged. Other signals of attention still come.";
  return all;
}

size_t SilenceWatch::FindTensors(const RowNames* names, std::vector<Finding>* findings) const {
  std::vector<size_t> silent;
  for (size_t row = 0; row < tensors_.size(); ++row) {
    if (tensors_.IsSilent(row, kOthersLeast)) silent.push_back(row);
  }
  if (silent.empty()) return 0;
  std::vector<std::string> said;
  for (const size_t row : silent) {
    if (said.size() < kSilentNamedMax) said.push_back(NameOr("tensor", names, row));
  }
  const size_t row = silent.front();
  Finding& finding = findings->emplace_back(Finding::OfRun(
      Rule::kSilent, Severity::kInfo, SilenceFact(tensors_.without[row], tensors_.LimitOf(row, kOthersLeast), step_)));
  finding.where.layer = LayerOf(said.front());
  finding.summary = absl::StrCat("tensors no longer report, while others do: ", SilentNames(said, silent.size()));
  finding.advice = "Look whether they were frozen or left the model on purpose. They are not judged.";
  return silent.size();
}

void SilenceWatch::Forget() { *this = {}; }

size_t SilenceWatch::memory_bytes() const {
  return heads_.memory_bytes() + tensors_.memory_bytes() + run_.memory_bytes() + signals_.capacity() * sizeof(SignalId);
}

bool SilenceWatch::Consistent() const {
  const auto layers = static_cast<size_t>(std::max(layers_, 0));
  return layers_ >= 0 && heads_.Consistent() && tensors_.Consistent() && run_.Consistent() &&
         heads_.size() == signals_.size() * layers && (run_.size() == 0 || run_.size() == kPlacesOfRun) &&
         tensors_.size() <= static_cast<size_t>(kNamedRowsMax) &&
         std::all_of(signals_.begin(), signals_.end(), [](SignalId id) {
           const SignalInfo* const signal = FindSignal(id);
           return signal != nullptr && OfHeads(signal->granularity);
         });
}

}  // namespace bellwether::server
