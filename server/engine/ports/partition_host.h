// partition_host.h: how a server acquires and releases the runs of a partition while it
// works.
//
// The engine's PartitionHandover implements it.  A cluster's member calls it from its
// threads, for one partition (server/model/partition.h) from one thread at a time.  The
// shared log's threads call FencePartition(), too.

#ifndef BELLWETHER_SERVER_ENGINE_PORTS_PARTITION_HOST_H_
#define BELLWETHER_SERVER_ENGINE_PORTS_PARTITION_HOST_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "server/store/log_backend.h"

namespace bellwether::server {

class PartitionHost {
 public:
  virtual ~PartitionHost() = default;
  // Loads what the shared log holds of the partition.  OK: the partition is served.
  // Else nothing of it is here.
  virtual absl::Status AcquirePartition(uint32_t partition, uint64_t epoch) = 0;
  // Loads the series of the time before, which are not needed to serve the partition.
  // CANCELLED: they are not wanted any more.
  virtual absl::Status LoadHistory(uint32_t partition, const std::function<bool()>& is_wanted) = 0;
  // Stops serving the partition: nothing more is acknowledged, and its streams end.
  // Waits for nothing; a second call does nothing.
  virtual void FencePartition(uint32_t partition) = 0;
  // Fences the partition and forgets its runs; `save`: saves them before.  Returns the
  // first of its LSNs that the next owner must read; 0: no more is known than before.
  virtual Lsn ReleasePartition(uint32_t partition, bool save) = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PORTS_PARTITION_HOST_H_
