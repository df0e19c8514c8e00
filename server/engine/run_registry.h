// run_registry.h: the runs that this server knows, and the newest session of each rank.
//
// Thread-safe: the maps are guarded by mutex().  What a RunEntry holds of its ranks is
// guarded by the mutex of the run's shard, which is taken after mutex().

#ifndef BELLWETHER_SERVER_ENGINE_RUN_REGISTRY_H_
#define BELLWETHER_SERVER_ENGINE_RUN_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/live_run.h"
#include "server/engine/ports/ownership.h"
#include "server/ingest/decode_limits.h"
#include "server/ingest/launches.h"
#include "server/model/row_names.h"

namespace bellwether::server {

class RankSession;

// One rank of a run; guarded by the mutex of the run's shard.
struct RankSlot {
  uint64_t epoch = 0;
  uint64_t last_seq = 0;
  std::weak_ptr<RankSession> session;
  std::vector<Head> deeper;  // The heads that the session was asked to look deeper at.
  uint32_t attempt = 0;      // The newest attempt of the rank's Hellos.
};

// What the names of a run's rows came to; guarded by the mutex of the run's shard.
struct NamesTaken {
  RunRows given;                          // Admitted, and not yet in the run's snapshot,
  Layout until;                           // which has so many rows when it has all of them.
  std::shared_ptr<const RunRows> stored;  // What the database has, while the snapshot does not say.
  // Left out, of the run since this server knows it; and of how many messages the run's events tell.
  uint64_t refused = 0, refused_messages = 0, told_messages = 0;
};

// Sessions hold their entry, too: a run may be forgotten while its streams end.
struct RunEntry {
  // Constant after construction.
  RunId id = 0;
  RunDescription description;
  // Guarded by the registry's mutex.
  Launches launches;
  bool deleting = false;  // No session of it is opened.
  // A new run, until its first Hello is in the log.  Until then no reader sees the run
  // and no record of it is logged: recovery learns from that Hello what the run is.
  std::unique_ptr<LiveRun> unlogged;
  // Guarded by the mutex of the run's shard.
  std::map<uint32_t, std::unique_ptr<RankSlot>> ranks;
  NamesTaken names;
};

class RunRegistry {
 public:
  RunRegistry(const LiveRunParts& parts, const DecodeLimits& limits, Ownership* ownership)
      : parts_(parts), limits_(limits), ownership_(ownership) {}
  RunRegistry(const RunRegistry&) = delete;
  RunRegistry& operator=(const RunRegistry&) = delete;

  absl::Mutex& mutex() ABSL_LOCK_RETURNED(mutex_) { return mutex_; }

  // nullptr: no such run.
  std::shared_ptr<RunEntry> Find(const RunUuid& uuid) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<RunEntry> Find(RunId run) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The runs in [first, end), in order.
  std::vector<std::shared_ptr<RunEntry>> List(RunId first, RunId end) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds a run without ranks.
  std::shared_ptr<RunEntry> Add(const RunRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const RunEntry& run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // What the log still holds of a deleted run is passed over from here on.
  void PassOver(RunId deleted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds a stored run with its ranks, and shows readers its record.
  absl::Status Load(const RunRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes the epoch, seq and attempt of a log record.  `adopt` gets the record of a run
  // that this Hello introduces; it is called under mutex().  DATA_LOSS: the run is
  // unknown, or `adopt` failed.
  absl::Status LoadRank(const WalRecord& record, const std::function<absl::Status(const RunRecord& fresh)>& adopt)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Constant after construction.
  const LiveRunParts& parts_;
  const DecodeLimits limits_;
  Ownership* const ownership_;

  // Guarded by mutex_.
  mutable absl::Mutex mutex_;
  std::map<RunUuid, std::shared_ptr<RunEntry>> by_uuid_ ABSL_GUARDED_BY(mutex_);
  std::map<RunId, std::shared_ptr<RunEntry>> by_id_ ABSL_GUARDED_BY(mutex_);
  std::set<RunId> deleted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_REGISTRY_H_
