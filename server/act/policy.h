// policy.h: what may be done about a run's alerts, and which people may approve
// it.
//
//   mode: enforce              # observe (default), propose, enforce
//   approvers: ["alice", "oncall-*"]   # these may approve, reject, undo; empty = all with the right to act
//   quiet_hours: ["22:00-06:00"]       # UTC; what would be enforced is proposed
//   limits: {actions_per_run: 8, min_steps_between: 200, time_to_live_s: 3600}
//   rules:
//   - when: {rule: [drift, ties], stage: 1, severity: warning}   # at least these
//     confirm_steps: 100       # the alert has fired that long
//     ladder:                  # the next rung when the one before did not help
//     - {do: attention.center_k, scope: layers, trial_steps: 1000}
//     - {do: attention.mode, mode: hp, scope: all}
//     - {do: qk.clip, gamma: 0.5, scope: heads, next: always}
//     - {do: rollback.suggest}
//
// A key that is missing is as built in: `bellwetherd policy defaults`.  Every
// key and range: docs/reference/policy.md.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_ACT_POLICY_H_
#define BELLWETHER_SERVER_ACT_POLICY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/action.h"
#include "server/model/alert_transition.h"

namespace bellwether::server {

inline constexpr size_t kPolicyRulesMax = 32;
inline constexpr size_t kLadderMax = 8;

enum class PolicyMode : uint8_t { kObserve = 1, kPropose = 2, kEnforce = 3 };
const char* NameOf(PolicyMode mode);

struct PolicyRung {
  enum class Scope : uint8_t { kAll, kLayers, kHeads };  // kLayers, kHeads: those that the alert names
  ActionKind kind = ActionKind::kNone;
  std::string mode;
  double value = 0;
  Scope scope = Scope::kAll;
  int64_t trial_steps = 0;   // After which the effect is judged.
  bool always_next = false;  // The next rung follows even if this one helped: what was damaged is repaired.
  bool may_undo = true;      // If it did not help, and that is safe.

  // The same action, however it is judged.
  bool Repeats(const PolicyRung& other) const {
    return kind == other.kind && mode == other.mode && value == other.value && scope == other.scope;
  }
};

struct PolicyRule {
  std::vector<std::string> rules;  // Names of built-in or own rules; empty = any.
  int32_t stage_min = 0;
  Severity severity_min = Severity::kWarning;
  int64_t confirm_steps = 0;
  std::vector<PolicyRung> ladder;  // 1..8
};

struct Policy {
  PolicyMode mode = PolicyMode::kObserve;
  std::vector<std::string> approvers;                      // Names; patterns of util/glob.h.
  std::vector<std::pair<int32_t, int32_t>> quiet_minutes;  // [begin, end) of the UTC day; may wrap
  int32_t actions_per_run = 8;
  int64_t min_steps_between = 200;
  int64_t time_to_live_s = 3600;
  std::vector<PolicyRule> rules;  // The first that fits an alert counts.
  std::string text;               // ParsePolicy(text) gives the same again.

  // Empty approvers: every name may.
  bool MayApprove(const std::string& who) const;
  // Until when it is quiet; -1: it is not, at that time.
  int64_t QuietUntil(int64_t time_unix_ns) const;
  // nullptr: no rule fits.
  const PolicyRule* Find(const std::string& rule, int32_t stage, Severity severity) const;
};
using PolicyPtr = std::shared_ptr<const Policy>;

// Built in: observe.
PolicyPtr DefaultPolicy();
// deploy/policy/default.yml, whose policy is the one above.
std::string_view DefaultPolicyText();
// `name` is what findings call the file.  INVALID_ARGUMENT: every finding, a
// line each, `file:line:column: field = value: what is legal`.
absl::StatusOr<PolicyPtr> ParsePolicy(std::string_view text, const std::string& name);
// NOT_FOUND: it cannot be read.
absl::StatusOr<PolicyPtr> ReadPolicy(const std::string& path);

// One entry of a policy file that is a whole number: its path, legal range and
// meaning, for the reader and docs/reference/policy.md.
struct PolicyNumber {
  const char* path;
  int64_t low, high;
  const char* unit;
  const char* help;
};
extern const PolicyNumber kActionsPerRun, kMinStepsBetween, kTimeToLive, kConfirmSteps, kTrialSteps, kStageMin;

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACT_POLICY_H_
