#include "server/detect/alert_engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/detect/illness.h"
#include "server/model/alert_words.h"

namespace bellwether::server {
namespace {

// Signs that begin within so many steps of each other began together.
constexpr int64_t kTogetherSteps = 200;

void SortWorstFirst(std::vector<Finding>* findings) {
  // Stable and total: equal scores keep the order of layer and head.
  std::stable_sort(findings->begin(), findings->end(), [](const Finding& a, const Finding& b) {
    if (a.severity != b.severity) return a.severity > b.severity;
    if (a.exact != b.exact) return a.exact;
    return a.score > b.score;
  });
}

bool OfHeads(Family family) { return family == Family::kRounding || family == Family::kLogits; }

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

void PutBefore(std::vector<Finding> first, std::vector<Finding>* others) {
  if (first.empty()) return;
  if (!others->empty()) {
    absl::StrAppend(&first.front().summary, "; ", others->front().summary);
    first.front().news |= others->front().news;
  }
  const double least = others->empty() ? 0 : others->front().score;
  for (size_t i = 0; i < first.size(); ++i) first[i].score = least + static_cast<double>(first.size() - i);
  others->insert(others->begin(), std::make_move_iterator(first.begin()), std::make_move_iterator(first.end()));
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

void AlertEngine::Collect(Family family, const std::vector<Finding>& findings) {
  if (findings.empty()) {
    looked_ |= BitOf(family);
    return;
  }
  collected_.emplace_back(family, findings);
  SortWorstFirst(&collected_.back().second);
}

void AlertEngine::Flush(int64_t step, const RunDescription& run, std::vector<AlertTransition>* out) {
  // What says most comes first, so that the others join it.
  const auto rank = [](const auto& found) {
    const Finding& worst = found.second.front();
    return CauseNamed(found.first, worst.cause.empty() ? CauseOf(found.first, found.second) : worst.cause).rank;
  };
  std::stable_sort(collected_.begin(), collected_.end(),
                   [&](const auto& a, const auto& b) { return rank(a) > rank(b); });
  for (const auto& [family, findings] : collected_) {
    Apply({.family = family}, &open_[static_cast<size_t>(family)], step, run, findings, out);
  }
  collected_.clear();
  for (size_t i = 0; looked_ != 0 && i < open_.size(); ++i) {
    const auto family = static_cast<Family>(i);
    if ((looked_ & BitOf(family)) == 0) continue;
    if (Open* const open = OpenWith(family)) Lapse({.family = family}, open, step, run, out);
  }
  looked_ = 0;
  for (Open& open : open_) {
    if (!std::exchange(open.rises, false)) continue;
    out->push_back(Describe({.family = Leading(open).family}, &open, step, run));
  }
}

void AlertEngine::Update(Family family, int64_t step, const RunDescription& run, const std::vector<Finding>& findings,
                         std::vector<AlertTransition>* out) {
  Collect(family, findings);
  Flush(step, run, out);
}

void AlertEngine::UpdateRule(size_t rule, int64_t step, const RunDescription& run, const std::vector<Finding>& findings,
                             std::vector<AlertTransition>* out) {
  const Subject subject{.rule = &(*rules_)[rule]};
  Open* const open = &of_rules_[rule];
  if (findings.empty()) {
    if (open->firing) Lapse(subject, open, step, run, out);
    return;
  }
  std::vector<Finding> sorted = findings;
  SortWorstFirst(&sorted);
  Apply(subject, open, step, run, sorted, out);
  if (std::exchange(open->rises, false)) out->push_back(Describe(subject, open, step, run));
}

AlertEngine::Open* AlertEngine::OpenWith(Family family) {
  for (Open& open : open_) {
    if (!open.firing) continue;
    for (const Sign& sign : open.signs) {
      if (sign.family == family) return &open;
    }
  }
  return nullptr;
}

const AlertEngine::Sign* AlertEngine::SignOf(Family family) const {
  for (const Open& open : open_) {
    if (!open.firing) continue;
    for (const Sign& sign : open.signs) {
      if (sign.family == family && !sign.lapsed) return &sign;
    }
  }
  return nullptr;
}

AlertEngine::Sign& AlertEngine::Leading(Open& open) {
  return *std::max_element(open.signs.begin(), open.signs.end(), [](const Sign& a, const Sign& b) {
    const int32_t rank_a = CauseNamed(a.family, a.cause).rank, rank_b = CauseNamed(b.family, b.cause).rank;
    if (rank_a != rank_b) return rank_a < rank_b;
    if (a.severity != b.severity) return a.severity < b.severity;
    // Of one cause the loss says what it does.
    const bool loss_a = a.family == Family::kLoss, loss_b = b.family == Family::kLoss;
    if (rank_a > 0 && a.cause == b.cause && loss_a != loss_b) return loss_b;
    return a.first_step > b.first_step;
  });
}

AlertEngine::Open* AlertEngine::IllnessOf(const Sign& sign, int64_t step) {
  const IllnessCause& cause = CauseNamed(sign.family, sign.cause);
  Open* best = nullptr;
  int32_t best_rank = 0;
  for (Open& open : open_) {
    if (!open.firing) continue;
    const Sign& leading = Leading(open);
    const IllnessCause& known = CauseNamed(leading.family, leading.cause);
    const bool in_reach = known.reach_steps == kAsLongAsItFires || step - leading.last_found <= known.reach_steps;
    const bool follows =
        Explains(known, sign.family) && in_reach && sign.first_step >= open.first_step - kTogetherSteps;
    const bool explains = Explains(cause, leading.family) && cause.rank >= known.rank &&
                          open.first_step >= sign.first_step - kTogetherSteps;
    if ((!follows && !explains) || !MayBeOnePlace(leading, sign)) continue;
    if (best != nullptr &&
        (known.rank < best_rank || (known.rank == best_rank && open.first_step >= best->first_step))) {
      continue;
    }
    best = &open;
    best_rank = known.rank;
  }
  return best;
}

// What heads show of two layers are two illnesses.
bool AlertEngine::MayBeOnePlace(const Sign& a, const Sign& b) {
  const auto in_layers = [](const Sign& of, const Sign& all) {
    if (!OfHeads(of.family) || of.strongest.layer < 0 || all.strongest.layer < 0) return true;
    return of.strongest.layer == all.strongest.layer ||
           std::any_of(all.heads.begin(), all.heads.end(),
                       [&](const Head& head) { return head.layer == of.strongest.layer; });
  };
  return in_layers(a, b) && in_layers(b, a);
}

void AlertEngine::TakeOver(Open* open, const Sign& sign, int64_t step, const RunDescription& run,
                           std::vector<AlertTransition>* out) {
  const IllnessCause& cause = CauseNamed(sign.family, sign.cause);
  const Sign from = sign;  // The signs of `open` move as others come.
  for (Open& other : open_) {
    if (&other == open || !other.firing || other.told.repaired_step >= 0) continue;
    const Sign& leading = Leading(other);
    if (!Explains(cause, leading.family) || cause.rank < CauseNamed(leading.family, leading.cause).rank ||
        other.first_step < from.first_step - kTogetherSteps || !MayBeOnePlace(leading, from)) {
      continue;
    }
    open->first_step = std::min(open->first_step, other.first_step);
    open->severity = std::max(open->severity, other.severity);
    open->stage = std::max(open->stage, other.stage);
    open->signs.insert(open->signs.end(), other.signs.begin(), other.signs.end());
    const std::string why = absl::StrCat("it is one illness with alert ", open->key, ", which goes on");
    // An alert of which nobody was told needs no end.
    if (other.told.cause.empty()) {
      const Open ended{.resolved_step = other.resolved_step, .resolved_severity = other.resolved_severity};
      other = ended;
      continue;
    }
    Resolve({.family = leading.family}, &other, step, run, why, out);
  }
}

bool AlertEngine::IsOfAnother(const Open& open, const Sign& found, int64_t step) {
  const auto before =
      std::find_if(open.signs.begin(), open.signs.end(), [&](const Sign& sign) { return sign.family == found.family; });
  if (open.told.repaired_step >= 0 || found.first_step - before->last_found <= kTogetherSteps) return false;
  Open* const other = IllnessOf(found, step);
  if (other == nullptr || other == &open) return false;
  const Sign& leading = Leading(*other);
  return Explains(CauseNamed(leading.family, leading.cause), found.family);
}

AlertEngine::Sign AlertEngine::SignFrom(const Subject& subject, int64_t step,
                                        const std::vector<Finding>& findings) const {
  const Finding& worst = findings.front();
  Sign sign{.family = subject.family, .rule = worst.rule, .severity = worst.severity, .first_step = worst.first_step};
  sign.last_found = step;
  sign.own_words = !worst.summary.empty() || !worst.cause.empty() || !worst.advice.empty();
  sign.strongest = worst.where;
  sign.eta = worst.eta;
  sign.eta_words = worst.eta_words;
  if (sign.eta.known) sign.eta.step_seconds = step_seconds_;
  sign.cause = subject.rule != nullptr ? subject.rule->cause
               : worst.cause.empty()   ? CauseOf(subject.family, findings)
                                       : worst.cause;
  for (const Finding& finding : findings) {
    sign.stage = std::max(sign.stage, finding.stage);
    sign.first_step = std::min(sign.first_step, finding.first_step);
    if (std::isnan(sign.sigma) || finding.sigma > sign.sigma) sign.sigma = finding.sigma;  // NaN: not known.
  }
  return sign;
}

void AlertEngine::AddDetails(const Subject& subject, const RunDescription& run, const std::vector<Finding>& findings,
                             Sign* sign) const {
  const Finding& worst = findings.front();
  if (!worst.summary.empty()) sign->summary = OwnSummaryOf(run, worst.summary);
  sign->advice = subject.rule != nullptr ? subject.rule->advice : worst.advice;
  std::set<Head> named;  // Two findings may be of one head.
  for (const Finding& finding : findings) {
    if (finding.where.head >= 0 && named.insert(finding.where).second) {
      ++sign->heads_total;
      if (sign->heads.size() < static_cast<size_t>(options_.heads_max)) sign->heads.push_back(finding.where);
    }
  }
  AddEvidence(findings, sign);
}

void AlertEngine::AddEvidence(const std::vector<Finding>& findings, Sign* sign) const {
  for (const Finding& finding : findings) {
    for (int32_t i = 0; i < finding.fact_count; ++i) {
      if (sign->evidence.size() >= static_cast<size_t>(options_.evidence_max)) return;
      const Fact& fact = finding.facts[static_cast<size_t>(i)];
      sign->evidence.push_back({.signal = fact.signal,
                                .where = fact.where,
                                .value = fact.value,
                                .threshold = fact.threshold,
                                .baseline = fact.baseline,
                                .first_step = fact.first_step,
                                .detector = fact.detector,
                                .text = i == 0 ? finding.note : std::string()});
    }
  }
}

void AlertEngine::RenewEvidence(const std::vector<Finding>& findings, Sign* sign) const {
  // What has words of its own tells of one moment.
  if (sign->own_words || findings.front().exact || ToldExactly(sign->evidence)) return;
  sign->evidence.clear();
  AddEvidence(findings, sign);
}

void AlertEngine::Apply(const Subject& subject, Open* own, int64_t step, const RunDescription& run,
                        const std::vector<Finding>& findings, std::vector<AlertTransition>* out) {
  const UserRule* const rule = subject.rule;
  const Finding& worst = findings.front();
  Sign found = SignFrom(subject, step, findings);
  Open* open = rule != nullptr ? (own->firing ? own : nullptr) : OpenWith(subject.family);
  const bool moves = open != nullptr && rule == nullptr && IsOfAnother(*open, found, step);
  if (moves) {
    Resolve(subject.family, step, run, "what is found from here on is of another alert", out);
    open = nullptr;
  }
  // Most findings are of a sign that was told already: only others need their heads and words.
  if (open == nullptr) AddDetails(subject, run, findings, &found);
  if (open == nullptr && rule == nullptr) open = own->firing && !moves ? own : IllnessOf(found, step);
  if (open == nullptr) {
    const int64_t cooldown_steps = rule != nullptr ? rule->cooldown_steps : options_.cooldown_steps;
    const bool cooling = own->resolved_step >= 0 && step - own->resolved_step < cooldown_steps &&
                         worst.severity <= own->resolved_severity;
    if (cooling) return;
    open = own;
    open->firing = true;
    open->severity = Severity::kNone;
    open->stage = 0;
    open->k = 0;
    open->first_step = found.first_step;
    open->told = {};
    open->signs.clear();
    open->eta_known = false;
    open->key = NextKey(subject);
  }
  open->last_found = step;
  const auto before = std::find_if(open->signs.begin(), open->signs.end(),
                                   [&](const Sign& sign) { return sign.family == subject.family; });
  const bool joins = before == open->signs.end();
  const AdviceState state = StateFor(joins ? found.severity : std::max(before->severity, found.severity),
                                     joins ? found.stage : std::max(before->stage, found.stage), found.sigma);
  const bool goes_back = rule == nullptr && worst.advice.empty() && GoesBack(subject.family, run, state);
  found.went_back = goes_back || (rule == nullptr && !worst.advice.empty());
  Sign* sign = nullptr;
  bool rises = joins, names = joins;
  if (joins) {
    sign = &open->signs.emplace_back(std::move(found));
  } else {
    sign = &*before;
    const int32_t rank = CauseNamed(subject.family, sign->cause).rank;
    const int32_t found_rank = CauseNamed(subject.family, found.cause).rank;
    // Under repair a cause stays (below), so that it would be news at each step.
    names = found_rank > rank && open->told.repaired_step < 0;
    rises = names || worst.news || (worst.exact && !ToldExactly(sign->evidence)) || found.severity > sign->severity ||
            found.stage > sign->stage || (goes_back && !sign->went_back);
    // A spike of long ago is no beginning of what is found now.
    if (rule == nullptr && sign->severity <= Severity::kInfo && found.first_step - sign->last_found > kTogetherSteps) {
      sign->first_step = found.first_step;
      if (open->signs.size() == 1 && open->told.repaired_step < 0) open->first_step = found.first_step;
    }
    sign->last_found = step;
    sign->lapsed = false;
    sign->eta = found.eta;
    if (rises) {
      AddDetails(subject, run, findings, &found);
      Renew(std::move(found), found_rank < rank || open->told.repaired_step >= 0, sign);
    } else if (!found.own_words && open->told.repaired_step < 0) {
      RenewEvidence(findings, sign);
    }
  }
  if (sign == &Leading(*open)) {
    open->eta_known = sign->eta.known;
    open->eta_step = step;
    open->eta_steps = sign->eta.steps;
    open->eta_lower = sign->eta.lower_steps;
    open->eta_upper = sign->eta.upper_steps;
  }
  if (!rises) return;
  // More than one finding of a sample may do so.
  if (!open->rises && !open->told.cause.empty()) ++open->k;
  open->rises = true;
  open->severity = std::max(open->severity, sign->severity);
  open->stage = std::max(open->stage, sign->stage);
  if (joins) open->first_step = std::min(open->first_step, sign->first_step);
  if (names && rule == nullptr) TakeOver(open, *sign, step, run, out);
}

void AlertEngine::Renew(Sign found, bool keep_cause, Sign* sign) const {
  found.severity = std::max(found.severity, sign->severity);
  found.stage = std::max(found.stage, sign->stage);
  found.first_step = sign->first_step;  // Of the sign's first sight, as its rule.
  found.rule = sign->rule;
  found.went_back |= sign->went_back;
  const bool of_same_cause = found.cause == sign->cause;
  if (keep_cause) found.cause = sign->cause;
  // What only the finding of before could say is not lost to one that says less, or that speaks of another cause.
  if (keep_cause && sign->own_words && (!found.own_words || !of_same_cause)) {
    found.own_words = true;
    found.summary = sign->summary;
    found.advice = sign->advice;
    found.strongest = sign->strongest;
    found.heads = sign->heads;
    found.heads_total = sign->heads_total;
    std::vector<Evidence> evidence = sign->evidence;
    for (Evidence& piece : found.evidence) {
      if (evidence.size() < static_cast<size_t>(options_.evidence_max)) evidence.push_back(std::move(piece));
    }
    found.evidence = std::move(evidence);
  }
  *sign = std::move(found);
}

void AlertEngine::Lapse(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                        std::vector<AlertTransition>* out) {
  const int64_t resolve_steps = subject.rule != nullptr ? subject.rule->resolve_steps : options_.resolve_steps;
  if (open->told.repaired_step >= 0) return;
  bool all = true;
  for (Sign& sign : open->signs) {
    if (sign.family == subject.family && step - sign.last_found >= resolve_steps) sign.lapsed = true;
    all &= sign.lapsed;
  }
  if (all)
    Resolve(subject, open, step, run, absl::StrCat("no sign of it since step ", CountText(open->last_found)), out);
}

void AlertEngine::CouldNotLook(Family family, int64_t step) {
  Open* const open = OpenWith(family);
  if (open == nullptr) return;
  for (Sign& sign : open->signs) {
    if (sign.family == family && !sign.lapsed) sign.last_found = open->last_found = step;
  }
}

void AlertEngine::BeginRepair(Family family, int64_t step, const RunDescription& run,
                              std::vector<AlertTransition>* out) {
  if (Open* const open = OpenWith(family)) BeginRepair({.family = family}, open, step, run, out);
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
  AdviceState state = StateFor(open->severity, open->stage, std::numeric_limits<double>::quiet_NaN());
  const bool went_back =
      std::any_of(open->signs.begin(), open->signs.end(), [](const Sign& sign) { return sign.went_back; });
  if (went_back) state.stage = 5;
  change.advice = went_back ? AdviceText(subject.family, run, state, BeginOf(subject.family, *open)) : RepairAdvice();
}

void AlertEngine::EndRepairs(int64_t step) {
  const auto end = [step](Open* open) {
    if (open->told.repaired_step < 0) return;
    open->told.repaired_step = -1;
    open->last_found = step;
    for (Sign& sign : open->signs) sign.last_found = step;
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
            absl::StrCat(kUnderRepair, CountText(open->told.repaired_step),
                         ", and sigma(W_Q) of its heads has stood still for ", CountText(resolve_steps), " steps"),
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
  for (const Open& open : open_) {
    if (!open.firing || open.told.repaired_step < 0) continue;
    for (const Sign& sign : open.signs) {
      if (sign.family == family) return open.signs.size() == 1 ? open.told.heads : sign.heads;
    }
  }
  return none;
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

AlertTransition AlertEngine::Describe(const Subject& subject, Open* open, int64_t step,
                                      const RunDescription& run) const {
  const UserRule* const rule = subject.rule;
  Sign& leading = Leading(*open);
  open->rule = leading.rule;
  open->layer = leading.strongest.layer;
  open->head = leading.strongest.head;
  AlertTransition change = ChangeOf(subject, *open, step, run, AlertState::kFiring);
  change.strongest = leading.strongest;
  change.heads = leading.heads;
  change.heads_total = leading.heads_total;
  if (leading.last_found == step) change.eta = leading.eta;
  change.evidence = leading.evidence;
  // Under repair the rules that know the cause are off: it is what it was.
  change.cause = open->told.repaired_step >= 0 ? open->told.cause : leading.cause;
  change.summary = leading.summary.empty() ? SummaryOf(run, change) : leading.summary;
  const LossState loss = rule == nullptr ? LossBeside(*open, leading) : LossState::kNotKnown;
  absl::StrAppend(&change.summary, TailOf(change, leading.eta_words, loss));
  AddOtherSigns(*open, leading, &change);
  OrderEvidence(open->stage, /*by_limits=*/!leading.own_words, &change.evidence);
  AdviceState state = StateFor(open->severity, open->stage, leading.sigma);
  state.cause = leading.cause;
  if (rule != nullptr || !leading.advice.empty()) {
    change.advice = leading.advice;
  } else {
    change.advice = AdviceText(leading.family, run, state, BeginOf(leading.family, *open));
    leading.went_back |= GoesBack(leading.family, run, state);
  }
  open->told.strongest = change.strongest;
  open->told.heads = change.heads;
  open->told.heads_total = change.heads_total;
  open->told.evidence = change.evidence;
  open->told.cause = change.cause.empty() ? "unknown" : change.cause;
  return change;
}

// The evidence of all signs, and a word of those that do not lead, in the order in which they began.
void AlertEngine::AddOtherSigns(const Open& open, const Sign& leading, AlertTransition* change) const {
  if (open.signs.size() == 1) return;
  std::vector<const Sign*> signs;
  for (const Sign& sign : open.signs) signs.push_back(&sign);
  std::stable_sort(signs.begin(), signs.end(),
                   [](const Sign* a, const Sign* b) { return a->first_step < b->first_step; });
  // Each has room for some.
  const auto max = static_cast<size_t>(options_.evidence_max);
  const size_t of_others = std::max<size_t>(1, max / (2 * signs.size()));
  const size_t of_leading = max - std::min(max, of_others * (signs.size() - 1));
  change->evidence.clear();
  std::vector<std::string> others;
  for (const Sign* const sign : signs) {
    const size_t room = sign == &leading ? of_leading : of_others;
    const size_t count = std::min({room, sign->evidence.size(), max - change->evidence.size()});
    change->evidence.insert(change->evidence.end(), sign->evidence.begin(),
                            sign->evidence.begin() + static_cast<ptrdiff_t>(count));
    if (sign != &leading)
      others.push_back(
          absl::StrCat(NounOf(NameOf(sign->rule), sign->severity), " since step ", CountText(sign->first_step)));
  }
  absl::StrAppend(&change->summary, " Of the same illness: ", absl::StrJoin(others, ", "), ".");
}

// Of what does not itself say how the loss is.
LossState AlertEngine::LossBeside(const Open& open, const Sign& leading) const {
  constexpr uint32_t kBesideTheLoss =
      BitOf(Family::kRounding) | BitOf(Family::kLogits) | BitOf(Family::kGradient) | BitOf(Family::kDisagreement) |
      BitOf(Family::kKernel) | BitOf(Family::kArithmetic) | BitOf(Family::kParameters) | BitOf(Family::kCorruption);
  if ((BitOf(leading.family) & kBesideTheLoss) == 0 || open.severity < Severity::kWarning) return LossState::kNotKnown;
  if (StateFor(open.severity, open.stage, leading.sigma).stage >= 5) return LossState::kGone;
  return loss_normal_ && SignOf(Family::kLoss) == nullptr ? LossState::kNormal : LossState::kNotKnown;
}

AdviceState AlertEngine::StateFor(Severity severity, int32_t stage, double sigma) const {
  AdviceState state{.severity = severity, .stage = stage, .sigma = sigma, .sigma_max = rescue_sigma_max_};
  // The loss is gone for all of the run, once that is more than information.
  for (const Family family : {Family::kLoss, Family::kNonfinite}) {
    const Sign* const sign = SignOf(family);
    const Severity least = family == Family::kLoss ? Severity::kWarning : Severity::kCritical;
    if (sign != nullptr && sign->severity >= least) state.stage = std::max(state.stage, sign->stage);
  }
  return state;
}

int64_t AlertEngine::BeginOf(Family family, const Open& open) const {
  int64_t begin = open.first_step;
  if (family != Family::kLoss && family != Family::kGradient) return begin;
  // What the loss suffers from began with the attention's alert.
  for (const Family cause : {Family::kRounding, Family::kLogits}) {
    if (const Sign* const sign = SignOf(cause)) begin = std::min(begin, sign->first_step);
  }
  return begin;
}

uint32_t AlertEngine::went_back() const {
  uint32_t families = 0;
  for (const Open& open : open_) {
    for (const Sign& sign : open.signs) families |= open.firing && sign.went_back ? BitOf(sign.family) : 0;
  }
  return families;
}

void AlertEngine::MakeSigns(uint32_t went_back) {
  const auto make = [went_back](size_t family, bool of_rule, Open* open) {
    if (!open->firing || !open->signs.empty()) return;
    Sign& sign = open->signs.emplace_back();
    sign = {.family = static_cast<Family>(family),
            .rule = open->rule,
            .severity = open->severity,
            .stage = open->stage,
            .first_step = open->first_step,
            .last_found = open->last_found};
    sign.went_back = !of_rule && (went_back >> family & 1u) != 0;
    sign.strongest = open->told.cause.empty() ? Head{open->layer, open->head} : open->told.strongest;
    sign.heads = open->told.heads;
    sign.heads_total = open->told.heads_total;
    sign.evidence = open->told.evidence;
    sign.cause = open->told.cause = open->told.cause.empty() ? "unknown" : open->told.cause;
  };
  for (size_t i = 0; i < open_.size(); ++i) make(i, false, &open_[i]);
  for (Open& open : of_rules_) make(0, true, &open);
}

bool AlertEngine::Consistent() const {
  uint32_t seen = 0;
  for (const Open& open : open_) {
    if (open.firing == open.signs.empty()) return false;
    for (const Sign& sign : open.signs) {
      if (sign.family > Family::kLearning || sign.rule > Rule::kUser || sign.severity > Severity::kCritical ||
          (seen & BitOf(sign.family)) != 0) {
        return false;
      }
      seen |= BitOf(sign.family);
    }
  }
  return std::all_of(of_rules_.begin(), of_rules_.end(), [](const Open& open) {
    return open.signs.size() == (open.firing ? 1 : 0) && (!open.firing || open.signs[0].rule <= Rule::kUser);
  });
}

void AlertEngine::Resolve(Family family, int64_t step, const RunDescription& run, const std::string& why,
                          std::vector<AlertTransition>* out) {
  Open* const open = OpenWith(family);
  if (open == nullptr) return;
  const auto ends = [family](const Sign& sign) { return sign.family == family || sign.lapsed; };
  if (std::all_of(open->signs.begin(), open->signs.end(), ends)) {
    Resolve({.family = family}, open, step, run, why, out);
  } else {
    std::erase_if(open->signs, [family](const Sign& sign) { return sign.family == family; });
  }
}

void AlertEngine::ResolveRule(size_t rule, int64_t step, const RunDescription& run, const std::string& why,
                              std::vector<AlertTransition>* out) {
  Resolve({.rule = &(*rules_)[rule]}, &of_rules_[rule], step, run, why, out);
}

void AlertEngine::Resolve(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                          const std::string& why, std::vector<AlertTransition>* out) {
  if (!open->firing) return;
  open->firing = open->rises = false;
  open->told = {};
  open->eta_known = false;
  const auto cool = [step](Severity severity, Open* of) {
    of->resolved_step = step;
    of->resolved_severity = severity;
  };
  cool(open->severity, open);
  // A family whose sign was in this alert opens none of its own at once.
  if (subject.rule == nullptr) {
    for (const Sign& sign : open->signs) {
      Open& own = open_[static_cast<size_t>(sign.family)];
      if (&own != open && !own.firing) cool(sign.severity, &own);
    }
  }
  open->signs.clear();
  ++open->k;
  AlertTransition& change = out->emplace_back(ChangeOf(subject, *open, step, run, AlertState::kResolved));
  change.strongest = {open->layer, open->head};
  change.summary = EndSummaryOf(run, change, step_seconds_, why);
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
            .upper_steps = std::max(0.0, open.eta_upper - passed),
            .step_seconds = step_seconds_};
  });
  return best;
}

}  // namespace bellwether::server
