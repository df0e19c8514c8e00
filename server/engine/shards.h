// shards.h: all shards of a server, and the one that owns a run.
//
// Constant after Start(), and thread-safe then.

#ifndef BELLWETHER_SERVER_ENGINE_SHARDS_H_
#define BELLWETHER_SERVER_ENGINE_SHARDS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/live_run.h"
#include "server/engine/ports/ownership.h"
#include "server/engine/shard.h"

namespace bellwether::server {

class Shards {
 public:
  // Starts `count` shards, which wait for the log to be replayed.
  void Start(int count, const Shard::Options& options, const LiveRunParts& parts, const Ownership* ownership);

  size_t size() const { return shards_.size(); }
  size_t IndexOf(RunId run) const { return static_cast<size_t>(run) % shards_.size(); }
  Shard& Of(RunId run) const { return *shards_[IndexOf(run)]; }
  Shard& operator[](size_t index) const { return *shards_[index]; }
  auto begin() const { return shards_.begin(); }
  auto end() const { return shards_.end(); }

  // Gives the run to its shard.
  void Adopt(std::unique_ptr<LiveRun> run) const;
  // Logs `message` and returns once it is durable, applied and shown to readers.  Sets
  // the record's time.  UNAVAILABLE: the log failed, or another server took the run over.
  absl::Status LogAndApply(WalRecord record, IngestMessage message) const;

 private:
  std::vector<std::unique_ptr<Shard>> shards_;
  LogBackend* log_ = nullptr;
  Clock* clock_ = nullptr;
  const Ownership* ownership_ = nullptr;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_SHARDS_H_
