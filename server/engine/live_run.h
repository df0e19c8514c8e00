// live_run.h: one run while it is being written.
//
// A live run has one part for each of its ideas, and passes messages through them:
//   RunState           what the log's messages make of the run; deterministic
//   RunDeadlines       what the clock says of it; never saved
//   RunSaver           its saves, and what the log must keep for it
//   RunPublisher       what readers are shown
//   RunReporter        its alerts and actions, until they are stored
//   PendingDeliveries  its actions, until its ranks' streams have them
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_LIVE_RUN_H_
#define BELLWETHER_SERVER_ENGINE_LIVE_RUN_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/live_run_parts.h"
#include "server/engine/pending_deliveries.h"
#include "server/engine/run_deadlines.h"
#include "server/engine/run_publisher.h"
#include "server/engine/run_reporter.h"
#include "server/engine/run_saver.h"
#include "server/engine/run_state.h"

namespace bellwether::server {

class LiveRun {
 public:
  // Loads the run's saved state, if it has one.  DATA_LOSS: the state cannot be read.
  static absl::StatusOr<std::unique_ptr<LiveRun>> Load(const LiveRunParts& parts, const RunRecord& record);
  LiveRun(const LiveRun&) = delete;
  LiveRun& operator=(const LiveRun&) = delete;

  // Applies the next message.  `arrived_ns` (monotonic) is when it came in; 0 in recovery.
  void Apply(const LoggedMessage& message, int64_t arrived_ns);
  // Shows readers the newest state if it changed since the last call.
  void Publish() { publisher_.Publish(deadlines_.silent_ranks()); }
  // What is stored beside the state has changed, and with it what readers are shown.
  void PublishAgain() {
    publisher_.MarkChanged();
    Publish();
  }
  // As RunDeadlines::SilenceChanged(); readers are shown the change, too.
  bool SilenceChanged(int64_t now_ns, int64_t silence_ns_min, SilenceMessage* silence);
  // A save is due, and no alert or action of the run waits to be stored.
  bool SaveDue(int64_t now_ns) const { return saver_.IsDue(now_ns) && !reporter_.waits(); }
  // As RunSaver::End(); readers are shown which events are new.
  absl::Status EndSave(RunSave save, const absl::Status& shared);
  // As RunSaver::Save().
  absl::Status Save();

  // The run is judged by other rules than `current`, and no record of them is on its way.
  bool RulesDiffer(const RuleSetPtr& current) { return current != coming_rules_ && state_.RulesDiffer(current); }
  void RecordRulesComing(const RuleSetPtr& rules) { coming_rules_ = rules; }
  // The same of the server's policy.
  bool PolicyDiffers(const PolicyPtr& current) const {
    return current != coming_policy_ && state_.PolicyDiffers(current);
  }
  void RecordPolicyComing(const PolicyPtr& policy) { coming_policy_ = policy; }

  RunState& state() { return state_; }
  const RunState& state() const { return state_; }
  RunDeadlines& deadlines() { return deadlines_; }
  RunSaver& saver() { return saver_; }
  RunReporter& reporter() { return reporter_; }
  PendingDeliveries& deliveries() { return deliveries_; }

  const RunRecord& record() const { return state_.record(); }
  Lsn needed_lsn() const { return saver_.needed_lsn(); }
  bool ended() const { return record().ended; }
  // The run has ended, and everything of it is stored.
  bool closed() const { return ended() && needed_lsn() == 0 && !reporter_.actions_wait(); }

 private:
  LiveRun(const LiveRunParts& parts, const RunRecord& record);

  const LiveRunParts parts_;
  RunState state_;
  RunDeadlines deadlines_;
  RunSaver saver_;
  RunPublisher publisher_;
  RunReporter reporter_;
  PendingDeliveries deliveries_;
  // What the log brings, once their records are applied.
  RuleSetPtr coming_rules_;
  PolicyPtr coming_policy_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_LIVE_RUN_H_
