#include "server/detect/tensor_watch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"
#include "server/detect/median.h"
#include "server/detect/parameter_role.h"

namespace bellwether::server {
namespace {

// Parameters that are named; of further ones their number is told.
constexpr size_t kTensorsMax = 8;
constexpr uint16_t kCountMax = 60000;
// A parameter that moved so often, and always, has no habit of standing still.
constexpr uint16_t kAlwaysMoved = 4;
// That it must stand still longer than ever before, where it has such a habit.
constexpr int32_t kLonger = 4;
// Half of the distance of two numbers of bf16, relative to them.
constexpr double kRoundsAway = 1.0 / 256;

const char* Plural(size_t count) { return count == 1 ? "" : "s"; }

}  // namespace

std::optional<Finding> FindNonfiniteTensors(const StepSample& sample, const RowNames* names) {
  const auto counts = sample.matrix(SignalId::kTensorGradNonfinite);
  std::vector<size_t> bad;
  for (size_t i = counts.size(); i-- > 0;) {
    if (!IsNotMeasured(counts[i]) && !(counts[i] <= 0)) bad.push_back(i);
  }
  if (bad.empty()) return std::nullopt;
  Finding finding;
  finding.rule = Rule::kNonfinite;
  finding.stage = 5;
  finding.first_step = sample.step;
  finding.Add({.signal = FindSignal(SignalId::kTensorGradNonfinite)->name,
               .value = counts[bad.front()],
               .first_step = sample.step,
               .detector = "nonfinite"});
  const auto weights = sample.matrix(SignalId::kTensorWeightSumsq);
  const auto spoiled = std::count_if(weights.begin(), weights.end(),
                                     [](float value) { return !IsNotMeasured(value) && std::isnan(value); });
  finding.summary = absl::StrFormat("nonfinite: %.0f elements of the gradient of %s", counts[bad.front()],
                                    NameOr("tensor", names, bad.front()));
  if (bad.size() > 1) {
    absl::StrAppend(&finding.summary, ", which of these comes first in the backward pass, and of ", bad.size() - 1,
                    " other parameter", Plural(bad.size() - 1));
  }
  absl::StrAppend(&finding.summary, "; the optimizer has taken the step");
  if (spoiled > 0) {
    absl::StrAppend(&finding.summary, ", and ", spoiled, " parameter", spoiled == 1 ? " is" : "s are",
                    " not finite behind it");
  }
  absl::StrAppend(&finding.summary, ", since step ", sample.step);
  const size_t said = std::min(bad.size(), kTensorsMax);
  for (size_t i = 0; i < said; ++i) absl::StrAppend(&finding.note, i == 0 ? "" : ", ", NameOr("tensor", names, bad[i]));
  if (said < bad.size()) absl::StrAppend(&finding.note, ", ...");
  return finding;
}

struct TensorWatch::Still {
  size_t row = 0;
  double gradient = 0;  // Root of the mean square.
  double norm = 0;
  double rms = 0;  // Of the parameter; 0: not known.
  int64_t since = -1;
  uint16_t samples = 0;
  bool rounds = false;  // Rounding may explain it.
};

bool TensorWatch::Consistent() const {
  return rows_.size() <= static_cast<size_t>(kNamedRowsMax) && still_samples_ >= 0;
}

void TensorWatch::Rewind() {
  rows_.assign(rows_.size(), {});
  still_samples_ = 0;
  still_since_ = -1;
  rate_ = -1;
}

int32_t TensorWatch::Hold(const Row& row) const {
  const bool often = row.moved == 0 || row.moved >= kAlwaysMoved;
  if (row.longest == 0 && often) return options_.samples;
  return std::max(options_.samples, kLonger * (row.longest + 1));
}

void TensorWatch::Move(Row* row) {
  row->moved = std::min<uint16_t>(kCountMax, static_cast<uint16_t>(row->moved + 1));
  // One that never moved has not begun, as before the warm-up of a learning rate.
  if (row->moved > 1) row->longest = std::max(row->longest, row->still);
  row->still = 0;
  row->since = -1;
}

bool TensorWatch::Observe(const StepSample& sample, const RowNames* names) {
  findings_.clear();
  const auto moved = sample.matrix(SignalId::kTensorMoved), largest = sample.matrix(SignalId::kTensorGradMax);
  // A part of a tensor that moved may lie at a rank that is missing.
  if (moved.empty() || largest.empty() || !sample.complete) return false;
  const auto squares = sample.matrix(SignalId::kTensorGradSumsq), elements = sample.matrix(SignalId::kTensorElements);
  const auto weights = sample.matrix(SignalId::kTensorWeightSumsq);
  std::vector<Still> asked;    // That stand still, with a gradient.
  std::vector<double> others;  // Gradients of those that move.
  std::vector<size_t> moving;
  size_t graded = 0;
  for (size_t i = 0; i < moved.size(); ++i) {
    if (IsNotMeasured(moved[i])) continue;
    const bool has_gradient = IsAbove0(ValueAt(largest, i));
    graded += has_gradient ? 1 : 0;
    const double count = IsAbove0(ValueAt(elements, i)) ? ValueAt(elements, i) : 1;
    const double square = IsAbove0(ValueAt(squares, i)) ? ValueAt(squares, i) : 0;
    if (moved[i] > 0) {
      moving.push_back(i);
      if (has_gradient) others.push_back(std::sqrt(square / count));
    } else if (has_gradient) {
      const double weight = IsAbove0(ValueAt(weights, i)) ? ValueAt(weights, i) : 0;
      asked.push_back({.row = i,
                       .gradient = std::sqrt(square / count),
                       .norm = std::sqrt(square),
                       .rms = std::sqrt(weight / count)});
    }
  }
  if (graded == 0 && moving.empty()) return false;
  const float told = sample.scalar(SignalId::kLearningRate);
  const double rate = !IsNotMeasured(told) && told >= 0 ? told : -1;
  const bool warming = rate_ >= 0 && rate > rate_;
  rate_ = rate;
  if (rows_.size() < moved.size()) rows_.resize(std::min(moved.size(), static_cast<size_t>(kNamedRowsMax)));
  if (moving.empty()) {
    if (still_samples_++ == 0) still_since_ = sample.step;
    if (still_samples_ >= options_.samples) NameRun(sample, graded);
    return true;
  }
  still_samples_ = 0;
  still_since_ = -1;
  for (const size_t i : moving) Move(&rows_[i]);
  const double least = options_.gradient_share * MedianOr(0, std::move(others));
  std::vector<Still> still;
  for (Still& one : asked) {
    Row& row = rows_[one.row];
    if (one.gradient < least) continue;
    if (row.still == 0) row.since = sample.step;
    row.still = std::min<uint16_t>(kCountMax, static_cast<uint16_t>(row.still + 1));
    if (row.still < Hold(row)) continue;
    one.rounds = rate > 0 && one.rms > 0 && rate < one.rms * kRoundsAway;
    if (one.rounds && warming) continue;
    one.since = row.since;
    one.samples = row.still;
    still.push_back(one);
  }
  if (!still.empty()) NameRows(&still, moving.size(), names);
  return true;
}

void TensorWatch::NameRun(const StepSample& sample, size_t asked) {
  Finding& finding = findings_.emplace_back(Finding::OfRun(Rule::kFrozen, Severity::kWarning,
                                                           {.signal = FindSignal(SignalId::kTensorMoved)->name,
                                                            .value = 0,
                                                            .threshold = 1,
                                                            .first_step = still_since_,
                                                            .detector = "still"}));
  finding.score = std::numeric_limits<double>::infinity();
  finding.cause = "optimizer does not move";
  finding.summary = absl::StrCat("the optimizer's step changes nothing: none of ", asked, " parameter", Plural(asked),
                                 " with a gradient has moved in ", still_samples_, " samples");
  const float rate = sample.scalar(SignalId::kLearningRate);
  if (rate == 0) {
    absl::StrAppend(&finding.summary, "; the learning rate is 0");
  } else if (IsAbove0(rate)) {
    absl::StrAppendFormat(&finding.summary, "; the learning rate is %.3g: the step may be skipped", rate);
    finding.Add({.signal = FindSignal(SignalId::kLearningRate)->name,
                 .value = rate,
                 .first_step = still_since_,
                 .detector = "still"});
  }
  absl::StrAppend(&finding.summary, ", since step ", still_since_);
}

void TensorWatch::NameRows(std::vector<Still>* still, size_t moving, const RowNames* names) {
  std::stable_sort(still->begin(), still->end(), [](const Still& a, const Still& b) {
    return a.rounds != b.rounds ? b.rounds : a.gradient > b.gradient;
  });
  const size_t said = std::min(still->size(), kTensorsMax);
  std::string text = absl::StrCat(still->size(), " parameter", still->size() == 1 ? " has" : "s have",
                                  " a gradient and ", still->size() == 1 ? "does" : "do", " not move: ");
  int64_t first = still->front().since;
  for (size_t i = 0; i < said; ++i) {
    const Still& one = (*still)[i];
    const std::string name = NameOr("tensor", names, one.row);
    Finding& finding =
        findings_.emplace_back(Finding::OfRun(Rule::kFrozen, one.rounds ? Severity::kInfo : Severity::kWarning,
                                              {.signal = FindSignal(SignalId::kTensorMoved)->name,
                                               .value = 0,
                                               .threshold = 1,
                                               .first_step = one.since,
                                               .detector = "still"}));
    finding.Add({.signal = FindSignal(SignalId::kTensorGradNorm)->name,
                 .value = one.norm,
                 .first_step = one.since,
                 .detector = "still"});
    finding.score = static_cast<double>(said - i);
    finding.note = name;
    first = std::min(first, one.since);
    absl::StrAppend(&text, i == 0 ? "" : ", ", name);
  }
  if (said < still->size()) absl::StrAppend(&text, " and ", still->size() - said, " more");
  absl::StrAppend(&text, "; ", moving, " other", Plural(moving), moving == 1 ? " moves" : " move");
  const bool all_round = still->front().rounds;
  if (all_round) {
    absl::StrAppendFormat(&text,
                          "; a step of the learning rate, %.3g, is less than half of the last bit that bfloat16 has at "
                          "their size: if they have 16 bits, rounding undoes it",
                          rate_);
  }
  absl::StrAppend(&text, ", since step ", first);
  // Where all of them are of one layer that is the place.
  int32_t layer = names == nullptr ? -1 : LayerOf(NameOr("tensor", names, still->front().row));
  for (const Still& one : *still) {
    if (layer >= 0 && LayerOf(NameOr("tensor", names, one.row)) != layer) layer = -1;
  }
  findings_.front().where.layer = layer;
  if (all_round) findings_.front().cause = "steps rounded away";
  findings_.front().summary = std::move(text);
}

}  // namespace bellwether::server
