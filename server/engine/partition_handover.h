// partition_handover.h: takes a partition's runs over from the shared log, and gives
// them up to another server.
//
// Only a server of a cluster has one.  Thread-safe as partition_host.h says.

#ifndef BELLWETHER_SERVER_ENGINE_PARTITION_HANDOVER_H_
#define BELLWETHER_SERVER_ENGINE_PARTITION_HANDOVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "server/engine/ingest_coordinator.h"
#include "server/engine/live_run.h"
#include "server/engine/log_truncator.h"
#include "server/engine/ports/ownership.h"
#include "server/engine/ports/partition_host.h"
#include "server/engine/ports/shared_log.h"
#include "server/engine/run_registry.h"
#include "server/engine/shards.h"
#include "server/ingest/decode_limits.h"

namespace bellwether::server {

class PartitionHandover final : public PartitionHost {
 public:
  // What the handover works with; all must outlive it.
  struct Parts {
    const LiveRunParts* runs = nullptr;
    const Shards* shards = nullptr;
    RunRegistry* registry = nullptr;
    Ownership* ownership = nullptr;
    IngestCoordinator* ingest = nullptr;
    LogTruncator* truncator = nullptr;
    SharedLog* log = nullptr;
    DecodeLimits limits;
  };
  explicit PartitionHandover(const Parts& parts);

  // Called after each acquisition, on its thread, with the runs that are served from
  // then on.  Set once, before any acquisition.
  void SetAcquired(std::function<void(RunId first, RunId end)> acquired) { acquired_ = std::move(acquired); }

  // PartitionHost
  absl::Status AcquirePartition(uint32_t partition, uint64_t epoch) override;
  absl::Status LoadHistory(uint32_t partition, const std::function<bool()>& is_wanted) override;
  void FencePartition(uint32_t partition) override;
  Lsn ReleasePartition(uint32_t partition, bool save) override;

 private:
  // The mutex of the partition's lane must be held for these two: what the lane keeps
  // for runs that are half here is in no shard yet.
  absl::Status Recover(uint32_t partition, uint64_t epoch);
  Lsn Forget(uint32_t partition, bool save);
  // Applies a record, unless its run's saved state (`applied`) has it.
  absl::Status ApplyRecord(const WalRecord& record, const std::map<RunId, Lsn>& applied,
                           std::map<RunId, std::unique_ptr<LiveRun>>* live);

  // Constant after construction.
  const LiveRunParts& runs_;
  const Shards& shards_;
  RunRegistry& registry_;
  Ownership* const ownership_;
  IngestCoordinator* const ingest_;
  LogTruncator* const truncator_;
  SharedLog* const log_;
  const DecodeLimits limits_;

  // Constant after SetAcquired().
  std::function<void(RunId first, RunId end)> acquired_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PARTITION_HANDOVER_H_
