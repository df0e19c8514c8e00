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

constexpr uint16_t kCountMax = std::numeric_limits<uint16_t>::max();
constexpr SignalId kOfRun[] = {SignalId::kLoss, SignalId::kGradNorm, SignalId::kLearningRate};
// Of the run's places: behind kOfRun, heads as such.
constexpr size_t kHeadsAtAll = std::size(kOfRun), kRunPlaces = kHeadsAtAll + 1;
constexpr size_t kNamedMax = 8;
constexpr char kDetector[] = "silence";

// "Largest logit" within a sentence.
std::string TitleInText(SignalId signal) {
  std::string title(SignalTitle(FindSignal(signal)->name));
  if (title.size() > 1 && absl::ascii_islower(static_cast<unsigned char>(title[1]))) {
    title[0] = absl::ascii_tolower(static_cast<unsigned char>(title[0]));
  }
  return title;
}

std::string Listed(const std::vector<std::string>& names, size_t all) {
  return absl::StrCat(absl::StrJoin(names, ", "),
                      all > names.size() ? absl::StrCat(" and ", all - names.size(), " more") : "");
}

Fact Without(uint16_t samples, uint16_t limit, int64_t step, int32_t layer = -1) {
  return {.signal = kSamplesWithout,
          .where = {layer, -1},
          .value = static_cast<double>(samples),
          .threshold = static_cast<double>(limit),
          .first_step = step,
          .detector = kDetector};
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
    if (reports[place] > 0 && without[place] < kCountMax) ++without[place];
    return;
  }
  longest[place] = std::max(longest[place], without[place]);
  without[place] = 0;
  if (reports[place] < kReportsLeast) ++reports[place];
}

uint16_t SilenceWatch::Places::LimitOf(size_t place, uint16_t least) const {
  if (reports[place] < kReportsLeast) return kCountMax;
  return static_cast<uint16_t>(std::clamp<int>(kLongest * longest[place], least, kCountMax));
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
  bool here[kRunPlaces] = {};
  for (size_t i = 0; i < std::size(kOfRun); ++i) here[i] = !IsNotMeasured(sample.scalar(kOfRun[i]));
  here[kHeadsAtAll] = std::any_of(sample.signals().begin(), sample.signals().end(),
                                  [](SignalId id) { return OfHeads(FindSignal(id)->granularity); });
  if (std::none_of(std::begin(here), std::end(here), [](bool each) { return each; })) return;
  run_.Grow(kRunPlaces);
  for (size_t i = 0; i < kRunPlaces; ++i) run_.Note(i, here[i]);
  // A client that is told to cost less samples heads more rarely, and says so.
  if (const float period = sample.scalar(SignalId::kSamplingPeriod); std::isfinite(period) && period > 0) {
    run_.longest[kHeadsAtAll] =
        std::max(run_.longest[kHeadsAtAll], static_cast<uint16_t>(std::min(period, float{kCountMax})));
  }
}

std::vector<Finding> SilenceWatch::Find(const RowNames* tensors) {
  std::vector<Finding> findings;
  const size_t silent = FindOfRun(&findings) + FindHeads(&findings) + FindTensors(tensors, &findings);
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  if (silent == 0 || (silent > told_ && silent >= 2 * size_t{told_})) {
    if (told_ > 0 && silent > 0) findings.front().news = true;
    told_ = static_cast<uint32_t>(silent);
  }
  return findings;
}

size_t SilenceWatch::FindOfRun(std::vector<Finding>* findings) const {
  size_t all = 0;
  for (size_t i = 0; i < run_.size(); ++i) {
    if (!run_.IsSilent(i, kOthersLeast)) continue;
    ++all;
    const bool needed = i == kHeadsAtAll || kOfRun[i] == SignalId::kLoss;
    Finding& finding =
        findings->emplace_back(Finding::OfRun(Rule::kSilent, needed ? Severity::kWarning : Severity::kInfo,
                                              Without(run_.without[i], run_.LimitOf(i, kOthersLeast), step_)));
    finding.summary = i == kHeadsAtAll
                          ? "attention is no longer measured, while other signals still come"
                          : absl::StrCat("the ", TitleInText(kOfRun[i]), " no longer comes, while other signals do");
    finding.advice = i == kHeadsAtAll ? "Look what changed in the job at that step: nothing of attention is judged."
                                      : "Look what changed in the job at that step: nothing of it is judged.";
  }
  return all;
}

// A layer of which most is silent, as where its attention is called in a new way, is worth a look.  Single signals
// are information: the job may have stopped measuring them on purpose.
size_t SilenceWatch::FindHeads(std::vector<Finding>* findings) const {
  const auto layers = static_cast<size_t>(layers_);
  std::vector<size_t> silent_signals;  // In each layer that reported them.
  std::vector<size_t> silent(layers), reported(layers), longest(layers);
  size_t all = 0;
  for (size_t signal = 0; signal < signals_.size(); ++signal) {
    size_t there = 0, gone = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
      const size_t place = signal * layers + layer;
      there += heads_.reports[place] == kReportsLeast;
      gone += heads_.IsSilent(place, kHeadsLeast);
    }
    all += gone;
    if (there > 0 && gone == there) silent_signals.push_back(signal);
    for (size_t layer = 0; layer < layers; ++layer) {
      const size_t place = signal * layers + layer;
      reported[layer] += heads_.reports[place] == kReportsLeast;
      // What all layers lack is told of the signal.
      if (gone < there && heads_.IsSilent(place, kHeadsLeast)) {
        ++silent[layer];
        if (heads_.without[place] >= heads_.without[longest[layer]] || silent[layer] == 1) longest[layer] = place;
      }
    }
  }
  for (size_t layer = 0; layer < layers; ++layer) {
    if (silent[layer] == 0) continue;
    const bool most = 2 * silent[layer] > reported[layer];
    const size_t place = longest[layer];
    Finding& finding = findings->emplace_back(Finding::OfRun(
        Rule::kSilent, most ? Severity::kWarning : Severity::kInfo,
        Without(heads_.without[place], heads_.LimitOf(place, kHeadsLeast), step_, static_cast<int32_t>(layer))));
    finding.where.layer = static_cast<int32_t>(layer);
    finding.score = static_cast<double>(silent[layer]);
    finding.summary = absl::StrCat("layer ", layer, " no longer reports ", silent[layer], " of its ", reported[layer],
                                   " signals of attention, while other layers do");
    finding.advice =
        "Look what changed in the layer at that step. What no longer comes is not judged there: it is not healthy.";
  }
  if (silent_signals.empty()) return all;
  std::vector<std::string> names;
  for (const size_t signal : silent_signals) {
    if (names.size() < kNamedMax) names.push_back(TitleInText(signals_[signal]));
  }
  const size_t place = silent_signals.front() * layers;
  Finding& finding = findings->emplace_back(Finding::OfRun(
      Rule::kSilent, Severity::kInfo, Without(heads_.without[place], heads_.LimitOf(place, kHeadsLeast), step_)));
  finding.summary = absl::StrCat("no layer reports any more: ", Listed(names, silent_signals.size()));
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
    if (said.size() < kNamedMax) said.push_back(NameOr("tensor", names, row));
  }
  const size_t row = silent.front();
  Finding& finding = findings->emplace_back(Finding::OfRun(
      Rule::kSilent, Severity::kInfo, Without(tensors_.without[row], tensors_.LimitOf(row, kOthersLeast), step_)));
  finding.where.layer = LayerOf(said.front());
  finding.summary = absl::StrCat("tensors no longer report, while others do: ", Listed(said, silent.size()));
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
         heads_.size() == signals_.size() * layers && (run_.size() == 0 || run_.size() == kRunPlaces) &&
         tensors_.size() <= static_cast<size_t>(kNamedRowsMax) &&
         std::all_of(signals_.begin(), signals_.end(), [](SignalId id) {
           const SignalInfo* const signal = FindSignal(id);
           return signal != nullptr && OfHeads(signal->granularity);
         });
}

}  // namespace bellwether::server
