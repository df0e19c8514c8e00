// run_reporter.h: stores what a run's messages concluded, alerts and actions, once
// their cause is durable.
//
// Alerts go out even where the log failed.  Actions wait for the log and the database,
// in order; the log is needed as long as they do.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_REPORTER_H_
#define BELLWETHER_SERVER_ENGINE_RUN_REPORTER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/action_outbox.h"
#include "server/engine/live_run_parts.h"
#include "server/engine/run_state.h"

namespace bellwether::server {

class RunReporter {
 public:
  // Both must outlive it.
  RunReporter(const LiveRunParts* parts, const RunState* state)
      : parts_(*parts), state_(*state), alert_seconds_(parts->counters->histogram("bellwether_alert_seconds")) {}

  // Stores the effects of the last applied message.  `arrived_ns` (monotonic) is when it
  // came in; 0 in recovery.
  void Store(RunEffects effects, int64_t arrived_ns);
  // Stores actions that could not be stored before; does not wait for the log.
  void StoreWaiting(int64_t now_ns);
  // Actions wait to be stored.
  bool actions_wait() const { return !outbox_.empty(); }
  // Actions or alerts wait to be stored.
  bool waits() const { return actions_wait() || parts_.alerts->Waits(state_.record().id); }

 private:
  void StoreActions(const RunEffects& effects);
  void StoreAlerts(RunEffects* effects, int64_t arrived_ns);
  absl::Status StoreOutbox(const absl::Status& durable);

  const LiveRunParts& parts_;
  const RunState& state_;
  Histogram* const alert_seconds_;
  ActionOutbox outbox_;          // Actions and audit entries, until they are stored.
  bool actions_failed_ = false;  // The last try to store them failed.
  int64_t next_try_ns_ = 0;      // Monotonic.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_REPORTER_H_
