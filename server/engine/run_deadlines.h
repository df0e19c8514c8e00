// run_deadlines.h: what the clock says of a run: overdue steps, silent ranks, its end.
//
// All of it is on this server's monotonic clock, and none of it is saved.  A deadline
// changes nothing of the run's state by itself: the shard logs what it found, and the
// run changes when that record is applied.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_DEADLINES_H_
#define BELLWETHER_SERVER_ENGINE_RUN_DEADLINES_H_

#include <cstdint>
#include <map>
#include <utility>

#include "server/engine/run_state.h"
#include "server/ingest/message.h"

namespace bellwether::server {

class RunDeadlines {
 public:
  explicit RunDeadlines(int64_t now_ns) : present_ns_(now_ns) {}

  // A message of the rank came in.
  void RecordHeard(uint32_t rank, int64_t now_ns) { heard_ns_[rank] = present_ns_ = now_ns; }
  // A stream or an import of the run is there, though it may send nothing.
  void RecordPresent(int64_t now_ns) { present_ns_ = now_ns; }
  int64_t present_ns() const { return present_ns_; }
  // This server did not run for so long, and heard no rank: no deadline counts it.
  void RecordAway(int64_t away_ns);
  // Ranks left, or the run ended: their silence is not judged any more.
  void RecordEffects(const RunEffects& effects);

  // An open step whose deadline passed; false if none.  Each is found once a deadline.
  bool StepOverdue(const RunState& state, int64_t now_ns, int64_t deadline_ns, StepClosedMessage* overdue);
  // The number of silent ranks changed; false if not.
  bool SilenceChanged(const RunState& state, int64_t now_ns, int64_t silence_ns_min, SilenceMessage* silence);
  // No rank has sent anything for `silent_ns_max` by the log, restarts included.  Nor was
  // any present on this server for as long as a sender needs to come back.
  bool SilentTooLong(const RunState& state, int64_t now_ns, int64_t now_unix_ns, int64_t silent_ns_max,
                     RunSilentMessage* silent) const;
  uint32_t silent_ranks() const { return silent_ranks_; }

 private:
  std::pair<uint32_t, int64_t> open_step_{0, -1};  // attempt, step: the oldest open one.
  int64_t open_since_ns_ = 0;
  std::map<uint32_t, int64_t> heard_ns_;  // rank -> its last message.
  uint32_t silent_ranks_ = 0;
  int64_t present_ns_;  // When somebody was last there, or could first come.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_DEADLINES_H_
