// log_truncator.h: makes the log shorter, once the database has what it holds.
//
// The log is truncated regularly, and when it is too long.  In the second case the runs
// that only its older half still holds are saved for that.
//
// Thread-safe.  Each lane has a mutex of its own, under which its database may be waited
// for.  No thread holds two of them: a lane whose database is silent delays itself alone.

#ifndef BELLWETHER_SERVER_ENGINE_LOG_TRUNCATOR_H_
#define BELLWETHER_SERVER_ENGINE_LOG_TRUNCATOR_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/live_run.h"
#include "server/engine/log_replay.h"
#include "server/engine/shards.h"
#include "server/model/partition.h"

namespace bellwether::server {

// OK if any lane of the log goes on.
absl::Status AnyLaneHealth(LogBackend* log);

class LogTruncator {
 public:
  struct Options {
    int64_t wal_bytes_max = 0;
    int64_t interval_ms = 0;
  };
  // All must outlive it.
  LogTruncator(const Options& options, const LiveRunParts* runs, const Shards* shards, const LogReplay* replay);

  // While a lane's mutex is held its log is not truncated.
  absl::Mutex& lane_mutex(uint32_t lane) { return lane_mutexes_[lane]; }

  // Truncates the log if that is due; call each second.
  void TruncateIfDue();
  // Saves every run and truncates the log as far as that allows.
  void TruncateAll();
  // The same at the end, in two parts: saves every run, ...
  std::vector<Lsn> SaveAll();
  // ... and drops what no run needs, `keep` by lane, once the shards have stopped.
  absl::Status DropBelow(const std::vector<Lsn>& keep);

 private:
  // Saves the runs that need the log below `end`, one lane after the other.
  void Truncate(Lsn end);
  absl::Status TruncateLane(uint32_t lane, Lsn end);
  // Saves the lane's runs that need the log below `end`; it is needed from the result on.
  Lsn SaveLane(uint32_t lane, Lsn end);
  // Makes the database durable and drops the lane below `keep`.
  absl::Status Drop(uint32_t lane, Lsn keep);

  // Constant after construction.
  const Options options_;
  const LiveRunParts& runs_;
  const Shards& shards_;
  const LogReplay& replay_;
  LogBackend* const log_;
  Gauge* const store_bytes_;

  std::atomic<int64_t> truncated_ns_;
  std::array<absl::Mutex, kDatabasesMax> lane_mutexes_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_LOG_TRUNCATOR_H_
