// How an action moves from state to state.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/act/engine_state.h"
#include "server/model/alert_words.h"

namespace bellwether::server {
namespace {

std::string IdPrefix(const RunUuid& uuid) {
  std::string text;
  for (size_t i = 0; i < 4; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[uuid[i] >> 4];
    text += kDigits[uuid[i] & 15];
  }
  return text;
}

}  // namespace

bool Tracked::HasAnswered(uint32_t rank) const {
  return std::any_of(answers.begin(), answers.end(), [&](const Answer& answer) { return answer.rank == rank; });
}

bool Tracked::IsFor(uint32_t rank) const {
  return std::find(recipients.begin(), recipients.end(), rank) != recipients.end();
}

Tracked* ActionEngine::State::Find(const std::string& id) {
  for (Tracked& tracked : actions) {
    if (tracked.action.id == id) return &tracked;
  }
  return nullptr;
}

Tracked* ActionEngine::State::Busy(const Tracked* but) {
  for (Tracked& tracked : actions) {
    if (&tracked == but) continue;
    if (tracked.on_its_way() || tracked.on_trial) return &tracked;
  }
  return nullptr;
}

void ActionEngine::State::Move(Tracked* tracked, ActionState state, const std::string& by, const std::string& reason,
                               const Now& now, Changed* changed) {
  Action& action = tracked->action;
  action.state = state;
  action.not_allowed = state == ActionState::kProposed ? NotAllowed(action).value_or("") : "";
  std::vector<ActionChange>& history = action.history;
  // How it began stays; of what is between the oldest goes.
  if (history.size() >= kHistoryMax) history.erase(history.begin() + 1);
  history.push_back({.state = state,
                     .time_unix_ns = now.time_unix_ns,
                     .by = by,
                     .reason = Clipped(reason, kReasonBytesMax),
                     .step = now.step});
  ++due_version;
  changed->push_back(action);
}

Tracked* ActionEngine::State::Create(Action action, const std::string& by, const std::string& reason, const Now& now,
                                     Changed* changed) {
  action.id = absl::StrCat(IdPrefix(run.uuid), "-", next_number++);
  action.attempt = run.attempt;
  action.asked_by = by;
  action.history.clear();
  if (action.expires_unix_ns == 0) action.expires_unix_ns = now.time_unix_ns + policy->time_to_live_s * kSecondNanos;
  Tracked& tracked = actions.emplace_back();
  tracked.action = std::move(action);
  Move(&tracked, ActionState::kProposed, by, reason, now, changed);
  return &tracked;
}

void ActionEngine::State::Approve(Tracked* tracked, const std::string& by, const std::string& reason, const Now& now,
                                  Changed* changed) {
  tracked->action.attempt = run.attempt;
  if (!tracked->expires_given) {
    tracked->action.expires_unix_ns = now.time_unix_ns + policy->time_to_live_s * kSecondNanos;
  }
  if (tracked->by_policy && !tracked->is_undo()) {
    ++policy_actions;
    if (tracked->info().on_trial) last_trial_step = now.step;
  }
  Move(tracked, ActionState::kApproved, by, reason, now, changed);
  Address(tracked, now, changed);
}

void ActionEngine::State::Applied(Tracked* tracked, int64_t step, const std::string& by, const std::string& reason,
                                  const Now& now, Changed* changed) {
  const ActionKindInfo& info = tracked->info();
  // The next boundary may be some steps behind what has been closed since.
  tracked->applied_step = std::max(step, now.step);
  tracked->in_force = info.holds && !tracked->is_undo();
  Move(tracked, ActionState::kApplied, by, reason, now, changed);
  if (tracked->is_undo()) {
    Move(tracked, ActionState::kKept, "server", "an undo is not judged", now, changed);
    Tracked* const of = Find(tracked->action.undoes);
    if (of == nullptr) return;
    of->in_force = false;
    of->on_trial = false;
    // What was applied in part stays refused, and is gone now.
    if (of->action.state == ActionState::kRefused || of->action.state == ActionState::kExpired) return;
    const bool failed = of->action.state == ActionState::kDidNotHelp;
    Move(of, ActionState::kUndone, tracked->action.asked_by,
         absl::StrCat("taken back by ", tracked->action.id, " at step ", step), now, changed);
    AlertCase* const alert = FindCase(of->action.alert_key);
    if (failed && of->by_policy && alert != nullptr) alert->owed = alert->owed_by_verdict = true;
    return;
  }
  if (AlertCase* const alert = FindCase(tracked->action.alert_key); alert != nullptr) alert->acted = true;
  if (tracked->restoring) {
    tracked->restoring = false;
    const ActionState before = tracked->resume;
    if (before == ActionState::kApplied && info.on_trial) {
      tracked->on_trial = true;
      tracked->extensions = 0;
      tracked->before.step = tracked->applied_step;
      watch.Forget();
    } else {
      const bool failed = before == ActionState::kEscalated || before == ActionState::kDidNotHelp;
      Move(tracked, failed ? before : ActionState::kKept, "server", "in force again, as before the restart", now,
           changed);
    }
    return;
  }
  if (info.on_trial) {
    tracked->on_trial = true;
    const AlertCase* const alert = FindCase(tracked->action.alert_key);
    tracked->before =
        watch.Begin(tracked->action, alert != nullptr ? alert->heads : std::vector<Head>(), tracked->applied_step);
    return;
  }
  Move(tracked, ActionState::kKept, "server", "its effect is not judged", now, changed);
  if (AlertCase* const alert = FindCase(tracked->action.alert_key); alert != nullptr && tracked->by_policy) {
    alert->owed = true;  // The ladder goes on at once.
    alert->owed_by_verdict = tracked->always_next;
  }
}

void ActionEngine::State::Conclude(Tracked* tracked, const Effect& effect, const Now& now, Changed* changed) {
  AlertCase* const alert = FindCase(tracked->action.alert_key);
  const bool firing = alert != nullptr && alert->firing;
  Effect::Verdict verdict = effect.verdict;
  std::string numbers = effect.numbers;
  if (verdict == Effect::Verdict::kUnclear && firing && tracked->extensions < kTrialExtensionsMax) {
    ++tracked->extensions;
    return;
  }
  if (verdict == Effect::Verdict::kUnclear && alert != nullptr && !firing) {
    // That it is over proves nothing where what its rule sees, or the rule, was changed.
    if (rules_step >= tracked->applied_step) {
      numbers = absl::StrCat("the alert is over, but the rules were changed at step ", rules_step, "; ", numbers);
    } else if (ReachOf(tracked->action, alert->rule) != RuleReach::kNone) {
      numbers = absl::StrCat("the alert is over, but ", tracked->info().name, " changes what its rule sees; ", numbers);
    } else {
      verdict = Effect::Verdict::kHelped;
      numbers = absl::StrCat("the alert is over; ", numbers);
    }
  }
  tracked->on_trial = false;
  const bool climbs = alert != nullptr && tracked->by_policy;
  if (verdict == Effect::Verdict::kHelped) {
    Move(tracked, ActionState::kHelped, "server", numbers, now, changed);
    Move(tracked, ActionState::kKept, "server", "it helped", now, changed);
    if (climbs) alert->owed = alert->owed_by_verdict = tracked->always_next;
    return;
  }
  if (verdict == Effect::Verdict::kUnclear) {
    Move(tracked, ActionState::kKept, "server", absl::StrCat("whether it helped cannot be told: ", numbers), now,
         changed);
    if (!climbs) return;
    alert->owed_by_verdict = tracked->always_next;
    alert->owed = tracked->always_next || firing;
    return;
  }
  Move(tracked, ActionState::kDidNotHelp, "server", numbers, now, changed);
  if (!tracked->by_policy || policy->mode == PolicyMode::kObserve) {
    Move(tracked, ActionState::kKept, "server",
         tracked->info().holds ? "no policy takes it back: a person may undo it" : "it cannot be undone", now, changed);
    return;
  }
  std::string unsafe;
  if (!tracked->in_force) {
    Escalate(tracked, "it cannot be undone", now, changed);
  } else if (!tracked->may_undo) {
    Escalate(tracked, "the policy leaves it in force", now, changed);
  } else if (!watch.IsSafeToUndo(tracked->before, tracked->action, &unsafe)) {
    Escalate(tracked, absl::StrCat("not undone: ", unsafe), now, changed);
  } else if (ended || (!firing && !MayEnforce(now))) {
    // Nothing is proposed for what is over.
    Move(tracked, ActionState::kKept, "server", "the alert is over: a person may undo it", now, changed);
  } else {
    MakeUndo(tracked, "policy", "it did not help", now, changed);
  }
}

Tracked* ActionEngine::State::MakeUndo(Tracked* of, const std::string& by, const std::string& reason, const Now& now,
                                       Changed* changed) {
  if (actions.size() >= 2 * kActionsMax) {
    Escalate(of, "the run has too many actions to undo one", now, changed);
    return nullptr;
  }
  Action action;
  action.kind = of->action.kind;
  action.scope = of->action.scope;
  action.mode = of->action.mode;
  action.value = action.kind == ActionKind::kCenterK ? 1 - of->action.value : of->action.value;
  action.undoes = of->action.id;
  action.alert_key = of->action.alert_key;
  action.expected_effect = absl::StrCat("as it was before ", of->action.id);
  Tracked* const undo = Create(std::move(action), by, reason, now, changed);
  undo->by_policy = by == "policy";
  return undo;
}

void ActionEngine::State::Escalate(Tracked* tracked, const std::string& why, const Now& now, Changed* changed) {
  if (tracked->action.state != ActionState::kDidNotHelp) return;
  Move(tracked, ActionState::kEscalated, "policy", why, now, changed);
  AlertCase* const alert = FindCase(tracked->action.alert_key);
  if (alert != nullptr) alert->owed = alert->owed_by_verdict = true;
}

void ActionEngine::State::Fail(Tracked* tracked, ActionState state, const std::string& by, const std::string& reason,
                               bool by_chance, const Now& now, Changed* changed) {
  const bool was_proposed = tracked->action.state == ActionState::kProposed;
  const bool restored = tracked->restoring;
  tracked->restoring = false;
  tracked->in_force = false;
  tracked->on_trial = false;
  Move(tracked, state, by, reason, now, changed);
  if (tracked->is_undo()) {
    if (Tracked* const of = Find(tracked->action.undoes); of != nullptr) {
      Escalate(of, absl::StrCat("not undone: ", reason), now, changed);
    }
    return;
  }
  AlertCase* const alert = FindCase(tracked->action.alert_key);
  if (alert == nullptr || !tracked->by_policy || restored) return;
  if (was_proposed && !by_chance) {  // People said no, or nothing: until the alert rises that is that.
    alert->owed = alert->owed_by_verdict = false;
    return;
  }
  alert->owed = true;
  alert->owed_by_verdict = tracked->was_owed;
  for (AlertCase::Tried& tried : alert->tried) {
    if (tried.kind != tracked->action.kind || tried.mode != tracked->action.mode) continue;
    if (!by_chance || ++tried.failures >= kRungTriesMax) continue;
    tried.times = std::max(0, tried.times - 1);
    break;
  }
}

void ActionEngine::State::Expire(const Now& now, Changed* changed) {
  // By index: an expiry may add an undo.
  for (size_t i = 0; i < actions.size(); ++i) {
    Tracked& tracked = actions[i];
    const ActionState state = tracked.action.state;
    if (now.time_unix_ns <= tracked.action.expires_unix_ns) continue;
    if (state == ActionState::kProposed) {
      Fail(&tracked, ActionState::kExpired, "server", "nobody approved it in time", false, now, changed);
    } else if (state == ActionState::kApproved || (state == ActionState::kSent && tracked.recipients.empty())) {
      // Sent, to nobody: to a trainer that restarted since.
      const char* const why = !tracked.recipients.empty() ? "no trainer fetched it in time"
                              : ranks.size() >= run.reporters
                                  ? "no step of the attempt to count from was closed in time"
                                  : "not all ranks of the attempt have said hello";
      Fail(&tracked, ActionState::kExpired, "server", why, true, now, changed);
    } else if (state == ActionState::kSent && now.time_unix_ns > tracked.action.expires_unix_ns + kAnswerGraceNanos) {
      Settle(&tracked, now, changed);
    }
  }
}

// Its alert got worse during the trial, and so did what it was for: the end of
// the trial may be too late.
bool ActionEngine::State::IsLost(const Tracked& tracked, const Now& now) {
  const AlertCase* const alert = FindCase(tracked.action.alert_key);
  const int64_t passed = now.step - tracked.applied_step;
  if (alert == nullptr || alert->rose_step <= tracked.applied_step || passed < kEarlySteps) return false;
  if (alert->severity < Severity::kCritical || passed % kEarlyEvery != 0 || !watch.CanJudge()) return false;
  return watch.Judge(tracked.before, tracked.action, now.step).verdict == Effect::Verdict::kDidNotHelp;
}

void ActionEngine::State::EndTrials(const Now& now, Changed* changed) {
  for (size_t i = 0; i < actions.size(); ++i) {
    Tracked& tracked = actions[i];
    if (!tracked.on_trial) continue;
    const bool lost = watch.turned_nonfinite() || IsLost(tracked, now);
    if (!lost && now.step < tracked.trial_end()) continue;
    const bool waits = !watch.CanJudge() && now.step < tracked.applied_step + kTrialWaitFactor * tracked.trial_steps;
    if (!lost && waits) continue;
    const bool going = std::any_of(actions.begin(), actions.end(), [&](const Tracked& undo) {
      return undo.action.undoes == tracked.action.id && undo.on_its_way();
    });
    if (going) continue;  // The verdict is spoken already.
    Conclude(&tracked, watch.Judge(tracked.before, tracked.action, now.step), now, changed);
  }
}

void ActionEngine::State::Watch(const StepSample& sample) {
  const bool open = std::any_of(actions.begin(), actions.end(), [](const Tracked& tracked) {
    return tracked.on_its_way() || tracked.on_trial || tracked.action.state == ActionState::kProposed;
  });
  const bool wanted = policy->mode != PolicyMode::kObserve || open;
  if (wanted && !watching) watch.Forget();  // What lies before the gap is no past to grow from.
  watching = wanted;
  if (watching) watch.Observe(sample);
}

}  // namespace bellwether::server
