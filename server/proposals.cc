#include "server/proposals.h"

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/act/action_kinds.h"

namespace bellwether::server {

namespace {

void AddToAdvice(const std::string& sentence, const std::string& cost, Transition* transition) {
  absl::StrAppend(&transition->advice, transition->advice.empty() ? "" : " ", sentence);
  if (!cost.empty()) absl::StrAppend(&transition->advice, "; cost: ", cost);
  transition->advice += '.';
}

// What the first rung will be.
void AddPlan(const Policy& policy, Transition* transition) {
  if (policy.mode == PolicyMode::kObserve || transition->state != AlertState::kFiring || transition->k != 0) return;
  const PolicyRule* const rule = policy.Find(transition->rule, transition->stage, transition->severity);
  if (rule == nullptr || rule->ladder.empty() || rule->confirm_steps == 0) return;
  const PolicyRung& rung = rule->ladder.front();
  const ActionKindInfo& kind = *FindActionKind(rung.kind);
  AddToAdvice(absl::StrCat("If it fires on for ", rule->confirm_steps, " steps, the policy ",
                           policy.mode == PolicyMode::kEnforce ? "applies " : "proposes ", kind.name,
                           rung.mode.empty() ? "" : " ", rung.mode),
              kind.cost, transition);
}

}  // namespace

void AddProposals(const std::vector<Action>& changed, const Policy& policy, Transition* transition) {
  // An action that changed twice is there twice: as it is now is its last.
  std::map<std::string, const Action*> now;
  for (const Action& action : changed) {
    if (action.alert_key == transition->key) now[action.id] = &action;
  }
  for (const auto& [id, action] : now) {
    std::string sentence;
    if (action->state == ActionState::kProposed) {
      sentence = absl::StrCat("Proposed: ", ActionText(*action), "; `bellwether action approve ", transition->run_name,
                              " ", id, "` applies it");
    } else if (action->state == ActionState::kApproved || action->state == ActionState::kSent) {
      sentence = absl::StrCat("On its way by the policy: ", ActionText(*action), " (action ", id, ")");
    } else {
      continue;
    }
    AddToAdvice(sentence, action->cost, transition);
  }
  if (now.empty()) AddPlan(policy, transition);
}

}  // namespace bellwether::server
