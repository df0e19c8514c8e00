#include "server/act/proposals.h"

#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/act/action_kinds.h"
#include "server/model/alert_words.h"

namespace bellwether::server {

namespace {

// How a proposal's sentence ends, but for its cost.
std::string HowToApprove(const std::string& run_name, const std::string& id) {
  return absl::StrCat("; `bellwether action approve ", run_name, " ", id, "` applies it");
}

void AddSentence(const std::string& sentence, const std::string& cost, std::string* text) {
  absl::StrAppend(text, text->empty() ? "" : " ", sentence);
  if (!cost.empty()) absl::StrAppend(text, "; cost: ", cost);
  *text += '.';
}

// What the first rung will be.
void AddPlan(const Policy& policy, AlertTransition* transition) {
  if (policy.mode == PolicyMode::kObserve || transition->state != AlertState::kFiring || transition->k != 0) return;
  const PolicyRule* const rule = policy.Find(transition->rule, transition->stage, transition->severity);
  if (rule == nullptr || rule->ladder.empty() || rule->confirm_steps == 0) return;
  const PolicyRung& rung = rule->ladder.front();
  const ActionKindInfo& kind = *FindActionKind(rung.kind);
  AddSentence(absl::StrCat("If it fires on for ", rule->confirm_steps, " steps, the policy ",
                           policy.mode == PolicyMode::kEnforce ? "applies " : "proposes ", kind.name,
                           rung.mode.empty() ? "" : " ", rung.mode),
              kind.cost, &transition->advice);
}

}  // namespace

std::string ProposalText(const std::vector<Action>& actions, const AlertTransition& transition) {
  // An action that changed twice is there twice: as it is now is its last.
  std::map<std::string, const Action*> now;
  for (const Action& action : actions) {
    if (action.alert_key == transition.key) now[action.id] = &action;
  }
  std::string text;
  for (const auto& [id, action] : now) {
    std::string sentence;
    if (action->state == ActionState::kProposed) {
      sentence = absl::StrCat(kProposedWords, ActionText(*action), HowToApprove(transition.run_name, id));
    } else if (action->state == ActionState::kApproved || action->state == ActionState::kSent) {
      sentence = absl::StrCat(kOnItsWayWords, ActionText(*action), " (action ", id, ")");
    } else {
      continue;
    }
    const bool told = absl::StrContains(transition.advice, absl::StrCat(" ", id, "`")) ||
                      absl::StrContains(transition.advice, absl::StrCat(" ", id, ")"));
    if (!told) AddSentence(sentence, action->cost, &text);
  }
  return text;
}

bool SpeaksOfProposals(const std::string& advice) { return absl::StrContains(advice, kProposedWords); }

void HideEndedProposals(const std::string& run_name, const std::vector<Action>& actions, std::string* advice) {
  for (const Action& action : actions) {
    if (action.state == ActionState::kProposed) continue;
    const std::string how = HowToApprove(run_name, action.id);
    const size_t at = advice->find(how);
    const size_t begin = at == std::string::npos ? at : advice->rfind(kProposedWords, at);
    if (begin == std::string::npos) continue;
    size_t end = at + how.size();
    const std::string cost = absl::StrCat("; cost: ", action.cost);
    if (advice->compare(end, cost.size(), cost) == 0) end += cost.size();
    if (end < advice->size() && (*advice)[end] == '.') ++end;
    advice->erase(begin, end - begin);
    while (!advice->empty() && advice->back() == ' ') advice->pop_back();
  }
}

std::string AdviceNow(const std::vector<Action>& actions, const AlertTransition& transition) {
  std::string advice = transition.advice;
  HideEndedProposals(transition.run_name, actions, &advice);
  const std::string more = ProposalText(actions, transition);
  if (!more.empty()) absl::StrAppend(&advice, advice.empty() ? "" : " ", more);
  return advice;
}

void AddProposals(const std::vector<Action>& changed, const Policy& policy, AlertTransition* transition) {
  const std::string text = ProposalText(changed, *transition);
  if (!text.empty()) absl::StrAppend(&transition->advice, transition->advice.empty() ? "" : " ", text);
  const bool any = std::any_of(changed.begin(), changed.end(),
                               [&](const Action& action) { return action.alert_key == transition->key; });
  if (!any) AddPlan(policy, transition);
}

}  // namespace bellwether::server
