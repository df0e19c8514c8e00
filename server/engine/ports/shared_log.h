// shared_log.h: a log that several servers share, each the partitions that it owns.
//
// A server appends for the partitions whose lease it holds, with the epoch under
// which it took them: what is committed under an older epoch than the lease's is
// void.  Its LSNs are its own count, which jumps above all of a partition's when it
// takes one.  So they rise per server and per partition, also after another server's.  Its
// lanes are the databases that the cluster is spread over.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_PORTS_SHARED_LOG_H_
#define BELLWETHER_SERVER_ENGINE_PORTS_SHARED_LOG_H_

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/log_backend.h"
#include "server/store/shared_rows.h"

namespace bellwether::server {

class SharedLog : public LogBackend, public SharedRows {
 public:
  // Called from the log's threads when a commit found that `partition` is not
  // ours any more.  Until it returns nothing of what was appended for it, and is
  // not committed, is taken for durable: a wait for an acknowledgement of it
  // must be ended before.
  using LostCallback = std::function<void(uint32_t partition)>;
  virtual void SetLost(LostCallback on_lost) = 0;
  // As LogBackend::DurableCallback, of a lane.
  using LaneDurableCallback = std::function<void(uint32_t lane, Lsn durable)>;

  // From here on appends for the partition's runs are taken, under `epoch`.
  // UNAVAILABLE: the database cannot be asked where its LSNs are.
  virtual absl::Status AcquirePartition(uint32_t partition, uint64_t epoch) = 0;
  // None is taken any more; what waits is dropped, after what is under way.
  virtual void ReleasePartition(uint32_t partition) = 0;

  // ---- of a partition that is owned ----
  // Its rows whose key is in (first, end), by key, some at a time.
  virtual absl::Status ReadRows(uint32_t partition, std::string_view first, std::string_view end,
                                const std::function<absl::Status(const std::vector<SharedRow>& rows)>& visit) const = 0;
  // Its records that may be needed still, in the order of their LSNs.
  virtual absl::Status ReadRecords(uint32_t partition,
                                   const std::function<absl::Status(const WalRecord&)>& visit) const = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PORTS_SHARED_LOG_H_
