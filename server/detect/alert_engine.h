// alert_engine.h: findings of every tick in, changes of alerts out.
//
// There is one alert per illness, and one per rule that people wrote.  What one
// family finds is a sign.  A sign opens an alert, unless it is of the illness of
// one that fires (illness.h): then that one has it, too.  The sign whose cause
// says most names the alert: its rule, cause, place, summary and advice are the
// alert's, and change with it, while the key stays.  The cause of a sign only
// changes to one that says more.  Where a sign shows that several alerts are of
// one illness, the one that has it goes on and the others resolve.
//
// An alert rises (same key, k + 1) when a sign joins it, when severity or stage
// of a sign goes beyond what was reported, or when its advice becomes to go
// back.  It rises, too, when a finding is exact after only a set was named, or
// is news.  What it then tells has the newest values of all signs, of each signal the worst first
// (alert_text.h).  A sign lapses after `resolve_steps` without a finding, and the alert
// resolves with its last one.  After that its families stay quiet for
// `cooldown_steps`, unless what is found is worse than the last alert.
//
// An alert is under repair once something was switched on that its own rules
// cannot see past.  No finding of theirs means nothing then.  The alert stays
// what it was, rises by what is still found, and ends when other signals show
// that it is over.
//
// A key names an alert in its run and carries nothing else: a letter and a
// number that is not given again, also not in a later attempt.  Each family
// counts by itself, and the rules that people wrote together.  So an alert of
// one, or another rule, changes no key of the others: a replay gives the same
// ones.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_ALERT_ENGINE_H_
#define BELLWETHER_SERVER_DETECT_ALERT_ENGINE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/detect/advice.h"
#include "server/detect/alert_text.h"
#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/user_rule.h"
#include "server/model/alert_transition.h"
#include "server/model/run_types.h"

namespace bellwether::server {

class AlertEngine {
 public:
  explicit AlertEngine(const AlertOptions& options) : options_(options) {}

  void SetOptions(const AlertOptions& options) { options_ = options; }
  // The rules that people wrote, null = none.  `from` holds for each the one of
  // those before whose alert it goes on with, or -1; empty: none does.
  void SetRules(std::shared_ptr<const std::vector<UserRule>> rules, const std::vector<int>& from);

  // The findings of `family` at `step`, for Flush; empty means that it was looked for and not found.
  void Collect(Family family, const std::vector<Finding>& findings);
  // What all families have found at `step`: each alert is told once.
  void Flush(int64_t step, const RunDescription& run, std::vector<AlertTransition>* out);
  // Both, for one family.
  void Update(Family family, int64_t step, const RunDescription& run, const std::vector<Finding>& findings,
              std::vector<AlertTransition>* out);
  // Ends the family's sign at once, if there is one, and with the last sign the alert; `why` is its summary.
  void Resolve(Family family, int64_t step, const RunDescription& run, const std::string& why,
               std::vector<AlertTransition>* out);

  // Nothing could be looked for at `step`: no evidence is no evidence of an end.
  void CouldNotLook(Family family, int64_t step);

  // Puts the family's alert under repair, if one is open, and reports that
  // once.
  void BeginRepair(Family family, int64_t step, const RunDescription& run, std::vector<AlertTransition>* out);
  void BeginRepairOfRule(size_t rule, int64_t step, const RunDescription& run, std::vector<AlertTransition>* out);
  // What was switched on is off again: the rules judge as before.
  void EndRepairs(int64_t step);
  // Resolves what has been under repair, and without a finding, for as long as
  // any alert needs to resolve, if `stand_still` holds of the alert's heads.
  using StandStill = std::function<bool(const std::vector<Head>& heads, int64_t steps)>;
  void ResolveRepaired(int64_t step, const RunDescription& run, const StandStill& stand_still,
                       std::vector<AlertTransition>* out);
  // The heads of the family's alert if it is under repair; empty: it is not.
  const std::vector<Head>& under_repair(Family family) const;

  // The same for rule number `rule`.
  void UpdateRule(size_t rule, int64_t step, const RunDescription& run, const std::vector<Finding>& findings,
                  std::vector<AlertTransition>* out);
  void ResolveRule(size_t rule, int64_t step, const RunDescription& run, const std::string& why,
                   std::vector<AlertTransition>* out);

  // Whether an alert that fires has a sign of the family.
  bool firing(Family family) const { return SignOf(family) != nullptr; }
  uint32_t alerts_firing() const;
  int32_t stage() const;  // The furthest of the firing alerts; 0: none fires.
  // Of the most severe firing alert with a known one, the soonest.
  Eta eta(int64_t now) const;

  // Up to which sigma(W_Q) a run is repaired as it goes on.
  void SetRescueSigma(double sigma_max) { rescue_sigma_max_ = sigma_max; }
  // Wall time of a step of the run, by which the time left is told as well; 0: not known.
  void SetStepSeconds(double seconds) { step_seconds_ = seconds; }
  // Whether the loss is known to be on its course, which alerts of something else say.
  void SetLossNormal(bool normal) { loss_normal_ = normal; }
  // Which families' signs have advised to go back, by bit.
  uint32_t went_back() const;
  // Alerts of saved states that have no signs get theirs.
  void MakeSigns(uint32_t went_back);
  // After VisitSigns with a reader: whether each alert that fires has signs, each family once.
  bool Consistent() const;

  template <class A>
  void Visit(A& a) {
    for (size_t i = 0; i < kFamiliesBefore; ++i) a(open_[i]);
  }
  // A family that older states do not have.
  template <class A>
  void VisitLater(Family family, A& a) {
    Open& open = open_[static_cast<size_t>(family)];
    a(open), a(open.told);
  }
  // The alerts of the rules that people wrote.
  template <class A>
  void VisitRules(A& a) {
    for (Open& open : of_rules_) a(open);
  }
  // What saved states from before there were such keys do not have.
  template <class A>
  void VisitTold(A& a) {
    for (size_t i = 0; i < kFamiliesBefore; ++i) a(open_[i].told);
  }
  template <class A>
  void VisitToldOfRules(A& a) {
    for (Open& open : of_rules_) a(open.told);
  }
  template <class A>
  void VisitSigns(A& a) {
    for (Open& open : open_) a(open.signs);
  }
  template <class A>
  void VisitSignsOfRules(A& a) {
    for (Open& open : of_rules_) a(open.signs);
  }
  // How many keys were given: by Family up to kOverhead, then of people's rules, then of the later families.
  const std::vector<uint32_t>& numbered() const { return numbered_; }
  void SetNumbered(std::vector<uint32_t> numbered);

 private:
  // As many as there were when states began to be saved.
  static constexpr size_t kFamiliesBefore = static_cast<size_t>(Family::kOverhead) + 1;
  static constexpr uint32_t kToldMax = 4096;  // Of heads and evidence; options have lower limits.
  // What was last reported of an alert, for as long as its rules can find no
  // more.
  struct Told {
    int64_t repaired_step = -1;  // Since when it has been under repair; -1: it is not.
    Head strongest;
    std::vector<Head> heads;
    uint32_t heads_total = 0;
    std::vector<Evidence> evidence;
    std::string cause;
    template <class A>
    void Visit(A& a);
  };
  // What one family, or the rule that people wrote, has found; as last told.
  struct Sign {
    Family family = Family::kRounding;
    Rule rule = Rule::kDrift;
    Severity severity = Severity::kNone;
    int32_t stage = 0;
    int64_t first_step = 0, last_found = 0;
    bool went_back = false;  // It has advised to go back, or what says more.
    bool lapsed = false;     // Not found for so long that it is over, while the alert goes on.
    bool own_words = false;  // Summary, cause or advice are of the finding alone.
    double sigma = std::numeric_limits<double>::quiet_NaN();
    Head strongest;
    std::vector<Head> heads;
    uint32_t heads_total = 0;
    std::vector<Evidence> evidence;
    std::string cause, summary, advice;  // The last two are empty where the family's words hold.
    Eta eta;                             // Not saved, as are its words.
    const char* eta_words = "";          // Of Finding.

    template <class A>
    void Visit(A& a);
  };
  struct Open {
    bool firing = false;
    Severity severity = Severity::kNone;
    int32_t stage = 0;
    uint32_t k = 0;
    Rule rule = Rule::kDrift;
    int64_t first_step = 0;
    int64_t last_found = 0;
    int64_t resolved_step = -1;  // -1: never.
    Severity resolved_severity = Severity::kNone;
    int32_t layer = -1;
    int32_t head = -1;
    bool eta_known = false;
    int64_t eta_step = 0;  // At which the eta was estimated.
    double eta_steps = 0, eta_lower = 0, eta_upper = 0;
    std::string key;
    Told told;
    std::vector<Sign> signs;  // Each of another family; in the order in which they were found.
    bool rises = false;       // Is told at the end of Flush.

    template <class A>
    void Visit(A& a) {
      a(firing), a(severity), a(stage), a(k), a(rule), a(first_step), a(last_found), a(resolved_step);
      a(resolved_severity), a(layer), a(head), a(eta_known), a(eta_step), a(eta_steps), a(eta_lower), a(eta_upper);
      a(key);
    }
  };

  // Whose alert it is: a family's, or that of a rule that people wrote.
  struct Subject {
    Family family = Family::kRounding;
    const UserRule* rule = nullptr;
    std::string NameFor(Rule found) const;
  };
  // The alert that has a sign of the family; null: none fires.
  Open* OpenWith(Family family);
  const Sign* SignOf(Family family) const;
  // The firing alert whose illness a new `sign` is of; null: it is another one.
  Open* IllnessOf(const Sign& sign, int64_t step);
  // Ends the other alerts that `sign`, of `open`, explains: they are this one.
  void TakeOver(Open* open, const Sign& sign, int64_t step, const RunDescription& run,
                std::vector<AlertTransition>* out);
  // Whether what is found anew, after it was not for some time, follows from another illness than that of `open`.
  bool IsOfAnother(const Open& open, const Sign& found, int64_t step);
  // What was found, worst first: a sign of `own`, or of another alert.
  void Apply(const Subject& subject, Open* own, int64_t step, const RunDescription& run,
             const std::vector<Finding>& findings, std::vector<AlertTransition>* out);
  static bool MayBeOnePlace(const Sign& a, const Sign& b);
  void AddEvidence(const std::vector<Finding>& findings, Sign* sign) const;
  // The newest values of a sign that was told already: its words and heads stay.
  void RenewEvidence(const std::vector<Finding>& findings, Sign* sign) const;
  // `found` in place of what `sign` was.
  void Renew(Sign found, bool keep_cause, Sign* sign) const;
  void AddOtherSigns(const Open& open, const Sign& leading, AlertTransition* change) const;
  LossState LossBeside(const Open& open, const Sign& leading) const;
  // By what a sign is known; its words, heads and evidence: AddDetails.
  Sign SignFrom(const Subject& subject, int64_t step, const std::vector<Finding>& findings) const;
  void AddDetails(const Subject& subject, const RunDescription& run, const std::vector<Finding>& findings,
                  Sign* sign) const;
  // The sign that names the alert.
  static Sign& Leading(Open& open);
  // What was looked for and not found: the sign lapses in the end, and with the last one the alert.
  void Lapse(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
             std::vector<AlertTransition>* out);
  void Resolve(const Subject& subject, Open* open, int64_t step, const RunDescription& run, const std::string& why,
               std::vector<AlertTransition>* out);
  std::string NextKey(const Subject& subject);
  // A change of `open` at `step`, with the fields that all changes have.
  static AlertTransition ChangeOf(const Subject& subject, const Open& open, int64_t step, const RunDescription& run,
                                  AlertState state);
  // Also keeps in `open` what it reports.
  AlertTransition Describe(const Subject& subject, Open* open, int64_t step, const RunDescription& run) const;
  void BeginRepair(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
                   std::vector<AlertTransition>* out);

  // What the advice of an alert of this severity and stage follows from.
  AdviceState StateFor(Severity severity, int32_t stage, double sigma) const;
  // From before which step a checkpoint is good.
  int64_t BeginOf(Family family, const Open& open) const;

  template <class Call>
  void ForEachFiring(const Call& call) const;

  AlertOptions options_;
  double rescue_sigma_max_ = NormOptions().rescue_sigma_max;
  double step_seconds_ = 0;
  bool loss_normal_ = false;  // Not saved: each sample tells it.
  std::array<Open, kFamilies> open_;
  std::shared_ptr<const std::vector<UserRule>> rules_;
  std::vector<Open> of_rules_;
  std::vector<uint32_t> numbered_ = std::vector<uint32_t>(kFamilies + 1);
  std::vector<std::pair<Family, std::vector<Finding>>> collected_;  // Emptied by Flush, as is looked_.
  uint32_t looked_ = 0;  // Families that were looked for and not found, by bit.
};

// Lists of what is no value of its own, with limits.
template <class A, class List, class Each>
void VisitList(A& a, List& list, uint32_t max, const Each& visit) {
  auto size = static_cast<uint32_t>(list.size());
  a(size);
  if constexpr (A::kReading) {
    list.clear();
    if (size > max) return a.Refuse();
    for (uint32_t i = 0; i < size && a.ok(); ++i) visit(list.emplace_back());
  } else {
    for (auto& element : list) visit(element);
  }
}

template <class A>
void VisitPlace(A& a, Head& head) {
  a(head.layer), a(head.head);
}

template <class A>
void VisitEvidence(A& a, Evidence& e) {
  a(e.signal), a(e.where.layer), a(e.where.head), a(e.value), a(e.threshold), a(e.baseline), a(e.first_step);
  a(e.detector), a(e.text);
}

template <class A>
void AlertEngine::Told::Visit(A& a) {
  a(repaired_step), a(strongest.layer), a(strongest.head), a(heads_total), a(cause);
  VisitList(a, heads, kToldMax, [&a](Head& head) { VisitPlace(a, head); });
  VisitList(a, evidence, kToldMax, [&a](Evidence& piece) { VisitEvidence(a, piece); });
}

template <class A>
void AlertEngine::Sign::Visit(A& a) {
  a(family), a(rule), a(severity), a(stage), a(first_step), a(last_found), a(went_back), a(lapsed);
  a(own_words), a(sigma);
  a(strongest.layer), a(strongest.head), a(heads_total), a(cause), a(summary), a(advice);
  VisitList(a, heads, kToldMax, [&a](Head& head) { VisitPlace(a, head); });
  VisitList(a, evidence, kToldMax, [&a](Evidence& piece) { VisitEvidence(a, piece); });
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ALERT_ENGINE_H_
