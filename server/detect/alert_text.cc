#include "server/detect/alert_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace bellwether::server {
namespace {

constexpr char kCentre[] =
    "Turn attention.center_k on (k - mean(k) per sequence and key head, with "
    "the gradient through the mean): it stops "
    "the drift and has rescued runs up to sigma 30 without loss, on any "
    "kernel; 1 to 6 % of attention time at 4k tokens, up to 14 % at 1k; not "
    "with softcap.";
constexpr char kHighPrecision[] =
    " attention.mode = hp (unbiased delta) removes the cause; at most 2 % of "
    "forward and backward at 4k tokens.";

std::string RoundingAdvice(const RunDescription& run, const Transition& change) {
  std::string text;
  if (run.attention.softcap == 0 && !run.attention.centred) text = kCentre;
  absl::StrAppend(&text, kHighPrecision);
  if (change.stage >= 3) {
    absl::StrAppend(&text,
                    " The weights have moved: qk.clip on the named heads "
                    "brings sigma back; keep a checkpoint from "
                    "before step ",
                    change.first_step, ".");
  } else if (change.severity >= Severity::kCritical) {
    absl::StrAppend(&text,
                    " The weights have not moved yet, but most rows now push "
                    "the same way: repair at once.");
  } else {
    absl::StrAppend(&text,
                    " No work is lost yet: keep training, repair at the next "
                    "convenient step.");
  }
  return text;
}

}  // namespace

std::string CauseOf(Family family, const std::vector<Finding>& findings) {
  switch (family) {
    case Family::kRounding:
      for (const Finding& finding : findings) {
        if (finding.rule == Rule::kDrift) return "biased delta";
      }
      return "unknown";
    case Family::kLogits:
      return "logit growth";
    case Family::kDisagreement:
      return "corruption";
    default:
      return "unknown";
  }
}

std::string SummaryOf(const RunDescription& run, const Transition& change) {
  std::string text = absl::StrCat(run.name, ": ", change.rule);
  if (change.strongest.layer >= 0) {
    absl::StrAppend(&text, " in layer ", change.strongest.layer);
    if (change.strongest.head >= 0) absl::StrAppend(&text, " head ", change.strongest.head);
    if (change.heads_total > 1) absl::StrAppend(&text, " (+", change.heads_total - 1, " others)");
  }
  int pieces = 0;
  for (const Evidence& evidence : change.evidence) {
    if (!(evidence.where == change.strongest) || pieces == 4) continue;
    absl::StrAppendFormat(&text, "%s %s %.4g (threshold %.4g)", pieces == 0 ? ":" : ",", evidence.signal,
                          evidence.value, evidence.threshold);
    ++pieces;
  }
  absl::StrAppend(&text, ", since step ", change.first_step);
  if (change.eta.known) {
    absl::StrAppendFormat(&text, "; expected to be lost in %.0f steps (80 %%: %.0f to %.0f)", change.eta.steps,
                          change.eta.lower_steps, change.eta.upper_steps);
  }
  return text;
}

std::string RepairSummaryOf(const RunDescription& run, const Transition& change) {
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

std::string AdviceOf(Family family, const RunDescription& run, const Transition& change) {
  switch (family) {
    case Family::kRounding:
      return RoundingAdvice(run, change);
    case Family::kLogits:
      return "True logit growth: centring does not help. qk.clip(gamma) on the "
             "named heads rescales W_Q and W_K; a "
             "lower learning rate, weight decay or QK-norm prevents it.";
    case Family::kLoss:
      return "The loss has left its course and stays there: look at the "
             "attention alerts of this run first; without "
             "one, go back to a checkpoint from before the rise and skip the "
             "data of these steps.";
    case Family::kGradient:
      return "The gradient norm stays far above its past: check learning rate "
             "and data of these steps.";
    case Family::kNonfinite:
      return "Stop using the newest checkpoint: go back to the last one before "
             "this step.";
    case Family::kDisagreement:
      return "Replicas that must be equal are not: suspect silent data "
             "corruption of the odd rank's device, or "
             "weights that are not synchronised; compare checksums of the "
             "weights, drain that host.";
    case Family::kSilent:
      return "Look whether the silent ranks still train; the others' samples "
             "are judged meanwhile.";
    case Family::kOverhead:
      return "Sample less often (a longer period) or fewer signals.";
  }
  return {};
}

}  // namespace bellwether::server
