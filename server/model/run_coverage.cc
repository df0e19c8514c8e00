#include "server/model/run_coverage.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace bellwether::server {
namespace {

// The first step of an attempt has a sample; a scaler that looks for its factor may drop some.
constexpr uint8_t kFirstSteps = 8;
// A trend needs its signal in a third of its window (TrendOptions): what is missing in so many
// samples in a row is not judged any more.
constexpr uint8_t kMissedMax = 8;
// Samples, or losses, have ended if the next one is so late, in steps and in usual distances.
constexpr int64_t kLateSteps = 1000;
constexpr int64_t kLateGaps = 8;
constexpr int64_t kLatePeriods = 4;

struct FamilyInfo {
  const char* name;
  SignalId signal;  // Measured or derived.
};
constexpr std::array<FamilyInfo, kRuleFamilies> kFamilies = {{
    {"drift", SignalId::kDriftRatio},
    {"ties", SignalId::kTiedFractionBf16},
    {"norm", SignalId::kWqSigma},
    {"logits", SignalId::kLogitMax},
    {"leak", SignalId::kKeyLeak},
    {"loss", SignalId::kLoss},
}};

// What a family reads of a sample, one cell for each of `heads` query or key heads of a layer.
struct Parts {
  std::span<const float> values, divisor;  // No values: not reported.  No divisor: a measured signal.
  size_t heads = 0;
};

Parts PartsOf(const StepSample& sample, const SignalInfo& signal) {
  const auto heads = static_cast<size_t>(ShapeOf(signal, sample.layout()).heads);
  if (!signal.derived) return {sample.matrix(signal.id), {}, heads};
  const auto above = sample.matrix(signal.numerator);
  const auto below = sample.matrix(signal.denominator);
  if (above.empty() || below.size() != above.size()) return {};
  return {above, below, heads};
}

// Adds `family` to the families of those of a layer's heads that have its signals; `rows`: how
// many rows each head's scores are of, empty if that was not told.
void AddFamily(size_t family, const Parts& parts, std::span<const float> rows, size_t layer,
               std::vector<uint8_t>* families) {
  if (parts.values.empty()) return;
  const size_t group = families->size() / parts.heads;
  const bool of_scores = static_cast<RuleFamily>(family) == RuleFamily::kDrift && !rows.empty();
  for (size_t head = 0; head < parts.heads; ++head) {
    const size_t at = layer * parts.heads + head;
    if (IsNotMeasured(parts.values[at])) continue;
    if (!parts.divisor.empty()) {
      // A sum over nothing is 0.  Scores that are all alike have no spread either, but rows.
      const bool scores = of_scores && rows[at] != 0 && !IsNotMeasured(rows[at]);
      if (IsNotMeasured(parts.divisor[at]) || (parts.divisor[at] == 0 && !scores)) continue;
    }
    for (size_t i = head * group; i < (head + 1) * group; ++i) (*families)[i] |= static_cast<uint8_t>(1u << family);
  }
}

bool Late(int64_t step, int64_t last, int64_t gap, float period) {
  const int64_t usual = std::max(kLateGaps * gap, kLatePeriods * static_cast<int64_t>(period));
  return last < 0 || step - last > std::max(kLateSteps, usual);
}

void Note(int64_t step, int64_t* last, int64_t* gap) {
  *gap = *last < 0 ? 0 : std::max<int64_t>(0, step - *last);
  *last = step;
}

}  // namespace

const char* FamilyName(RuleFamily family) { return kFamilies[static_cast<size_t>(family)].name; }

void RunCoverage::Observe(const StepSample& sample) {
  const auto layers = static_cast<size_t>(sample.layout().layers);
  const bool fits = missed.size() == kHeadFamilies * layers;
  if (fits && sample.attempt < attempt) return;
  if (!fits || sample.attempt > attempt) {
    const uint8_t were_off = off;
    *this = {};
    off = were_off;
    attempt = sample.attempt;
    missed.assign(kHeadFamilies * layers, kNever);
  }
  steps = static_cast<uint8_t>(std::min<int>(steps + 1, kFirstSteps));
  if (const float told = sample.scalar(SignalId::kSamplingPeriod); std::isfinite(told) && told > 0) {
    period = std::min(told, 1e6f);
  }
  if (!IsNotMeasured(sample.scalar(SignalId::kLoss))) Note(sample.step, &loss_step, &loss_gap);

  std::array<Parts, kHeadFamilies> parts;
  for (size_t family = 0; family < kHeadFamilies; ++family) {
    parts[family] = PartsOf(sample, *FindSignal(kFamilies[family].signal));
  }
  if (std::all_of(parts.begin(), parts.end(), [](const Parts& p) { return p.values.empty(); })) return;
  const auto rows = sample.matrix(SignalId::kRows);
  Note(sample.step, &head_step, &head_gap);
  std::vector<uint8_t> families(static_cast<size_t>(sample.layout().heads));
  for (size_t layer = 0; layer < layers; ++layer) {
    std::fill(families.begin(), families.end(), uint8_t{0});
    for (size_t family = 0; family < kHeadFamilies; ++family) AddFamily(family, parts[family], rows, layer, &families);
    uint8_t all = 0xff, any = 0;
    for (const uint8_t of_head : families) {
      // A head that reports nothing is none: a layer may have fewer than the widest.
      if (of_head != 0) all &= of_head;
      any |= of_head;
    }
    for (size_t family = 0; family < kHeadFamilies; ++family) {
      uint8_t& since = missed[family * layers + layer];
      if (any != 0 && (all >> family & 1) != 0) {
        since = 0;
      } else if (since < kNever - 1) {
        ++since;
      }
    }
  }
}

JudgedBy RunCoverage::At(int64_t step, int32_t layers, uint64_t steps_judged) const {
  JudgedBy told{.yet = head_step >= 0 || steps >= kFirstSteps, .layers = layers, .step = step, .steps = steps_judged};
  const auto is_off = [this](size_t family) { return (off >> family & 1) != 0; };
  const auto columns = static_cast<size_t>(layers);
  const bool heads = missed.size() == kHeadFamilies * columns && !Late(step, head_step, head_gap, period);
  for (size_t family = 0; heads && family < kHeadFamilies; ++family) {
    if (is_off(family)) continue;
    const auto begin = missed.begin() + static_cast<ptrdiff_t>(family * columns);
    told.judged[family] = static_cast<int32_t>(
        std::count_if(begin, begin + static_cast<ptrdiff_t>(columns), [](uint8_t n) { return n < kMissedMax; }));
  }
  const auto loss = static_cast<size_t>(RuleFamily::kLoss);
  if (!is_off(loss) && !Late(step, loss_step, loss_gap, 0)) told.judged[loss] = 1;
  return told;
}

RunCoverage RunCoverage::Of(const std::vector<SignalId>& signals, int32_t layers, uint32_t attempt, int64_t step) {
  const auto has = [&](SignalId id) { return std::find(signals.begin(), signals.end(), id) != signals.end(); };
  RunCoverage made;
  made.attempt = attempt;
  made.steps = signals.empty() ? 0 : kFirstSteps;
  for (size_t family = 0; family < kHeadFamilies; ++family) {
    const SignalInfo& signal = *FindSignal(kFamilies[family].signal);
    const bool reported = signal.derived ? has(signal.numerator) && has(signal.denominator) : has(signal.id);
    made.missed.insert(made.missed.end(), static_cast<size_t>(layers), reported ? uint8_t{0} : kNever);
    if (reported) made.head_step = step;
  }
  if (has(SignalId::kLoss)) made.loss_step = step;
  return made;
}

bool RunCoverage::Follows(const std::vector<SignalId>& signals, int32_t layers) const {
  if (missed.empty() && off == 0) return true;  // Nothing has come since there is such a record.
  const RunCoverage made = Of(signals, layers, attempt, std::max(head_step, loss_step));
  return off == 0 && missed == made.missed && (head_step < 0) == (made.head_step < 0) &&
         (loss_step < 0) == (made.loss_step < 0);
}

bool JudgedBy::whole() const {
  for (size_t family = 0; family < kRuleFamilies; ++family) {
    if (judged[family] < of(static_cast<RuleFamily>(family))) return false;
  }
  return yet;
}

std::string JudgedBy::Text(bool ended) const {
  if (whole()) {
    return young() ? absl::StrCat("nothing found in ", steps, steps == 1 ? " step" : " steps") : "healthy";
  }
  if (!yet && !ended) return "not judged yet";
  std::vector<const char*> all, none;
  std::map<int32_t, std::vector<const char*>> some;  // By the layers that have it.
  for (size_t family = 0; family < kRuleFamilies; ++family) {
    const int32_t layers_judged = judged[family];
    const bool full = layers_judged == of(static_cast<RuleFamily>(family));
    (full ? all : layers_judged == 0 ? none : some[layers_judged]).push_back(kFamilies[family].name);
  }
  if (all.empty() && some.empty()) return "not judged";
  std::vector<std::string> parts;
  if (!all.empty() && none.size() <= 2 && some.empty()) {
    parts.push_back(absl::StrCat("all but ", absl::StrJoin(none, ", ")));
  } else if (!all.empty()) {
    parts.push_back(absl::StrJoin(all, ", "));
  }
  for (const auto& [count, names] : some) {
    parts.push_back(absl::StrCat(absl::StrJoin(names, ", "), " in ", count, " of ", layers, " layers"));
  }
  return absl::StrCat("judged by: ", absl::StrJoin(parts, "; "));
}

}  // namespace bellwether::server
