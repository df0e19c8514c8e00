// log_replay.h: from what the database and the log hold at the start to shards that
// take new messages.
//
// Load() finds runs, ranks, epochs and seqs: sessions can be opened after it.  A thread
// then applies the log's messages beyond the database, in the log's order, while new
// messages are appended behind them.
//
// Thread-safe after Start().

#ifndef BELLWETHER_SERVER_ENGINE_LOG_REPLAY_H_
#define BELLWETHER_SERVER_ENGINE_LOG_REPLAY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/live_run.h"
#include "server/engine/run_registry.h"
#include "server/engine/shards.h"
#include "server/ingest/decode_limits.h"

namespace bellwether::server {

class LogReplay {
 public:
  struct Options {
    DecodeLimits limits;
    std::string storage_path;  // For messages.
    bool repair = false;       // A log that lost its end is continued.
    // With so few messages left the shards keep new ones in memory.
    size_t left_messages_max = 2048;
  };
  // All must outlive the replay.
  LogReplay(const Options& options, const LiveRunParts* runs, const Shards* shards, RunRegistry* registry);
  ~LogReplay() { Stop(); }
  LogReplay(const LogReplay&) = delete;
  LogReplay& operator=(const LogReplay&) = delete;

  // Loads what is known of runs and ranks.  DATA_LOSS: the log lost its end, or a record
  // is damaged.
  absl::Status Load();
  // Applies the log on a thread of its own.  `then` is called there once all is applied.
  void Start(std::function<void()> then);
  // Waits for the end of Start()'s work, at most so long; returns status().
  absl::Status WaitFor(absl::Duration time) const;
  // Ends the thread; what is not applied is applied at the next start.
  void Stop();

  // All of the log is applied.
  bool done() const { return done_; }
  // Why the log could not be applied; OK while that is not known.
  absl::Status status() const;
  // Waits until the log is applied, as long as a person would.  UNAVAILABLE: not yet.
  absl::Status Await() const;

 private:
  absl::Status LoadRuns();
  // LSNs of whole segments that are missing at the log's end must not be given again.
  absl::Status ContinueAboveSaved(Lsn saved, const std::string& run);
  absl::Status Adopt(const RunRecord& fresh);
  void Apply(Lsn from);
  absl::Status ApplyAll(Lsn from, Lsn* end);
  absl::Status ApplyUntil(Lsn from, Lsn until);
  absl::Status ApplyRecord(const WalRecord& record);

  // Constant after construction.
  const Options options_;
  const LiveRunParts& runs_;
  const Shards& shards_;
  RunRegistry& registry_;
  LogBackend* const log_;
  Gauge* const unapplied_;

  // Constant after Start().
  std::map<RunId, Lsn> applied_lsn_;  // What the database has of each run.
  std::function<void()> then_;
  std::thread thread_;

  std::atomic<bool> stopping_ = false;
  std::atomic<bool> done_ = false;
  // Guarded by mutex_.
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_LOG_REPLAY_H_
