#include "server/detect/alert_text.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/eta_text.h"

namespace bellwether::server {
namespace {

// What is shown of a rule: a spike is not yet what the rule is named for, nor is how a run was found.
std::string NameIn(const AlertTransition& change) {
  const bool found = change.severity <= Severity::kInfo && !change.evidence.empty() &&
                     std::all_of(change.evidence.begin(), change.evidence.end(),
                                 [](const Evidence& evidence) { return evidence.detector == kFoundDetector; });
  if (found) return absl::StrCat(change.rule, ", as in the first sample,");
  const bool spike = change.severity <= Severity::kInfo && (change.rule == "loss" || change.rule == "gradient");
  return spike ? absl::StrCat("one spike of the ", change.rule) : change.rule;
}

// "; law A1 differs by 63 standard deviations of rounding (chance: 6.2): rounding is biased there"
std::string BiasText(const AlertTransition& change) {
  const Evidence* largest = nullptr;
  for (const Evidence& evidence : change.evidence) {
    const bool of_laws = evidence.detector == "law" && evidence.where == change.strongest;
    if (of_laws && (largest == nullptr || evidence.value > largest->value)) largest = &evidence;
  }
  if (largest == nullptr) return {};
  const std::string law = absl::AsciiStrToUpper(largest->signal.substr(4, 2));  // law_a1_z
  return absl::StrFormat(
      "; law %s differs by %.3g standard deviations of rounding (chance: %.3g): rounding is biased there", law,
      largest->value, largest->threshold);
}

}  // namespace

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
  std::string text = absl::StrCat(run.name, ": ", NameIn(change));
  if (change.strongest.layer >= 0) {
    absl::StrAppend(&text, " in layer ", change.strongest.layer);
    if (change.strongest.head >= 0) absl::StrAppend(&text, " head ", change.strongest.head);
    if (change.heads_total > 1) absl::StrAppend(&text, " (+", change.heads_total - 1, " others)");
  }
  int pieces = 0;
  for (const Evidence& evidence : change.evidence) {
    if (!(evidence.where == change.strongest) || pieces == 4 || evidence.detector == "law") continue;
    absl::StrAppendFormat(&text, "%s %s %.4g (threshold %.4g)", pieces == 0 ? ":" : ",", evidence.signal,
                          evidence.value, evidence.threshold);
    ++pieces;
  }
  absl::StrAppend(&text, ", since step ", change.first_step);
  text += BiasText(change);
  if (change.eta.known) {
    absl::StrAppend(&text, "; expected to be lost in ", EtaText(change.eta));
  }
  return text;
}

std::string RepairSummaryOf(const RunDescription& run, const AlertTransition& change) {
  std::string text = absl::StrCat(run.name, ": ", change.rule);
  if (change.strongest.layer >= 0) absl::StrAppend(&text, " in layer ", change.strongest.layer);
  if (change.strongest.head >= 0) absl::StrAppend(&text, " head ", change.strongest.head);
  if (change.heads_total > 1) absl::StrAppend(&text, " (+", change.heads_total - 1, " others)");
  absl::StrAppend(&text, ", since step ", change.first_step, ": under repair since step ", change.step,
                  ", when the keys were centred");
  return text;
}

std::string RepairAdvice() {
  return "Keys are centred, so that the rules of drift and ties see nothing. The alert stays until sigma(W_Q) of its "
         "heads stands still. Wait for that; if sigma or the scores go on growing, attention.mode = hp is next.";
}

}  // namespace bellwether::server
