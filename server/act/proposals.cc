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

// " (action 6f1b0a2c-3)"
std::string OfAction(const std::string& id) { return absl::StrCat(" (action ", id, ")"); }

// The sentence that begins with `words` and names an action by `mark`, up to the next one about an action.
void EraseSentence(const char* words, const std::string& mark, std::string* advice) {
  const size_t at = advice->find(mark);
  const size_t begin = at == std::string::npos ? at : advice->rfind(words, at);
  if (begin == std::string::npos) return;
  size_t end = advice->size();
  for (const char* const next : {kProposedWords, kNotAllowedWords, kOnItsWayWords}) {
    end = std::min(end, advice->find(next, at));
  }
  advice->erase(begin, end - begin);
  while (!advice->empty() && advice->back() == ' ') advice->pop_back();
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
    if (action->state == ActionState::kProposed && !action->not_allowed.empty()) {
      sentence = absl::StrCat(kNotAllowedWords, ActionText(*action), OfAction(id), ": ", action->not_allowed);
    } else if (action->state == ActionState::kProposed) {
      sentence = absl::StrCat(kProposedWords, ActionText(*action), HowToApprove(transition.run_name, id));
    } else if (action->state == ActionState::kApproved || action->state == ActionState::kSent) {
      sentence = absl::StrCat(kOnItsWayWords, ActionText(*action), OfAction(id));
    } else {
      continue;
    }
    const bool told = absl::StrContains(transition.advice, absl::StrCat(" ", id, "`")) ||
                      absl::StrContains(transition.advice, absl::StrCat(" ", id, ")"));
    if (!told) AddSentence(sentence, action->not_allowed.empty() ? action->cost : "", &text);
  }
  return text;
}

bool SpeaksOfProposals(const std::string& advice) {
  return absl::StrContains(advice, kProposedWords) || absl::StrContains(advice, kNotAllowedWords);
}

void HideEndedProposals(const std::string& run_name, const std::vector<Action>& actions, std::string* advice) {
  for (const Action& action : actions) {
    const bool waits = action.state == ActionState::kProposed;
    if (!waits || !action.not_allowed.empty()) {
      EraseSentence(kProposedWords, HowToApprove(run_name, action.id), advice);
    }
    if (!waits || action.not_allowed.empty()) {
      EraseSentence(kNotAllowedWords, absl::StrCat(OfAction(action.id), ":"), advice);
    }
  }
}

std::string AdviceNow(const std::vector<Action>& actions, const AlertTransition& transition) {
  std::string advice = transition.advice;
  HideEndedProposals(transition.run_name, actions, &advice);
  AlertTransition now = transition;
  now.advice = advice;
  if (const std::string more = ProposalText(actions, now); !more.empty()) {
    absl::StrAppend(&advice, advice.empty() ? "" : " ", more);
  }
  // What was applied for no alert may help those that began before, unless it is too late for any repair.
  const auto is_its = [&](const Action& action) {
    return action.alert_key == transition.key ||
           (action.alert_key.empty() && !action.history.empty() &&
            transition.first_step <= action.history.back().step && !absl::StartsWith(advice, "Stop"));
  };
  const bool on_trial = std::any_of(actions.begin(), actions.end(), [&](const Action& action) {
    return action.state == ActionState::kApplied && is_its(action);
  });
  if (on_trial && transition.state == AlertState::kFiring) {
    advice = absl::StrCat(kOnTrialWords, advice.empty() ? "" : " ", advice);
  }
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
