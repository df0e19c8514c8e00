#include "server/detect/alert_text.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bellwether/time_text.h"
#include "server/model/alert_words.h"

namespace bellwether::server {
namespace {

bool AsFound(const AlertTransition& change) {
  return change.severity <= Severity::kInfo && !change.evidence.empty() &&
         std::all_of(change.evidence.begin(), change.evidence.end(),
                     [](const Evidence& evidence) { return evidence.detector == kFoundDetector; });
}

// " Law A1 differs by 63 standard deviations of rounding (chance: 6.2): rounding is biased there."
std::string BiasText(const AlertTransition& change) {
  const Evidence* largest = nullptr;
  for (const Evidence& evidence : change.evidence) {
    const bool of_laws = evidence.detector == "law" && evidence.where == change.strongest;
    if (of_laws && (largest == nullptr || evidence.value > largest->value)) largest = &evidence;
  }
  if (largest == nullptr) return {};
  const std::string law = absl::AsciiStrToUpper(largest->signal.substr(4, 2));  // law_a1_z
  return absl::StrFormat(
      " Law %s differs by %.3g standard deviations of rounding (chance: %.3g): rounding is biased there.", law,
      largest->value, largest->threshold);
}

// How far a value is beyond its limit, as a factor; 1 where there is none to hold it against.
double Beyond(const Evidence& piece) {
  if (!std::isfinite(piece.value)) return std::numeric_limits<double>::infinity();
  const double factor = std::abs(piece.value / piece.threshold);
  if (!std::isfinite(factor)) return 1;
  // What must not fall below its limit is as bad as what is as far above.
  return factor < 1 && piece.detector != kNextInLine ? 1 / std::max(factor, 1e-300) : factor;
}

}  // namespace

void OrderEvidence(int32_t stage, bool by_limits, std::vector<Evidence>* evidence) {
  std::vector<std::string> signals;  // In the order in which they were found.
  for (const Evidence& piece : *evidence) {
    if (std::find(signals.begin(), signals.end(), piece.signal) == signals.end()) signals.push_back(piece.signal);
  }
  const auto place = [&signals](const Evidence& piece) {
    return std::find(signals.begin(), signals.end(), piece.signal) - signals.begin();
  };
  if (by_limits) {
    std::stable_sort(evidence->begin(), evidence->end(), [&place](const Evidence& a, const Evidence& b) {
      const auto of_a = place(a), of_b = place(b);
      return of_a != of_b ? of_a < of_b : Beyond(a) > Beyond(b);
    });
  }
  if (stage < 5) return;
  std::stable_partition(evidence->begin(), evidence->end(),
                        [](const Evidence& piece) { return piece.signal == FindSignal(SignalId::kLoss)->name; });
}

std::string CauseOf(Family family, const std::vector<Finding>& findings) {
  switch (family) {
    case Family::kRounding:
      for (const Finding& finding : findings) {
        if (finding.rule == Rule::kDrift) return "rounding drift";
      }
      return "unknown";
    case Family::kLogits:
      return "logit growth";
    case Family::kDisagreement:
      return "replicas apart";
    case Family::kKernel:
    case Family::kArithmetic:
      return "faulty kernel";
    case Family::kFrozen:
      return "optimizer does not move";
    case Family::kParameters:
      return "parameters out of their past";
    default:
      return "unknown";
  }
}

std::string SummaryOf(const RunDescription& run, const AlertTransition& change) {
  const bool spike = change.severity <= Severity::kInfo && (change.rule == "loss" || change.rule == "gradient");
  const std::string place = PlaceText(change);
  if (!IsBuiltin(change.rule)) {
    const Evidence* const first = change.evidence.empty() ? nullptr : &change.evidence.front();
    // Of a rule that people wrote: its signal has the name that stands in the rule.
    return absl::StrCat(run.name, ": ", change.rule, place.empty() ? "" : " in ", place,
                        first == nullptr ? ""
                                         : absl::StrCat(": ", first->signal, " ", ValueText(first->value), " (limit ",
                                                        ValueText(first->threshold), "),"),
                        " since step ", CountText(change.first_step), ".");
  }
  const std::string happens =
      AsFound(change) ? absl::StrCat(place.empty() ? "the model" : place, " was beyond its limits in the first sample")
                      : HappensText(change);
  return absl::StrCat(run.name, ": ", happens, spike || AsFound(change) ? " at step " : " since step ",
                      CountText(change.first_step), ".", BiasText(change));
}

std::string OwnSummaryOf(const RunDescription& run, const std::string& words) {
  std::string text = absl::StrCat(run.name, ": ", WithStepsGrouped(words));
  if (!absl::EndsWith(text, ".")) text += '.';
  return text;
}

std::string TailOf(const AlertTransition& change, std::string_view eta_words, LossState loss) {
  std::string text;
  if (change.eta.known && !eta_words.empty()) {
    absl::StrAppend(&text, " In ", TimeLeftText(change.eta), " ", std::string(eta_words), ".");
  } else if (change.eta.known && loss != LossState::kGone) {
    absl::StrAppend(&text, " ", TimeLeftText(change.eta), " left.");
  }
  if (loss == LossState::kNormal) text += " Loss still normal.";
  if (loss == LossState::kGone) text += " The loss has left its course.";
  return text;
}

std::string RepairSummaryOf(const RunDescription& run, const AlertTransition& change) {
  const std::string place = PlaceText(change);
  return absl::StrCat(run.name, ": ", place.empty() ? "the model" : place, " is ", kUnderRepair, CountText(change.step),
                      ", when the keys were centred. Before: ", NounOf(change.rule), " since step ",
                      CountText(change.first_step), ".");
}

std::string EndSummaryOf(const RunDescription& run, const AlertTransition& change, double step_seconds,
                         const std::string& why) {
  const std::string place = PlaceText(change);
  const int64_t steps = change.step - change.first_step;
  std::string text = absl::StrCat(run.name, ": ", NounOf(change.rule), place.empty() ? "" : " of ", place,
                                  " is over at step ", CountText(change.step), ", after ", CountText(steps), " steps");
  if (step_seconds > 0) absl::StrAppend(&text, " (~", TimeText(static_cast<double>(steps) * step_seconds), ")");
  return absl::StrCat(text, ": ", why, ".");
}

std::string RepairAdvice() {
  return "Nothing for now: wait until sigma(W_Q) of its heads stands still, as the alert does. Keys are centred, so "
         "that "
         "the rules of drift and ties see nothing. If sigma or the scores go on growing, attention.mode = hp is next.";
}

}  // namespace bellwether::server
