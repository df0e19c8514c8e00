#include "server/detect/alert_engine.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/detect/alert_text.h"

namespace bellwether::server {
namespace {

bool ToldExactly(const std::vector<Evidence>& evidence) {
  return std::any_of(evidence.begin(), evidence.end(),
                     [](const Evidence& piece) { return piece.detector == kExactDetector; });
}

}  // namespace

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
    case Rule::kKernel:
      return "kernel";
    case Rule::kArithmetic:
      return "arithmetic";
    case Rule::kOwn:
      return "own";
    case Rule::kFrozen:
      return "frozen";
    case Rule::kExperts:
      return "experts";
    case Rule::kSequences:
      return "sequences";
    case Rule::kParameters:
      return "parameters";
    case Rule::kCorruption:
      return "corruption";
    case Rule::kLearning:
      return "learning";
    case Rule::kUser:
      return "user";
  }
  return "unknown";
}

std::string AlertEngine::Subject::NameFor(Rule found) const { return rule != nullptr ? rule->name : NameOf(found); }

std::string AlertEngine::NextKey(const Subject& subject) {
  static_assert(kFamilies <= 'u' - 'a');
  const auto family = static_cast<size_t>(subject.family);
  const char letter = subject.rule != nullptr ? 'u' : static_cast<char>('a' + family);
  const size_t at = subject.rule != nullptr ? kFamiliesBefore : family < kFamiliesBefore ? family : family + 1;
  return absl::StrCat(std::string(1, letter), ++numbered_[at]);
}

void AlertEngine::SetNumbered(std::vector<uint32_t> numbered) {
  numbered.resize(numbered_.size());
  numbered_ = std::move(numbered);
}

void AlertEngine::SetRules(std::shared_ptr<const std::vector<UserRule>> rules, const std::vector<int>& from) {
  rules_ = std::move(rules);
  std::vector<Open> open(rules_ == nullptr ? 0 : rules_->size());
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] >= 0) open[i] = std::move(of_rules_[static_cast<size_t>(from[i])]);
  }
  of_rules_ = std::move(open);
}

void AlertEngine::Update(Family family, int64_t step, const RunDescription& run, std::vector<Finding>* findings,
                         std::vector<AlertTransition>* out) {
  Update({.family = family}, &open_[static_cast<size_t>(family)], step, run, findings, out);
}

void AlertEngine::UpdateRule(size_t rule, int64_t step, const RunDescription& run, std::vector<Finding>* findings,
                             std::vector<AlertTransition>* out) {
  Update({.rule = &(*rules_)[rule]}, &of_rules_[rule], step, run, findings, out);
}

void AlertEngine::Update(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                         std::vector<Finding>* findings, std::vector<AlertTransition>* out) {
  const UserRule* const rule = subject.rule;
  const int64_t resolve_steps = rule != nullptr ? rule->resolve_steps : options_.resolve_steps;
  const int64_t cooldown_steps = rule != nullptr ? rule->cooldown_steps : options_.cooldown_steps;
  if (findings->empty()) {
    if (open->firing && open->told.repaired_step < 0 && step - open->last_found >= resolve_steps) {
      Resolve(subject, open, step, run, absl::StrCat("no evidence since step ", open->last_found), out);
    }
    return;
  }
  // Stable and total: equal scores keep the order of layer and head.
  std::stable_sort(findings->begin(), findings->end(), [](const Finding& a, const Finding& b) {
    if (a.severity != b.severity) return a.severity > b.severity;
    if (a.exact != b.exact) return a.exact;
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

  const AdviceState state = StateFor(open->firing ? std::max(open->severity, worst.severity) : worst.severity,
                                     open->firing ? std::max(open->stage, stage) : stage, *findings);
  const bool goes_back = rule == nullptr && worst.advice.empty() && GoesBack(subject.family, run, state);
  if (open->firing) {
    const bool says_more = worst.news || (worst.exact && !ToldExactly(open->told.evidence));
    const bool rises = worst.severity > open->severity || stage > open->stage || (goes_back && !open->went_back);
    if (!rises && !says_more) return;
    ++open->k;
  } else {
    const bool cooling = open->resolved_step >= 0 && step - open->resolved_step < cooldown_steps &&
                         worst.severity <= open->resolved_severity;
    if (cooling) return;
    open->firing = true;
    open->severity = Severity::kNone;
    open->stage = 0;
    open->k = 0;
    open->went_back = false;
    open->rule = worst.rule;
    open->first_step = first_step;
    open->layer = worst.where.layer;
    open->head = worst.where.head;
    open->told = {};
    open->key = NextKey(subject);
  }
  open->severity = std::max(open->severity, worst.severity);
  open->stage = std::max(open->stage, stage);
  // Advice of its own says more than to go back: what says only that does not follow it.
  open->went_back |= goes_back || (rule == nullptr && !worst.advice.empty());
  out->push_back(Describe(subject, open, step, run, *findings));
}

void AlertEngine::CouldNotLook(Family family, int64_t step) {
  Open& open = open_[static_cast<size_t>(family)];
  if (open.firing) open.last_found = step;
}

void AlertEngine::BeginRepair(Family family, int64_t step, const RunDescription& run,
                              std::vector<AlertTransition>* out) {
  BeginRepair({.family = family}, &open_[static_cast<size_t>(family)], step, run, out);
}

void AlertEngine::BeginRepairOfRule(size_t rule, int64_t step, const RunDescription& run,
                                    std::vector<AlertTransition>* out) {
  BeginRepair({.rule = &(*rules_)[rule]}, &of_rules_[rule], step, run, out);
}

void AlertEngine::BeginRepair(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                              std::vector<AlertTransition>* out) {
  if (!open->firing || open->told.repaired_step >= 0) return;
  open->told.repaired_step = step;
  open->last_found = step;
  open->eta_known = false;  // A growth of before the repair says nothing of what is left.
  // Of a state that was saved before such things were kept.
  if (open->told.heads.empty()) {
    open->told.strongest = {open->layer, open->head};
    open->told.heads = {{open->layer, open->head}};
    open->told.heads_total = open->head >= 0 ? 1 : 0;
  }
  if (open->told.cause.empty()) open->told.cause = "unknown";
  ++open->k;
  AlertTransition& change = out->emplace_back(ChangeOf(subject, *open, step, run, AlertState::kFiring));
  change.strongest = open->told.strongest;
  for (const Head& head : open->told.heads) {
    if (head.head >= 0) change.heads.push_back(head);
  }
  change.heads_total = open->told.heads_total;
  change.evidence = open->told.evidence;
  change.cause = open->told.cause;
  change.summary = RepairSummaryOf(run, change);
  // Who was told to go back is not told to wait.
  AdviceState state = StateFor(open->severity, open->stage, {});
  if (open->went_back) state.stage = 5;
  change.advice =
      open->went_back ? AdviceText(subject.family, run, state, BeginOf(subject.family, *open)) : RepairAdvice();
}

void AlertEngine::EndRepairs(int64_t step) {
  const auto end = [step](Open* open) {
    if (open->told.repaired_step < 0) return;
    open->told.repaired_step = -1;
    open->last_found = step;
  };
  for (Open& open : open_) end(&open);
  for (Open& open : of_rules_) end(&open);
}

void AlertEngine::ResolveRepaired(int64_t step, const RunDescription& run, const StandStill& stand_still,
                                  std::vector<AlertTransition>* out) {
  const auto resolve = [&](const Subject& subject, Open* open, int64_t resolve_steps) {
    if (!open->firing || open->told.repaired_step < 0 || step - open->last_found < resolve_steps) return;
    if (!stand_still(open->told.heads, resolve_steps)) return;
    Resolve(subject, open, step, run,
            absl::StrCat("under repair since step ", open->told.repaired_step,
                         ", and sigma(W_Q) of its heads has stood still for ", resolve_steps, " steps"),
            out);
  };
  for (size_t i = 0; i < open_.size(); ++i) {
    resolve({.family = static_cast<Family>(i)}, &open_[i], options_.resolve_steps);
  }
  for (size_t i = 0; i < of_rules_.size(); ++i) {
    resolve({.rule = &(*rules_)[i]}, &of_rules_[i], (*rules_)[i].resolve_steps);
  }
}

const std::vector<Head>& AlertEngine::under_repair(Family family) const {
  static const std::vector<Head> none;
  const Open& open = open_[static_cast<size_t>(family)];
  return open.firing && open.told.repaired_step >= 0 ? open.told.heads : none;
}

AlertTransition AlertEngine::ChangeOf(const Subject& subject, const Open& open, int64_t step, const RunDescription& run,
                                      AlertState state) {
  AlertTransition change;
  change.run_name = run.name;
  change.attempt = run.attempt;
  change.key = open.key;
  change.k = open.k;
  change.state = state;
  change.severity = open.severity;
  change.rule = subject.NameFor(open.rule);
  change.stage = open.stage;
  change.step = step;
  change.first_step = open.first_step;
  return change;
}

// The firing alert as its findings, worst first, show it.
AlertTransition AlertEngine::Describe(const Subject& subject, Open* told, int64_t step, const RunDescription& run,
                                      const std::vector<Finding>& findings) const {
  const Open& open = *told;
  AlertTransition change = ChangeOf(subject, open, step, run, AlertState::kFiring);
  change.strongest = findings.front().where;
  change.eta = findings.front().eta;
  // Two findings may be of one head.
  std::set<Head> named;
  for (const Finding& finding : findings) {
    if (finding.where.head >= 0 && named.insert(finding.where).second) {
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
  const Finding& worst = findings.front();
  // Under repair the rules that know the cause are off: it is what it was.
  change.cause = open.told.repaired_step >= 0 ? open.told.cause
                 : rule != nullptr            ? rule->cause
                 : !worst.cause.empty()       ? worst.cause
                                              : CauseOf(subject.family, findings);
  told->told.strongest = change.strongest;
  told->told.heads = change.heads;
  told->told.heads_total = change.heads_total;
  told->told.evidence = change.evidence;
  told->told.cause = change.cause;
  change.summary = worst.summary.empty() ? SummaryOf(run, change) : absl::StrCat(run.name, ": ", worst.summary);
  const AdviceState state = StateFor(open.severity, open.stage, findings);
  change.advice = rule != nullptr         ? rule->advice
                  : !worst.advice.empty() ? worst.advice
                                          : AdviceText(subject.family, run, state, BeginOf(subject.family, open));
  return change;
}

AdviceState AlertEngine::StateFor(Severity severity, int32_t stage, const std::vector<Finding>& findings) const {
  AdviceState state{.severity = severity, .stage = stage, .sigma_max = rescue_sigma_max_};
  for (const Finding& finding : findings) {
    if (std::isnan(state.sigma) || finding.sigma > state.sigma) state.sigma = finding.sigma;  // NaN: not known.
  }
  // The loss is gone for all of the run, once that is more than information.
  for (const Family family : {Family::kLoss, Family::kNonfinite}) {
    const Open& other = open_[static_cast<size_t>(family)];
    const Severity least = family == Family::kLoss ? Severity::kWarning : Severity::kCritical;
    if (other.firing && other.severity >= least) state.stage = std::max(state.stage, other.stage);
  }
  return state;
}

int64_t AlertEngine::BeginOf(Family family, const Open& open) const {
  int64_t begin = open.first_step;
  if (family != Family::kLoss && family != Family::kGradient) return begin;
  // What the loss suffers from began with the attention's alert.
  for (const Family cause : {Family::kRounding, Family::kLogits}) {
    const Open& other = open_[static_cast<size_t>(cause)];
    if (other.firing) begin = std::min(begin, other.first_step);
  }
  return begin;
}

uint32_t AlertEngine::went_back() const {
  uint32_t families = 0;
  for (size_t i = 0; i < open_.size(); ++i)
    families |= static_cast<uint32_t>(open_[i].firing && open_[i].went_back) << i;
  return families;
}

void AlertEngine::RestoreWentBack(uint32_t families) {
  for (size_t i = 0; i < open_.size(); ++i) open_[i].went_back = (families >> i & 1u) != 0;
}

void AlertEngine::Resolve(Family family, int64_t step, const RunDescription& run, const std::string& why,
                          std::vector<AlertTransition>* out) {
  Resolve({.family = family}, &open_[static_cast<size_t>(family)], step, run, why, out);
}

void AlertEngine::ResolveRule(size_t rule, int64_t step, const RunDescription& run, const std::string& why,
                              std::vector<AlertTransition>* out) {
  Resolve({.rule = &(*rules_)[rule]}, &of_rules_[rule], step, run, why, out);
}

void AlertEngine::Resolve(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                          const std::string& why, std::vector<AlertTransition>* out) {
  if (!open->firing) return;
  open->firing = false;
  open->told = {};
  open->resolved_step = step;
  open->resolved_severity = open->severity;
  open->eta_known = false;
  ++open->k;
  AlertTransition& change = out->emplace_back(ChangeOf(subject, *open, step, run, AlertState::kResolved));
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
