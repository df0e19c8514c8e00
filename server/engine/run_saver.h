// run_saver.h: saves a run's state as of one log record, and knows what the log must keep.
//
// Not thread-safe but for Share(): the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_SAVER_H_
#define BELLWETHER_SERVER_ENGINE_RUN_SAVER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/live_run_parts.h"
#include "server/engine/run_state.h"

namespace bellwether::server {

class RunSaver {
 public:
  // Both must outlive it.
  RunSaver(const LiveRunParts* parts, RunState* state)
      : parts_(*parts), state_(*state), saved_ns_(parts->clock->MonotonicNanos()) {}

  // A message was applied.
  void RecordApplied() { dirty_ = true; }
  // Steps, events or time since the last save make one due.
  bool IsDue(int64_t now_ns) const;

  // Saves everything as of the last applied message, atomically.
  absl::Status Save();
  // The same in three parts, for a store that may wait for a database.  Begin() takes what
  // is to be saved.  Share() waits until other servers have it, on any thread.  End()
  // commits it here.  Messages may be applied meanwhile, unless the run has ended.  One
  // save at a time.
  absl::StatusOr<RunSave> Begin();
  static absl::Status Share(const LiveRunParts& parts, RunId run, RunSave* save);
  absl::Status End(RunSave save, const absl::Status& shared);

  // A save is under way.
  bool saving() const { return saving_; }
  // A save is under way, of a run that has ended.
  bool closing() const { return saving_ && closing_; }
  // The log must keep every LSN from here on for this run; 0 = none.
  Lsn needed_lsn() const;

 private:
  const LiveRunParts& parts_;
  RunState& state_;
  bool dirty_ = false;  // Something was applied that is not saved.
  bool saving_ = false, closing_ = false;
  int64_t saved_ns_;  // Monotonic; the last save's.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_SAVER_H_
