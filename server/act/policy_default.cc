// The built-in policy, as people would write it.

#include <string>

#include "server/act/policy.h"

namespace bellwether::server {
namespace {

constexpr std::string_view kText =
    R"(# What is built in, as a policy file: say only what you change; `mode: enforce`
# alone does what stands here.  Made by `bellwetherd policy defaults`.
# Every key and its range: docs/reference/policy.md.
mode: observe        # observe, propose, enforce
approvers: []        # Names, * and ? as in file names; empty: whoever may act.
quiet_hours: []      # ["22:00-06:00"], UTC: what would be enforced is proposed.
limits: {actions_per_run: 8, min_steps_between: 200, time_to_live_s: 3600}
rules:
# What is lost is lost: a person goes back to a checkpoint.
- when: {rule: [nonfinite, loss], severity: critical}
  ladder:
  - {do: rollback.suggest}
# Scores grow by themselves; centring does not help.
- when: {rule: [logits]}
  confirm_steps: 40
  ladder:
  - {do: checkpoint.now}
  - {do: qk.clip, gamma: 0.5, scope: heads, trial_steps: 400}
  - {do: qk.clip, gamma: 0.25, scope: heads, trial_steps: 400}
  - {do: lr.scale, factor: 0.5, trial_steps: 1000}
  - {do: rollback.suggest}
# Rounding, and the weights have moved: stop the push, then take back what it did.
# Keys are centred in all layers: a run with some centred ones is judged as centred.
- when: {rule: [drift, ties, norm], stage: 3, severity: critical}
  ladder:
  - {do: attention.center_k, scope: all, trial_steps: 200, next: always, undo: never}
  - {do: qk.clip, gamma: 0, scope: heads, trial_steps: 400}
  - {do: attention.mode, mode: hp, scope: all, trial_steps: 1000, undo: never}
  - {do: qk.clip, gamma: 0, scope: heads, trial_steps: 400}
  - {do: rollback.suggest}
# Rounding, and nothing is lost yet.  What takes the bias away costs next to nothing and stays, whatever
# the trial said: to take it back for a wrong verdict would cost the run.
- when: {rule: [drift, ties, norm]}
  confirm_steps: 40
  ladder:
  - {do: attention.center_k, scope: all, trial_steps: 1000, undo: never}
  - {do: attention.mode, mode: hp, scope: all, trial_steps: 1000, undo: never}
)";

}  // namespace

std::string_view DefaultPolicyText() { return kText; }

PolicyPtr DefaultPolicy() {
  // The text is constant and has been tested; a bad one must not pass silently.
  static const PolicyPtr policy = ParsePolicy(kText, "default.yml").value();
  return policy;
}

}  // namespace bellwether::server
