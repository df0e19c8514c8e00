// The policy's side: which alert is due what.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/act/engine_state.h"

namespace bellwether::server {
namespace {

bool IsFinal(ActionState state) {
  return state == ActionState::kRefused || state == ActionState::kExpired || state == ActionState::kKept ||
         state == ActionState::kUndone || state == ActionState::kEscalated;
}

// The heads that the alert found; those next in line are named for people.
void TakeHeads(const AlertTransition& transition, AlertCase* of) {
  std::vector<Head> found;
  for (const Head& head : transition.heads) {
    const bool next_in_line = std::any_of(
        transition.evidence.begin(), transition.evidence.end(),
        [&](const Evidence& evidence) { return evidence.where == head && evidence.detector == "next in line"; });
    if (!next_in_line) found.push_back(head);
  }
  if (found.empty() && transition.strongest.head >= 0) found.push_back(transition.strongest);
  std::set<int32_t> layers(of->layers.begin(), of->layers.end());
  for (const Head& head : found) layers.insert(head.layer);
  if (transition.strongest.layer >= 0) layers.insert(transition.strongest.layer);
  of->heads = std::move(found);
  of->layers.assign(layers.begin(), layers.end());
}

}  // namespace

int32_t AlertCase::TimesTried(const PolicyRung& rung) const {
  for (const Tried& candidate : tried) {
    if (candidate.Is(rung)) return candidate.times;
  }
  return 0;
}

void AlertCase::Try(const PolicyRung& rung) {
  for (Tried& candidate : tried) {
    if (!candidate.Is(rung)) continue;
    ++candidate.times;
    return;
  }
  tried.push_back({.kind = rung.kind, .mode = rung.mode, .value = rung.value, .scope = rung.scope, .times = 1});
}

void AlertCase::Forget(const Action& action) {
  // Of two rungs that differ in their scope alone the later one was tried last.
  const auto last = std::find_if(tried.rbegin(), tried.rend(), [&](const Tried& of) {
    return of.times > 0 && of.kind == action.kind && of.mode == action.mode && of.value == action.value;
  });
  if (last != tried.rend()) --last->times;
}

AlertCase* ActionEngine::State::FindCase(const std::string& key) {
  if (key.empty()) return nullptr;
  for (AlertCase& candidate : cases) {
    if (candidate.key == key) return &candidate;
  }
  return nullptr;
}

bool ActionEngine::State::HasOpen(const AlertCase& of) const {
  return std::any_of(actions.begin(), actions.end(), [&](const Tracked& tracked) {
    return tracked.action.alert_key == of.key && !IsFinal(tracked.action.state);
  });
}

bool ActionEngine::State::MayEnforce(const Now& now) const {
  return policy->mode == PolicyMode::kEnforce && policy->QuietUntil(now.time_unix_ns) < 0;
}

void ActionEngine::State::Follow(const AlertTransition& transition, const Now& now, Changed* changed) {
  AlertCase* of = FindCase(transition.key);
  if (transition.state == AlertState::kResolved) {
    if (of == nullptr) return;
    of->firing = false;
    EndProposals([&](const Action& action) { return action.alert_key == transition.key; }, "the alert has resolved",
                 /*by_chance=*/false, now, changed);
    // Nothing more is proposed for it, whatever a verdict asked for.
    of->owed = of->owed_by_verdict = false;
    return;
  }
  if (transition.state != AlertState::kFiring) return;
  if (of == nullptr) {
    // What is over and has nothing open makes room.
    std::erase_if(cases, [&](const AlertCase& old) { return !old.firing && !HasOpen(old); });
    if (cases.size() >= kCasesMax) return;
    of = &cases.emplace_back();
    of->key = transition.key;
  }
  of->rule = transition.rule;  // That of what says most of the illness so far.
  // An alert that goes on under repair is told once more, and is no worse.
  const bool worse = !of->firing || transition.stage > of->stage || transition.severity > of->severity;
  if (!of->firing) of->fired_step = transition.step;
  if (of->firing && worse) of->rose_step = transition.step;
  of->firing = true;
  of->first_step = transition.first_step;
  of->stage = std::max(of->stage, transition.stage);
  of->severity = std::max(of->severity, transition.severity);
  if (worse) of->owed = true;  // New, or worse than it was: what was done did not do.
  TakeHeads(transition, of);
  of->illness = IllnessOf(transition);
  EndFalse(now, changed);
}

void ActionEngine::State::EndFalse(const Now& now, Changed* changed) {
  for (AlertCase& of : cases) {
    const FalseAlarm* const judged = LastSaid(said, of.illness);
    const bool was_judged = std::exchange(of.is_judged, Mutes(judged, of.severity));
    if (!of.is_judged || was_judged) continue;
    for (Tracked& tracked : actions) {
      const Action& action = tracked.action;
      // To take back what was done is right all the more.
      if (action.alert_key != of.key || action.state != ActionState::kProposed || tracked.is_undo()) continue;
      Move(&tracked, ActionState::kExpired, judged->by, absl::StrCat("a false alarm: ", judged->reason), now, changed);
      if (!tracked.by_policy) continue;
      // Once the mark is taken back it is proposed again.
      of.owed = true;
      of.owed_by_verdict = tracked.was_owed;
      of.Forget(action);
    }
  }
}

bool ActionEngine::State::MakeAction(const PolicyRung& rung, const AlertCase& of, Action* action) const {
  action->kind = rung.kind;
  action->mode = rung.mode;
  action->value = rung.value;
  action->alert_key = of.key;
  if (rung.scope == PolicyRung::Scope::kLayers) action->scope.layers = of.layers;
  if (rung.scope == PolicyRung::Scope::kHeads) {
    action->scope.heads = watch.WorthClipping(of.heads, of.layers);
    if (action->scope.heads.size() > kScopeHeadsMax) action->scope.heads.resize(kScopeHeadsMax);
  }
  // An alert of the whole run names no layer: all of them then.  One that names
  // no head that stands out has nothing to clip.
  if (!CheckAction(*action, run.layout).ok()) return false;
  if (rung.kind == ActionKind::kCenterK && rung.value == 1 && (run.attention.softcap != 0 || run.attention.centred)) {
    return false;  // With a softcap the common part of the scores is not free.
  }
  if (rung.kind == ActionKind::kQkClip && run.attention.qk_norm) return false;  // The norm takes it back.
  if (rung.kind == ActionKind::kAttentionMode && run.attention.kernel == rung.mode) return false;
  // What is in force already need not be said again.
  return std::none_of(actions.begin(), actions.end(), [&](const Tracked& tracked) {
    const Action& other = tracked.action;
    if (!tracked.in_force || other.kind != action->kind || other.mode != action->mode || other.value != action->value) {
      return false;
    }
    const std::vector<int32_t>& has = other.scope.layers;
    const std::vector<int32_t>& wants = action->scope.layers;
    return has.empty() || (!wants.empty() && std::includes(has.begin(), has.end(), wants.begin(), wants.end()));
  });
}

// The next rung of the alert's ladder as a proposal.  False: there is none.
bool ActionEngine::State::ProposeFor(AlertCase* of, const Now& now, Changed* changed) {
  const PolicyRule* const rule = policy->Find(of->rule, of->stage, of->severity);
  if (rule == nullptr) return false;
  if (!of->owed_by_verdict && now.step - of->fired_step < rule->confirm_steps) return false;
  const PolicyRung* chosen = nullptr;
  const PolicyRung* not_allowed = nullptr;
  const PolicyRung* advice = nullptr;
  Action action;
  size_t number = 0;
  for (size_t i = 0; i < rule->ladder.size() && chosen == nullptr; ++i) {
    const PolicyRung& rung = rule->ladder[i];
    // A rung that stands twice may be tried twice.
    const auto same_before = std::count_if(rule->ladder.begin(), rule->ladder.begin() + static_cast<ptrdiff_t>(i),
                                           [&](const PolicyRung& other) { return other.Repeats(rung); });
    if (of->TimesTried(rung) > same_before) continue;
    Action candidate;
    if (!MakeAction(rung, *of, &candidate)) continue;
    const bool advises = rung.kind == ActionKind::kRollbackSuggest;
    const bool can = !advises && WhyNot(rung.kind).empty();
    if (advises && advice == nullptr) advice = &rung;
    if (!advises && !can && not_allowed == nullptr) not_allowed = &rung;
    if (can) {
      chosen = &rung;
      number = i + 1;
    }
  }
  // Nobody allowed any of it: people are to see what would have been done.
  if (chosen == nullptr && !of->acted) chosen = not_allowed;
  if (chosen == nullptr) chosen = advice;
  if (chosen == nullptr) {
    of->owed = of->owed_by_verdict = false;
    return false;
  }
  const ActionKindInfo& info = *FindActionKind(chosen->kind);
  const bool advises = chosen->kind == ActionKind::kRollbackSuggest;
  if (!advises && policy_actions >= policy->actions_per_run) return false;
  if (info.on_trial && last_trial_step >= 0 && now.step - last_trial_step < policy->min_steps_between) return false;
  if (actions.size() >= kActionsMax) return false;
  (void)MakeAction(*chosen, *of, &action);
  if (number == 0) number = static_cast<size_t>(chosen - rule->ladder.data()) + 1;
  action.cost = info.cost;
  action.expected_effect = info.effect;
  if (advises) absl::StrAppend(&action.expected_effect, ": from before step ", of->first_step);
  if (info.on_trial) absl::StrAppend(&action.expected_effect, "; judged after ", chosen->trial_steps, " steps");
  std::string reason = absl::StrCat("rung ", number, " of ", rule->ladder.size(), " for ", of->key, ", stage ",
                                    of->stage, ", firing since step ", of->fired_step);
  if (!advises) {
    if (const std::string why = WhyNot(chosen->kind); !why.empty()) absl::StrAppend(&reason, "; waits: ", why);
  }
  // People need the quiet hours' end to see it.
  if (const int64_t quiet = policy->QuietUntil(now.time_unix_ns); quiet >= 0 && policy->mode == PolicyMode::kEnforce) {
    action.expires_unix_ns = quiet + policy->time_to_live_s * kSecondNanos;
  }
  Tracked* const tracked = Create(std::move(action), "policy", reason, now, changed);
  tracked->by_policy = true;
  tracked->trial_steps = chosen->trial_steps;
  tracked->always_next = chosen->always_next;
  tracked->may_undo = chosen->may_undo;
  tracked->was_owed = of->owed_by_verdict;
  of->Try(*chosen);
  of->owed = of->owed_by_verdict = false;
  return true;
}

void ActionEngine::State::Decide(const Now& now, Changed* changed) {
  Expire(now, changed);
  EndTrials(now, changed);
  if (policy->mode == PolicyMode::kObserve || ended) return;
  bool waits = false;
  for (const Tracked& tracked : actions) {
    waits = waits || (tracked.by_policy && tracked.action.state == ActionState::kProposed &&
                      tracked.action.kind != ActionKind::kRollbackSuggest);
  }
  if (!waits && Busy() == nullptr) {
    std::vector<AlertCase*> due;
    for (AlertCase& candidate : cases) {
      if (candidate.owed && candidate.firing && !candidate.is_judged && !HasOpen(candidate)) due.push_back(&candidate);
    }
    std::stable_sort(due.begin(), due.end(), [](const AlertCase* a, const AlertCase* b) {
      return a->severity != b->severity ? a->severity > b->severity : a->stage > b->stage;
    });
    for (AlertCase* const of : due) {
      if (!ProposeFor(of, now, changed)) continue;
      if (actions.back().action.kind != ActionKind::kRollbackSuggest) break;
    }
  }
  if (!MayEnforce(now)) return;
  for (size_t i = 0; i < actions.size(); ++i) {
    Tracked& tracked = actions[i];
    if (!tracked.by_policy || tracked.action.state != ActionState::kProposed) continue;
    if (tracked.action.kind == ActionKind::kRollbackSuggest || Busy() != nullptr) continue;
    if (!WhyNot(tracked.action.kind).empty()) continue;  // Until a trainer allows it.
    Approve(&tracked, "policy", "mode enforce", now, changed);
  }
}

}  // namespace bellwether::server
