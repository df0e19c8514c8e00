// fence.h: how a transaction begins that writes for a partition.
//
// It locks the lease's row, so that a takeover waits, or was first.  It fails if the
// lease has another epoch by now (ABORTED, from a division by zero in the database).
// A check without the lock would let a stale owner commit after the takeover.

#ifndef BELLWETHER_SERVER_CLUSTER_FENCE_H_
#define BELLWETHER_SERVER_CLUSTER_FENCE_H_

#include <cstdint>
#include <vector>

#include "server/cluster/connection.h"

namespace bellwether::server {

struct Fence {
  uint32_t partition = 0;
  uint64_t epoch = 0;  // Under which its lease was taken.
};

// To be followed by what is written.
inline std::vector<PgStatement> FencedFlight(const Fence& fence) {
  const auto p = int64_t{fence.partition};
  return {{"SELECT epoch FROM bellwether.lease WHERE p = $1 FOR UPDATE", {p}},
          {"SELECT 1 / count(*) FROM bellwether.lease WHERE p = $1 AND epoch = $2",
           {p, static_cast<int64_t>(fence.epoch)}}};
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_FENCE_H_
