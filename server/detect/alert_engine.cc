#include "server/detect/alert_engine.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/detect/alert_text.h"

namespace bellwether::server {

const char* NameOf(Rule rule) {
  switch (rule) {
    case Rule::kDrift:
      return "drift";
    case Rule::kTies:
      return "ties";
    case Rule::kNorm:
      return "norm";
    case Rule::kLogits:
      return "logits";
    case Rule::kLoss:
      return "loss";
    case Rule::kGradient:
      return "gradient";
    case Rule::kNonfinite:
      return "nonfinite";
    case Rule::kDisagreement:
      return "disagreement";
    case Rule::kSilent:
      return "silent";
    case Rule::kOverhead:
      return "overhead";
  }
  return "unknown";
}

void AlertEngine::Update(Family family, int64_t step, const RunDescription& run,
                         std::vector<Finding>* findings,
                         std::vector<Transition>* out) {
  Open& open = open_[static_cast<size_t>(family)];
  if (findings->empty()) {
    if (open.firing && step - open.last_found >= options_.resolve_steps) {
      Resolve(family, step, run,
              absl::StrCat("no evidence since step ", open.last_found), out);
    }
    return;
  }
  // Stable and total: equal scores keep the order of layer and head.
  std::stable_sort(findings->begin(), findings->end(),
                   [](const Finding& a, const Finding& b) {
                     if (a.severity != b.severity)
                       return a.severity > b.severity;
                     return a.score > b.score;
                   });
  const Finding& worst = findings->front();
  int32_t stage = 0;
  int64_t first_step = worst.first_step;
  for (const Finding& finding : *findings) {
    stage = std::max(stage, finding.stage);
    first_step = std::min(first_step, finding.first_step);
  }
  open.last_found = step;
  open.eta_known = worst.eta.known;
  open.eta_step = step;
  open.eta_steps = worst.eta.steps;
  open.eta_lower = worst.eta.lower_steps;
  open.eta_upper = worst.eta.upper_steps;

  if (open.firing) {
    if (worst.severity <= open.severity && stage <= open.stage) return;
    ++open.k;
  } else {
    const bool cooling = open.resolved_step >= 0 &&
                         step - open.resolved_step < options_.cooldown_steps &&
                         worst.severity <= open.resolved_severity;
    if (cooling) return;
    open.firing = true;
    open.severity = Severity::kNone;
    open.stage = 0;
    open.k = 0;
    open.rule = worst.rule;
    open.first_step = first_step;
    open.layer = worst.where.layer;
    open.head = worst.where.head;
    open.key = absl::StrCat(NameOf(worst.rule), "/", worst.where.layer, "/",
                            worst.where.head, "/", first_step);
  }
  open.severity = std::max(open.severity, worst.severity);
  open.stage = std::max(open.stage, stage);

  Transition& change = out->emplace_back();
  change.run_name = run.name;
  change.attempt = run.attempt;
  change.key = open.key;
  change.k = open.k;
  change.state = AlertState::kFiring;
  change.severity = open.severity;
  change.rule = std::string(NameOf(open.rule));
  change.stage = open.stage;
  change.step = step;
  change.first_step = open.first_step;
  change.strongest = worst.where;
  change.eta = worst.eta;
  for (const Finding& finding : *findings) {
    if (finding.where.layer >= 0) {
      ++change.heads_total;
      if (change.heads.size() < static_cast<size_t>(options_.heads_max))
        change.heads.push_back(finding.where);
    }
    for (int32_t i = 0; i < finding.fact_count; ++i) {
      if (change.evidence.size() >= static_cast<size_t>(options_.evidence_max))
        break;
      const Fact& fact = finding.facts[static_cast<size_t>(i)];
      change.evidence.push_back(
          {.signal = fact.signal,
           .where = fact.where,
           .value = fact.value,
           .threshold = fact.threshold,
           .baseline = fact.baseline,
           .first_step = fact.first_step,
           .detector = fact.detector,
           .text = i == 0 ? finding.note : std::string()});
    }
  }
  change.cause = CauseOf(family, *findings);
  change.summary = SummaryOf(run, change);
  change.advice = AdviceOf(family, run, change);
}

void AlertEngine::Resolve(Family family, int64_t step,
                          const RunDescription& run, const std::string& why,
                          std::vector<Transition>* out) {
  Open& open = open_[static_cast<size_t>(family)];
  if (!open.firing) return;
  open.firing = false;
  open.resolved_step = step;
  open.resolved_severity = open.severity;
  open.eta_known = false;
  Transition& change = out->emplace_back();
  change.run_name = run.name;
  change.attempt = run.attempt;
  change.key = open.key;
  change.k = ++open.k;
  change.state = AlertState::kResolved;
  change.severity = open.severity;
  change.rule = std::string(NameOf(open.rule));
  change.stage = open.stage;
  change.step = step;
  change.first_step = open.first_step;
  change.strongest = {open.layer, open.head};
  change.summary = absl::StrCat(run.name, ": ", change.rule,
                                " resolved at step ", step, ": ", why);
}

uint32_t AlertEngine::alerts_firing() const {
  return static_cast<uint32_t>(
      std::count_if(open_.begin(), open_.end(),
                    [](const Open& open) { return open.firing; }));
}

int32_t AlertEngine::stage() const {
  int32_t furthest = 0;
  for (const Open& open : open_) {
    if (open.firing) furthest = std::max(furthest, open.stage);
  }
  return furthest;
}

Eta AlertEngine::eta(int64_t now) const {
  Eta best;
  Severity severity = Severity::kNone;
  for (const Open& open : open_) {
    if (!open.firing || !open.eta_known) continue;
    const auto passed = static_cast<double>(now - open.eta_step);
    const double steps = std::max(0.0, open.eta_steps - passed);
    if (best.known && (open.severity < severity ||
                       (open.severity == severity && steps >= best.steps)))
      continue;
    severity = open.severity;
    best = {.known = true,
            .steps = steps,
            .lower_steps = std::max(0.0, open.eta_lower - passed),
            .upper_steps = std::max(0.0, open.eta_upper - passed)};
  }
  return best;
}

}  // namespace bellwether::server
