// partition_ownership.h: which partitions a server of a cluster serves now.
//
// The engine notes each that it has taken up or let go.  Whose the others are the
// members know (members.h).  Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_PARTITION_OWNERSHIP_H_
#define BELLWETHER_SERVER_CLUSTER_PARTITION_OWNERSHIP_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/ports/ownership.h"
#include "server/model/partition.h"

namespace bellwether::server {

class PartitionOwnership final : public Ownership {
 public:
  // Returns the server that serves the partition, "" while that is not known.
  using OwnerAddressOf = std::function<std::string(uint32_t partition)>;
  // `databases`: of the cluster.
  PartitionOwnership(uint32_t databases, OwnerAddressOf owner_address)
      : databases_(databases), owner_address_(std::move(owner_address)) {}

  uint32_t LaneOf(const RunUuid& uuid) const override;
  absl::Status Admit(const RunUuid& uuid, std::string* address) const override;
  bool Serves(RunId run) const override;
  bool HasWhole(RunId run) const override;
  RunId NextRun(const RunUuid& uuid) override;
  void RecordRun(RunId run) override;

  void BeginPartition(uint32_t partition) override;
  void ServePartition(uint32_t partition) override;
  void CompletePartition(uint32_t partition) override;
  void FencePartition(uint32_t partition) override;
  std::string OwnerAddress(uint32_t partition) const override { return owner_address_(partition); }

 private:
  struct Partition {
    bool served = false;
    bool whole = false;
    RunId next_run = 0;
  };

  const uint32_t databases_;
  const OwnerAddressOf owner_address_;  // Called without the mutex.
  mutable absl::Mutex mutex_;
  std::array<Partition, kPartitions * kDatabasesMax> partitions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_PARTITION_OWNERSHIP_H_
