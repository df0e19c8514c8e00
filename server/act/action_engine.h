// action_engine.h: what is done about one run's alerts, from the proposal to
// the verdict.
//
// Its input is the messages of the trainers, the judge and people, in the order
// of the log.  Its output is the actions that changed.  Deterministic and
// without a clock: the time is that of the messages, so that a recovery
// concludes the same.  At most one action of a run is on its way or on trial at
// any time.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ACT_ACTION_ENGINE_H_
#define BELLWETHER_SERVER_ACT_ACTION_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/act/policy.h"
#include "server/model/action.h"
#include "server/model/alert_transition.h"
#include "server/model/false_alarm.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// What a rank's Hello announced about actions.
struct RankAbilities {
  uint32_t rank = 0;
  uint32_t attempt = 0;
  uint32_t kinds_mask = 0;   // Bit k: ActionKind k can be applied there.
  bool ranks_agree = false;  // It passes actions on to all ranks and answers for them.
};

// What a rank answered.
struct RankResult {
  std::string id;
  uint32_t rank = 0;
  uint32_t attempt = 0;
  bool applied = false;
  int64_t step = 0;
  std::string reason;
};

class ActionEngine {
 public:
  // When a message was taken, by the log.
  struct Now {
    int64_t time_unix_ns = 0;
    int64_t step = 0;  // The run's newest closed one; -1 = none
  };

  // `policy` is in force until SetPolicy(); never null.
  ActionEngine(const RunDescription& run, PolicyPtr policy);
  ~ActionEngine();
  ActionEngine(const ActionEngine&) = delete;
  ActionEngine& operator=(const ActionEngine&) = delete;

  // Each appends a copy of every action that changed, with its whole history,
  // to `*changed`; one call may change an action more than once.
  void OnHello(const RunDescription& run, const RankAbilities& rank, const Now& now, std::vector<Action>* changed);
  void OnTransitions(const std::vector<AlertTransition>& transitions, const Now& now, std::vector<Action>* changed);
  void OnStep(const StepSample& sample, const Now& now, std::vector<Action>* changed);
  void OnResult(const RankResult& result, const Now& now, std::vector<Action>* changed);
  // A note of the run: what centring, mode or learning rate are now.
  void OnEvent(const RunEvent& event, const Now& now, std::vector<Action>* changed);
  // Some stream was handed the action for the first time.
  void OnSent(const std::string& id, const Now& now, std::vector<Action>* changed);
  // Whether the run has ended: no trainer can act, so that what is proposed
  // ends and nothing is proposed until the run goes on.  Not saved: the caller
  // knows.
  void SetEnded(bool ended, const Now& now, std::vector<Action>* changed);
  // A person called an illness a false alarm: what is proposed for its alerts ends, and
  // nothing more is, unless one gets worse than was judged or it is taken back.
  void OnFalseAlarm(const FalseAlarm& said, const Now& now, std::vector<Action>* changed);
  // The rules that judge the run have changed: an alert that ends from here on may end by that.
  void OnRules(const Now& now);
  void SetPolicy(PolicyPtr policy, const std::string& by, const Now& now, std::vector<Action>* changed);
  // INVALID_ARGUMENT (field, value, range), NOT_FOUND (id), FAILED_PRECONDITION
  // (the state forbids it), PERMISSION_DENIED (the policy's approvers): nothing
  // changed; the caller keeps what was refused.
  absl::Status OnRequest(const ActionRequest& request, const Now& now, std::vector<Action>* changed);

  // What `rank` is to be handed now, oldest first: approved or sent, and not
  // answered by it.  Handed again after each Hello; the trainer drops repeats.
  std::vector<Action> Due(uint32_t rank) const;
  // Grows whenever some Due() may have changed.
  uint64_t due_version() const;

  // Whether nothing is proposed for the alert, as a person called its illness a false alarm.
  bool IsFalseAlarm(const std::string& alert_key) const;

  const PolicyPtr& policy() const;
  std::vector<Action> actions() const;  // Oldest first.

  // The whole state with the policy in force, versioned.  False, leaving the
  // engine fresh: another version, or damaged.  A policy that no longer parses
  // gives way to the constructor's.
  std::string Save() const;
  bool Restore(std::string_view state);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACT_ACTION_ENGINE_H_
