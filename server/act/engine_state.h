// engine_state.h: what an ActionEngine remembers, and the parts of its work.
//
// Private to server/act.  life.cc moves actions from state to state.
// delivery.cc decides which rank is handed what, and what the answers mean.
// ladder.cc is the policy's side, requests.cc the people's.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_ACT_ENGINE_STATE_H_
#define BELLWETHER_SERVER_ACT_ENGINE_STATE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/act/action_engine.h"
#include "server/act/action_kinds.h"
#include "server/act/effect.h"
#include "server/act/policy.h"
#include "server/model/false_alarm.h"

namespace bellwether::server {

inline constexpr size_t kActionsMax = 256;  // Of a run; undoing may go beyond, to twice as many.
inline constexpr size_t kCasesMax = 64;
inline constexpr size_t kHistoryMax = 64;
inline constexpr size_t kFalseAlarmsMax = 256;  // Of a run, the newest of each illness.
inline constexpr size_t kReasonBytesMax = 256;
inline constexpr int64_t kSecondNanos = 1'000'000'000;
// A trainer refuses by its own clock; only silence beyond that is ours to call.
inline constexpr int64_t kAnswerGraceNanos = 60 * kSecondNanos;
inline constexpr int32_t kRungTriesMax = 3;  // Of a rung that failed by chance: late, restarted, no answer.
inline constexpr int32_t kUndoTriesMax = 3;
inline constexpr int64_t kEarlySteps = 100;        // Of a trial, before an alert that rises can end it.
inline constexpr int64_t kEarlyEvery = 20;         // Steps: a batch of indicators.
inline constexpr int32_t kTrialExtensionsMax = 2;  // While nothing is clear and the alert fires.
inline constexpr int64_t kTrialWaitFactor = 5;     // Of the trial: so long a rarely sampled run is waited for.

// vector<T> or deque<T> of at most `max`, each by `each(element)`.
template <class A, class List, class Each>
void VisitList(A& a, List& list, uint32_t max, const Each& each) {
  auto size = static_cast<uint32_t>(list.size());
  a(size);
  if constexpr (A::kReading) {
    list.clear();
    if (size > max) return a.Refuse();
    for (uint32_t i = 0; i < size && a.ok(); ++i) each(list.emplace_back());
  } else {
    for (auto& element : list) each(element);
  }
}

template <class A>
void VisitHeads(A& a, std::vector<Head>& heads) {
  VisitList(a, heads, 4096, [&](Head& head) { a(head.layer), a(head.head); });
}

// All but `not_allowed`, which older states do not have.
template <class A>
void VisitAction(A& a, Action& action) {
  a(action.id), a(action.attempt), a(action.kind), a(action.scope.layers);
  VisitHeads(a, action.scope.heads);
  a(action.mode), a(action.value), a(action.apply_at_step), a(action.expires_unix_ns);
  a(action.expected_effect), a(action.cost), a(action.asked_by), a(action.alert_key), a(action.undoes), a(action.state);
  VisitList(a, action.history, kHistoryMax, [&](ActionChange& change) {
    a(change.state), a(change.time_unix_ns), a(change.by), a(change.reason), a(change.step);
  });
}

template <class A>
void VisitIllness(A& a, Illness& illness) {
  a(illness.cause), a(illness.rule), a(illness.places);
}

template <class A>
void VisitFalseAlarm(A& a, FalseAlarm& said) {
  a(said.key), a(said.by), a(said.reason), a(said.time_unix_ns), a(said.severity), a(said.step), a(said.undone);
  VisitIllness(a, said.illness);
}

// One action with what delivering and judging it needs.
struct Tracked {
  struct Answer {
    uint32_t rank = 0;
    bool applied = false;
    int64_t step = 0;
    std::string reason;
    template <class A>
    void Visit(A& a) {
      a(rank), a(applied), a(step), a(reason);
    }
  };

  Action action;
  bool by_policy = false;        // The policy made it;
  bool person_approved = false;  // a person approved it.
  bool in_force = false;         // Applied, holds, and was not taken back.
  bool expires_given = false;    // By a person.
  bool step_given = false;       // apply_at_step, by a person.
  bool was_owed = false;         // By a verdict, not by the alert.
  // Delivery.  No recipients: not decided yet.
  std::vector<uint32_t> recipients;
  std::vector<Answer> answers;
  bool restoring = false;                   // Handed again because a new attempt began without it;
  ActionState resume = ActionState::kNone;  // then it is again what it was.
  int32_t undo_tries = 0;
  std::vector<uint32_t> only_ranks;  // Of an undo that only some ranks need.
  // The trial.
  bool on_trial = false;
  int64_t trial_steps = 0;
  int32_t extensions = 0;
  int64_t applied_step = -1;
  EffectSnapshot before;
  bool always_next = false;
  bool may_undo = false;

  int64_t trial_end() const { return applied_step + trial_steps * (1 + extensions); }
  const ActionKindInfo& info() const { return *FindActionKind(action.kind); }
  bool is_undo() const { return !action.undoes.empty(); }
  bool on_its_way() const { return action.state == ActionState::kApproved || action.state == ActionState::kSent; }
  bool HasAnswered(uint32_t rank) const;
  bool IsFor(uint32_t rank) const;

  template <class A>
  void Visit(A& a) {
    VisitAction(a, action);
    a(by_policy), a(person_approved), a(in_force), a(expires_given), a(step_given), a(was_owed);
    a(recipients), a(answers), a(restoring), a(resume), a(undo_tries), a(only_ranks);
    a(on_trial), a(trial_steps), a(extensions), a(applied_step), a(before), a(always_next), a(may_undo);
  }
};

// An alert, and how far its ladder has been climbed.
struct AlertCase {
  struct Tried {
    ActionKind kind = ActionKind::kNone;
    std::string mode;
    double value = 0;
    PolicyRung::Scope scope = PolicyRung::Scope::kAll;
    int32_t times = 0;
    int32_t failures = 0;  // By chance, since it last came to a verdict.
    bool Is(const PolicyRung& rung) const {
      return kind == rung.kind && mode == rung.mode && value == rung.value && scope == rung.scope;
    }
    template <class A>
    void Visit(A& a) {
      a(kind), a(mode), a(value), a(scope), a(times), a(failures);
    }
  };

  std::string key, rule;
  int32_t stage = 0;
  Severity severity = Severity::kNone;
  int64_t fired_step = 0;   // The step at which it was reported.
  int64_t first_step = 0;   // When the illness began.
  std::vector<Head> heads;  // Found, strongest first; not those that are next in line.
  std::vector<int32_t> layers;
  bool firing = false;
  int64_t rose_step = -1;        // When it last got worse; -1: it did not.
  bool owed = false;             // The next rung is due, while the alert fires,
  bool owed_by_verdict = false;  // at once, by a verdict: confirm_steps are over.
  bool acted = false;            // Something of its ladder was applied.
  std::vector<Tried> tried;
  Illness illness;         // As it last fired; no cause: an older server saved the state.
  bool is_judged = false;  // A false alarm: nothing is proposed for it.

  int32_t TimesTried(const PolicyRung& rung) const;
  void Try(const PolicyRung& rung);
  // As if the action had not been proposed.
  void Forget(const Action& action);

  template <class A>
  void Visit(A& a) {
    a(key), a(rule), a(stage), a(severity), a(fired_step), a(first_step);
    VisitHeads(a, heads);
    a(layers), a(firing), a(rose_step), a(owed), a(owed_by_verdict), a(acted), a(tried);
  }
};

struct ActionEngine::State {
  using Now = ActionEngine::Now;
  using Changed = std::vector<Action>;

  State(const RunDescription& description, PolicyPtr in_force)
      : run(description), policy(std::move(in_force)), watch(description.layout) {}

  RunDescription run;
  PolicyPtr policy;
  std::map<uint32_t, RankAbilities> ranks;  // Of this attempt.
  std::deque<Tracked> actions;
  std::vector<AlertCase> cases;
  uint32_t next_number = 1;
  int32_t policy_actions = 0;    // That the policy made and that were approved.
  int64_t last_trial_step = -1;  // When the last of them that is judged was approved.
  double step_seconds = 0;       // Smoothed; 0 = not known.
  bool stepped = false;          // This attempt has closed a step: the run's newest step is its own.
  uint64_t due_version = 1;
  int64_t rules_step = -1;       // When the rules that judge the run last changed.
  std::vector<FalseAlarm> said;  // Oldest first.
  EffectWatch watch;
  bool watching = false;  // Only while something may come of it.
  bool ended = false;     // Whether the run has ended, from SetEnded().

  // ---- life.cc ----
  Tracked* Find(const std::string& id);
  // The one on its way or on trial, if any; `but` is left out.
  Tracked* Busy(const Tracked* but = nullptr);
  void Move(Tracked* tracked, ActionState state, const std::string& by, const std::string& reason, const Now& now,
            Changed* changed);
  Tracked* Create(Action action, const std::string& by, const std::string& reason, const Now& now, Changed* changed);
  void Approve(Tracked* tracked, const std::string& by, const std::string& reason, const Now& now, Changed* changed);
  void Applied(Tracked* tracked, int64_t step, const std::string& by, const std::string& reason, const Now& now,
               Changed* changed);
  void Conclude(Tracked* tracked, const Effect& effect, const Now& now, Changed* changed);
  // Refused or expired; `by_chance`: the same may go well another time.
  void Fail(Tracked* tracked, ActionState state, const std::string& by, const std::string& reason, bool by_chance,
            const Now& now, Changed* changed);
  Tracked* MakeUndo(Tracked* of, const std::string& by, const std::string& reason, const Now& now, Changed* changed);
  // After a verdict against it, once it was undone, or could not be.
  void Escalate(Tracked* tracked, const std::string& why, const Now& now, Changed* changed);
  void Expire(const Now& now, Changed* changed);
  // Ends those that `which` takes; they cannot be approved any more.
  // `by_chance`: as in Fail().
  template <class Which>
  void EndProposals(const Which& which, const std::string& why, bool by_chance, const Now& now, Changed* changed) {
    // By index: an end may add an action.
    for (size_t i = 0; i < actions.size(); ++i) {
      Tracked& tracked = actions[i];
      if (tracked.action.state != ActionState::kProposed || !which(tracked.action)) continue;
      Fail(&tracked, ActionState::kExpired, "server", why, by_chance, now, changed);
    }
  }
  // Ends the proposals for alerts that have become false alarms.
  void EndFalse(const Now& now, Changed* changed);
  void EndTrials(const Now& now, Changed* changed);
  void Watch(const StepSample& sample);

  // ---- delivery.cc ----
  void Restart(uint32_t attempt, const Now& now, Changed* changed);
  // Decides which ranks are handed it, or refuses.  Waits while ranks are
  // missing, or a step of this attempt to count from.
  void Address(Tracked* tracked, const Now& now, Changed* changed);
  void AddressAll(const Now& now, Changed* changed);
  void Answer(Tracked* tracked, const RankResult& result, const Now& now, Changed* changed);
  void Settle(Tracked* tracked, const Now& now, Changed* changed);
  // Why the kind cannot be applied in this attempt; "" = it can.
  std::string WhyNot(ActionKind kind) const;
  // Whether all ranks that answer for the run have said what they can apply.
  bool AbilitiesKnown() const;
  // Action::not_allowed of one that is proposed; none = not all of its ranks have said what they can apply.
  std::optional<std::string> NotAllowed(const Action& action) const;
  // Brings what is proposed up to what the ranks allow.
  void SayNotAllowed(const Now& now, Changed* changed);
  int64_t margin_steps() const;

  // ---- ladder.cc ----
  AlertCase* FindCase(const std::string& key);
  void Follow(const AlertTransition& transition, const Now& now, Changed* changed);
  void Decide(const Now& now, Changed* changed);
  bool MayEnforce(const Now& now) const;

  // ---- requests.cc ----
  absl::Status Request(const ActionRequest& request, const Now& now, Changed* changed);

  template <class A>
  void Visit(A& a);
  // What people said of its alerts.
  template <class A>
  void VisitFalseAlarms(A& a);
  template <class A>
  void VisitNotAllowed(A& a);

 private:
  bool IsLost(const Tracked& tracked, const Now& now);
  bool ProposeFor(AlertCase* of, const Now& now, Changed* changed);
  bool MakeAction(const PolicyRung& rung, const AlertCase& of, Action* action) const;
  bool HasOpen(const AlertCase& of) const;
  absl::Status Propose(const ActionRequest& request, const Now& now, Changed* changed);
  absl::Status ApproveById(const ActionRequest& request, const Now& now, Changed* changed);
  absl::Status Reject(const ActionRequest& request, const Now& now, Changed* changed);
  absl::Status Undo(const ActionRequest& request, const Now& now, Changed* changed);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACT_ENGINE_STATE_H_
