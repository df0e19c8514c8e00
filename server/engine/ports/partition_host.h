// partition_host.h: how a server is given runs, and loses them, while it works.
//
// Implemented by the pipeline.  A cluster's member calls it from its threads, for one
// partition (server/model/partition.h) by one of them at a time.  FencePartition() is
// called from the shared log's threads, too.

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
  // Takes up what the shared log holds of it; serves it when this returns OK, and
  // has nothing of it when it does not.
  virtual absl::Status TakePartition(uint32_t partition, uint64_t epoch) = 0;
  // What can wait until it is served: the series from its earlier server.  CANCELLED: it is not wanted
  // any more.
  virtual absl::Status TakeHistory(uint32_t partition, const std::function<bool()>& is_wanted) = 0;
  // It is not served any more, nothing more is acknowledged, its streams end.
  // Quick, and waits for nothing; again does nothing.
  virtual void FencePartition(uint32_t partition) = 0;
  // Fences it, and forgets its runs, saved before if `save`.  The first LSN of it
  // that the next owner has to read; 0 if that is not known better than before.
  virtual Lsn DropPartition(uint32_t partition, bool save) = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PORTS_PARTITION_HOST_H_
