// shared_log.h: a log that several servers share, each the partitions that it owns.
//
// A server appends for the partitions whose lease it holds, under the epoch of its
// lease.  A commit under an older epoch is void.  The LSNs are the server's own count.
// When it acquires a partition, the count jumps above all LSNs of the partition: so LSNs
// rise per server and per partition.  The lanes are the databases of the cluster.
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
  // Called from the log's threads when a commit found that this server lost `partition`.
  // Until the call returns, no uncommitted record of the partition counts as durable: the
  // callee must drop its pending acknowledgements.
  using LostCallback = std::function<void(uint32_t partition)>;
  virtual void SetLost(LostCallback on_lost) = 0;
  // As LogBackend::DurableCallback, of a lane.
  using LaneDurableCallback = std::function<void(uint32_t lane, Lsn durable)>;

  // Accepts appends for the partition's runs from here on, under `epoch`.  UNAVAILABLE:
  // the database cannot be asked for the partition's LSNs.
  virtual absl::Status AcquirePartition(uint32_t partition, uint64_t epoch) = 0;
  // Accepts none any more.  Commits under way end; records that wait are dropped.
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
