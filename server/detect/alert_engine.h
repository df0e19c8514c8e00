// alert_engine.h: findings of every tick in, changes of alerts out.
//
// One alert per family, and one per rule that people wrote: it opens with the first finding, rises (same key,
// k + 1) when severity or stage goes beyond what it has said, and resolves
// after `resolve_steps` without a finding.  After that the family stays quiet
// for `cooldown_steps`, unless what is found is worse than the last alert.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_ALERT_ENGINE_H_
#define BELLWETHER_SERVER_DETECT_ALERT_ENGINE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/user_rule.h"
#include "server/store/run_types.h"
#include "server/store/transition.h"

namespace bellwether::server {

class AlertEngine {
 public:
  explicit AlertEngine(const AlertOptions& options) : options_(options) {}

  void SetOptions(const AlertOptions& options) { options_ = options; }
  // The rules that people wrote, null = none.  `from` holds for each the one of
  // those before whose alert it goes on with, or -1; empty: none does.
  void SetRules(std::shared_ptr<const std::vector<UserRule>> rules, const std::vector<int>& from);

  // The findings of `family` at `step`; empty means that it was looked for and
  // not found.  Sorts `*findings` by severity and score.
  void Update(Family family, int64_t step, const RunDescription& run, std::vector<Finding>* findings,
              std::vector<Transition>* out);
  // Ends the family's alert at once, if one is open; `why` is its summary.
  void Resolve(Family family, int64_t step, const RunDescription& run, const std::string& why,
               std::vector<Transition>* out);

  // The same for rule number `rule`.
  void UpdateRule(size_t rule, int64_t step, const RunDescription& run, std::vector<Finding>* findings,
                  std::vector<Transition>* out);
  void ResolveRule(size_t rule, int64_t step, const RunDescription& run, const std::string& why,
                   std::vector<Transition>* out);

  bool firing(Family family) const { return open_[static_cast<size_t>(family)].firing; }
  Severity severity(Family family) const { return open_[static_cast<size_t>(family)].severity; }
  uint32_t alerts_firing() const;
  int32_t stage() const;  // The furthest of the firing alerts; 0: none fires.
  // Of the most severe firing alert with a known one, the soonest.
  Eta eta(int64_t now) const;

  template <class A>
  void Visit(A& a) {
    for (Open& open : open_) a(open);
  }
  // The alerts of the rules that people wrote.
  template <class A>
  void VisitRules(A& a) {
    for (Open& open : of_rules_) a(open);
  }

 private:
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
  void Update(const Subject& subject, Open* open, int64_t step, const RunDescription& run,
              std::vector<Finding>* findings, std::vector<Transition>* out);
  void Resolve(const Subject& subject, Open* open, int64_t step, const RunDescription& run, const std::string& why,
               std::vector<Transition>* out);
  Transition Describe(const Subject& subject, const Open& open, int64_t step, const RunDescription& run,
                      const std::vector<Finding>& findings) const;

  template <class Call>
  void ForEachFiring(const Call& call) const;

  AlertOptions options_;
  std::array<Open, kFamilies> open_;
  std::shared_ptr<const std::vector<UserRule>> rules_;
  std::vector<Open> of_rules_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ALERT_ENGINE_H_
