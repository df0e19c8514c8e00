#include "server/detect/corruption_watch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"
#include "server/detect/median.h"

namespace bellwether::server {
namespace {

// Places of one kind, below which there is no median of them.
constexpr size_t kPlacesMin = 8;
// The median place changes by less: else it is something that all share.
constexpr double kSharedMax = 2;
// A place is held against what it was once it has been steady for so many samples: what begins at 0 grows
// manifold at first.
constexpr uint16_t kSteadySamples = 2;
constexpr double kSteady = 2;
// A weight that may jump by e in so many steps, since it may do so step by step: sigma(W_Q) of runs that fail
// rises twentyfold in 500 steps.
constexpr double kGrowthSteps = 100;
// Back to where it was.
constexpr double kBack = 4;
// Of a gradient's past.
constexpr uint16_t kGradientSamples = 8;
constexpr float kFades = 0.99f;
// What the largest element of all other parameters must be below.
constexpr double kStandsOut = 100;
constexpr size_t kJumpsSaidMax = 8;  // Places that are named.

constexpr SignalId kNorms[] = {SignalId::kWqSigma, SignalId::kWkSigma};
constexpr const char* kNormNames[] = {"sigma(W_Q)", "sigma(W_K)"};

}  // namespace

void CorruptionWatch::Forget() {
  for (std::vector<Place>& places : weights_) places.assign(places.size(), {});
  gradients_.assign(gradients_.size(), {});
  findings_.clear();
}

size_t CorruptionWatch::memory_bytes() const {
  size_t places = gradients_.capacity();
  for (const std::vector<Place>& of : weights_) places += of.capacity();
  return places * sizeof(Place);
}

bool CorruptionWatch::Consistent() const {
  constexpr size_t heads_max = size_t{512} * 1024;
  const auto rows_max = static_cast<size_t>(kNamedRowsMax);
  return weights_[kQueries].size() <= heads_max && weights_[kKeys].size() <= heads_max &&
         weights_[kTensors].size() <= rows_max && gradients_.size() <= rows_max;
}

bool CorruptionWatch::spoils(int32_t layer) const {
  for (const Kind kind : {kQueries, kKeys}) {
    const auto width = static_cast<size_t>(kind == kQueries ? heads_ : kv_heads_);
    const std::vector<Place>& places = weights_[kind];
    for (size_t i = static_cast<size_t>(layer) * width; i < (static_cast<size_t>(layer) + 1) * width; ++i) {
      if (i < places.size() && places[i].since >= 0) return true;
    }
  }
  return false;
}

bool CorruptionWatch::Observe(const StepSample& sample, const RowNames* names) {
  findings_.clear();
  spikes_.clear();
  for (std::vector<Jump>& jumps : jumps_) jumps.clear();
  heads_ = sample.layout().heads;
  kv_heads_ = sample.layout().kv_heads;
  bool any = false;
  for (const Kind kind : {kQueries, kKeys}) {
    const auto values = sample.matrix(kNorms[kind]);
    any |= !values.empty();
    JudgeWeights(kind, sample, values);
  }
  // A part of a tensor may lie at a rank that is missing.
  const auto squares = sample.matrix(SignalId::kTensorWeightSumsq);
  const auto elements = sample.matrix(SignalId::kTensorElements);
  if (sample.complete && !squares.empty() && elements.size() == squares.size()) {
    std::vector<float> means(squares.size(), NotMeasured());
    for (size_t i = 0; i < squares.size(); ++i) {
      if (IsAtLeast0(squares[i]) && IsAbove0(elements[i])) means[i] = std::sqrt(squares[i] / elements[i]);
    }
    JudgeWeights(kTensors, sample, means);
    any = true;
  }
  if (sample.complete && sample.has(SignalId::kTensorGradMax)) {
    JudgeGradients(sample);
    any = true;
  }
  if (any) Name(sample, names);
  return any;
}

void CorruptionWatch::JudgeWeights(Kind kind, const StepSample& sample, std::span<const float> values) {
  std::vector<Place>& places = weights_[kind];
  if (places.size() < values.size()) places.resize(values.size());
  // Nearly always none has jumped so far that the others must be asked, which costs more than all else here.
  bool far = false;
  for (size_t i = 0; i < values.size(); ++i) {
    far |= places[i].value > 0 && places[i].count >= kSteadySamples &&
           values[i] >= options_.weight_factor * places[i].value;
  }
  std::vector<double> ratios;
  if (far) ratios.reserve(values.size());
  for (size_t i = 0; far && i < values.size(); ++i) {
    const Place& place = places[i];
    if (IsAbove0(values[i]) && place.value > 0 && place.since < 0) ratios.push_back(values[i] / place.value);
  }
  const bool peers = ratios.size() >= kPlacesMin;
  const double shared = std::max(1.0, MedianOr(1, std::move(ratios)));
  const double factor = peers ? options_.weight_factor : options_.weight_factor * options_.weight_factor;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!IsAtLeast0(values[i])) continue;
    Place& place = places[i];
    const double value = values[i], before = place.value;  // 0: none yet.
    if (place.since >= 0) {
      const bool back = value < kBack * before, relearnt = ++place.count >= options_.relearn_samples;
      if (!back && !relearnt) {
        jumps_[kind].push_back({i, place.value, values[i], place.step, place.since});
        continue;
      }
      place.since = -1;
      place.count = 0;
    } else if (place.count >= kSteadySamples && shared < kSharedMax && value >= factor * before) {
      const double grows = std::exp(static_cast<double>(sample.step - place.step) / kGrowthSteps);
      if (value >= factor * grows * before) {
        place.since = sample.step;
        place.count = 0;
        jumps_[kind].push_back({i, place.value, values[i], place.step, place.since});
        continue;
      }
    }
    const bool steady = value > before / kSteady && value < kSteady * before;
    place.count = steady ? static_cast<uint16_t>(std::min<int>(place.count + 1, kSteadySamples)) : uint16_t{0};
    place.value = values[i];
    place.step = sample.step;
  }
}

void CorruptionWatch::JudgeGradients(const StepSample& sample) {
  const auto values = sample.matrix(SignalId::kTensorGradMax);
  if (gradients_.size() < values.size()) gradients_.resize(values.size());
  // The two largest, so that each is held against the largest of the others.
  double first = 0, second = 0;
  for (const float value : values) {
    if (!IsAbove0(value)) continue;
    second = std::max(second, std::min<double>(first, value));
    first = std::max<double>(first, value);
  }
  std::vector<double> ratios;
  if (first >= kStandsOut * second) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (IsAbove0(values[i]) && gradients_[i].value > 0) ratios.push_back(values[i] / gradients_[i].value);
    }
  }
  const bool peers = ratios.size() >= kPlacesMin;
  const double shared = std::max(1.0, MedianOr(1, std::move(ratios)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (!IsAbove0(values[i])) continue;
    Place& place = gradients_[i];
    const double others = values[i] == first ? second : first;
    const bool jumps = peers && place.count >= kGradientSamples && shared < kSharedMax &&
                       values[i] >= options_.gradient_factor * place.value && values[i] >= kStandsOut * others;
    if (jumps) {
      spikes_.push_back({i, place.value, values[i], place.step, sample.step});
      // What stays is the new normal.
      if (++place.since < options_.relearn_samples) continue;
    }
    place.since = -1;
    place.value = std::max(values[i], place.value * kFades);
    place.step = sample.step;
    place.count = static_cast<uint16_t>(std::min<int>(place.count + 1, kGradientSamples));
  }
}

void CorruptionWatch::Name(const StepSample& sample, const RowNames* names) {
  const auto add = [this](const Jump& jump, SignalId signal, Head where) -> Finding& {
    Finding finding = Finding::OfRun(Rule::kCorruption, Severity::kCritical,
                                     {.signal = FindSignal(signal)->name,
                                      .where = where,
                                      .value = jump.to,
                                      .threshold = jump.from * options_.weight_factor,
                                      .baseline = jump.from,
                                      .first_step = jump.since,
                                      .detector = "jump"});
    finding.where = where;
    finding.score = jump.to / jump.from;
    return findings_.emplace_back(std::move(finding));
  };
  std::string tensors;
  size_t named = 0;
  for (const Jump& jump : jumps_[kTensors]) {
    if (named++ == kJumpsSaidMax) break;
    absl::StrAppend(&tensors, tensors.empty() ? "" : ", ", NameOr("tensor", names, jump.place));
  }
  for (const Kind kind : {kQueries, kKeys}) {
    const auto width = static_cast<size_t>(kind == kQueries ? heads_ : kv_heads_);
    for (const Jump& jump : jumps_[kind]) {
      const Head where{static_cast<int32_t>(jump.place / width), static_cast<int32_t>(jump.place % width)};
      Finding& finding = add(jump, kNorms[kind], where);
      finding.note = tensors;
      finding.summary =
          absl::StrFormat("corruption: %s of layer %d head %d was %.3g at step %d and %.3g at step %d",
                          kNormNames[kind], where.layer, where.head, jump.from, jump.from_step, jump.to, sample.step);
      if (!tensors.empty()) absl::StrAppend(&finding.summary, "; the parameter: ", tensors);
    }
  }
  const bool by_heads = !findings_.empty();
  for (const Jump& jump : jumps_[kTensors]) {
    Finding& finding = add(jump, SignalId::kTensorWeightSumsq, {});
    // A head says where in the parameter.
    if (by_heads) finding.score = 0;
    finding.note = NameOr("tensor", names, jump.place);
    finding.summary =
        absl::StrFormat("corruption: the root mean square of %s was %.3g at step %d and %.3g at step %d",
                        NameOr("tensor", names, jump.place), jump.from, jump.from_step, jump.to, sample.step);
  }
  for (const Jump& spike : spikes_) {
    Finding& finding = add(spike, SignalId::kTensorGradMax, {});
    finding.severity = Severity::kWarning;
    finding.facts[0].threshold = spike.from * options_.gradient_factor;
    finding.note = NameOr("tensor", names, spike.place);
    finding.summary = absl::StrFormat(
        "corruption: an element of the gradient of %s is %.3g at step %d, where the largest was %.3g before; those of "
        "the other parameters are as before",
        NameOr("tensor", names, spike.place), spike.to, sample.step, spike.from);
  }
  std::stable_sort(findings_.begin(), findings_.end(),
                   [](const Finding& a, const Finding& b) { return a.score > b.score; });
  if (findings_.size() > kJumpsSaidMax) findings_.resize(kJumpsSaidMax);
  for (Finding& finding : findings_) {
    absl::StrAppend(&finding.summary, "; since step ", finding.first_step);
    finding.cause = "corruption";
  }
}

}  // namespace bellwether::server
