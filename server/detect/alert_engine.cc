#include "server/detect/alert_engine.h"

#include <algorithm>
#include <utility>

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
    case Rule::kUser:
      return "user";
  }
  return "unknown";
}

std::string AlertEngine::Subject::NameFor(Rule found) const { return rule != nullptr ? rule->name : NameOf(found); }

void AlertEngine::SetRules(std::shared_ptr<const std::vector<UserRule>> rules, const std::vector<int>& from) {
  rules_ = std::move(rules);
  std::vector<Open> open(rules_ == nullptr ? 0 : rules_->size());
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] >= 0) open[i] = std::move(of_rules_[static_cast<size_t>(from[i])]);
  }
  of_rules_ = std::move(open);
}

void AlertEngine::Update(Family family, int64_t step, const RunDescription& run, std::vector<Finding>* findings,
                         std::vector<Transition>* out) {
  Update({.family = family}, &open_[static_cast<size_t>(family)], step, run, findings, out);
}

void AlertEngine::UpdateRule(size_t rule, int64_t step, const RunDescription& run, std::vector<Finding>* findings,
                             std::vector<Transition>* out) {
  Update({.rule = &(*rules_)[rule]}, &of_rules_[rule], step, run, findings, out);
}

void AlertEngine::Update(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                         std::vector<Finding>* findings, std::vector<Transition>* out) {
  const UserRule* const rule = subject.rule;
  const int64_t resolve_steps = rule != nullptr ? rule->resolve_steps : options_.resolve_steps;
  const int64_t cooldown_steps = rule != nullptr ? rule->cooldown_steps : options_.cooldown_steps;
  if (findings->empty()) {
    if (open->firing && step - open->last_found >= resolve_steps) {
      Resolve(subject, open, step, run, absl::StrCat("no evidence since step ", open->last_found), out);
    }
    return;
  }
  // Stable and total: equal scores keep the order of layer and head.
  std::stable_sort(findings->begin(), findings->end(), [](const Finding& a, const Finding& b) {
    if (a.severity != b.severity) return a.severity > b.severity;
    return a.score > b.score;
  });
  const Finding& worst = findings->front();
  int32_t stage = 0;
  int64_t first_step = worst.first_step;
  for (const Finding& finding : *findings) {
    stage = std::max(stage, finding.stage);
    first_step = std::min(first_step, finding.first_step);
  }
  open->last_found = step;
  open->eta_known = worst.eta.known;
  open->eta_step = step;
  open->eta_steps = worst.eta.steps;
  open->eta_lower = worst.eta.lower_steps;
  open->eta_upper = worst.eta.upper_steps;

  if (open->firing) {
    if (worst.severity <= open->severity && stage <= open->stage) return;
    ++open->k;
  } else {
    const bool cooling = open->resolved_step >= 0 && step - open->resolved_step < cooldown_steps &&
                         worst.severity <= open->resolved_severity;
    if (cooling) return;
    open->firing = true;
    open->severity = Severity::kNone;
    open->stage = 0;
    open->k = 0;
    open->rule = worst.rule;
    open->first_step = first_step;
    open->layer = worst.where.layer;
    open->head = worst.where.head;
    open->key =
        absl::StrCat(subject.NameFor(worst.rule), "/", worst.where.layer, "/", worst.where.head, "/", first_step);
  }
  open->severity = std::max(open->severity, worst.severity);
  open->stage = std::max(open->stage, stage);
  out->push_back(Describe(subject, *open, step, run, *findings));
}

// The firing alert as its findings, worst first, show it.
Transition AlertEngine::Describe(const Subject& subject, const Open& open, int64_t step, const RunDescription& run,
                                 const std::vector<Finding>& findings) const {
  Transition change;
  change.run_name = run.name;
  change.attempt = run.attempt;
  change.key = open.key;
  change.k = open.k;
  change.state = AlertState::kFiring;
  change.severity = open.severity;
  change.rule = subject.NameFor(open.rule);
  change.stage = open.stage;
  change.step = step;
  change.first_step = open.first_step;
  change.strongest = findings.front().where;
  change.eta = findings.front().eta;
  for (const Finding& finding : findings) {
    if (finding.where.head >= 0) {
      ++change.heads_total;
      if (change.heads.size() < static_cast<size_t>(options_.heads_max)) change.heads.push_back(finding.where);
    }
    for (int32_t i = 0; i < finding.fact_count; ++i) {
      if (change.evidence.size() >= static_cast<size_t>(options_.evidence_max)) break;
      const Fact& fact = finding.facts[static_cast<size_t>(i)];
      change.evidence.push_back({.signal = fact.signal,
                                 .where = fact.where,
                                 .value = fact.value,
                                 .threshold = fact.threshold,
                                 .baseline = fact.baseline,
                                 .first_step = fact.first_step,
                                 .detector = fact.detector,
                                 .text = i == 0 ? finding.note : std::string()});
    }
  }
  const UserRule* const rule = subject.rule;
  change.cause = rule != nullptr ? rule->cause : CauseOf(subject.family, findings);
  change.summary = SummaryOf(run, change);
  change.advice = rule != nullptr ? rule->advice : AdviceOf(subject.family, run, change);
  return change;
}

void AlertEngine::Resolve(Family family, int64_t step, const RunDescription& run, const std::string& why,
                          std::vector<Transition>* out) {
  Resolve({.family = family}, &open_[static_cast<size_t>(family)], step, run, why, out);
}

void AlertEngine::ResolveRule(size_t rule, int64_t step, const RunDescription& run, const std::string& why,
                              std::vector<Transition>* out) {
  Resolve({.rule = &(*rules_)[rule]}, &of_rules_[rule], step, run, why, out);
}

void AlertEngine::Resolve(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                          const std::string& why, std::vector<Transition>* out) {
  if (!open->firing) return;
  open->firing = false;
  open->resolved_step = step;
  open->resolved_severity = open->severity;
  open->eta_known = false;
  Transition& change = out->emplace_back();
  change.run_name = run.name;
  change.attempt = run.attempt;
  change.key = open->key;
  change.k = ++open->k;
  change.state = AlertState::kResolved;
  change.severity = open->severity;
  change.rule = subject.NameFor(open->rule);
  change.stage = open->stage;
  change.step = step;
  change.first_step = open->first_step;
  change.strongest = {open->layer, open->head};
  change.summary = absl::StrCat(run.name, ": ", change.rule, " resolved at step ", step, ": ", why);
}

template <class Call>
void AlertEngine::ForEachFiring(const Call& call) const {
  for (const Open& open : open_) {
    if (open.firing) call(open);
  }
  for (const Open& open : of_rules_) {
    if (open.firing) call(open);
  }
}

uint32_t AlertEngine::alerts_firing() const {
  uint32_t firing = 0;
  ForEachFiring([&](const Open&) { ++firing; });
  return firing;
}

int32_t AlertEngine::stage() const {
  int32_t furthest = 0;
  ForEachFiring([&](const Open& open) { furthest = std::max(furthest, open.stage); });
  return furthest;
}

Eta AlertEngine::eta(int64_t now) const {
  Eta best;
  Severity severity = Severity::kNone;
  ForEachFiring([&](const Open& open) {
    if (!open.eta_known) return;
    const auto passed = static_cast<double>(now - open.eta_step);
    const double steps = std::max(0.0, open.eta_steps - passed);
    if (best.known && (open.severity < severity || (open.severity == severity && steps >= best.steps))) return;
    severity = open.severity;
    best = {.known = true,
            .steps = steps,
            .lower_steps = std::max(0.0, open.eta_lower - passed),
            .upper_steps = std::max(0.0, open.eta_upper - passed)};
  });
  return best;
}

}  // namespace bellwether::server
