// waiting_alerts.h: alerts of runs in a database that does not number them
// (alert_numbers.h), until they have a number.
//
// They are stored with the run, fenced like all that is written for it.  So a stale owner
// makes or changes none, and none is lost while the first database is away.  Then this
// owner numbers them, or the next one does.
//
// Errors as shared_rows.h says.  Pure functions over a link; any thread.

#ifndef BELLWETHER_SERVER_CLUSTER_WAITING_ALERTS_H_
#define BELLWETHER_SERVER_CLUSTER_WAITING_ALERTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cluster/fence.h"
#include "server/cluster/link.h"
#include "server/model/alert_transition.h"

namespace bellwether::server {

struct WaitingAlert {
  uint64_t epoch = 0;
  std::string owner;
  AlertTransition transition;
};

// The same alert again replaces it: a later owner derived its copy from the log.
absl::Status KeepWaitingAlert(const Fence& fence, const std::string& owner, const AlertTransition& transition,
                              SharedPgLink* link);
// Those that the partition's owners before this one kept; some at a time.
absl::StatusOr<std::vector<WaitingAlert>> ListWaitingAlerts(const Fence& fence, SharedPgLink* link);
absl::Status DropWaitingAlert(uint32_t partition, const AlertTransition& transition, SharedPgLink* link);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_WAITING_ALERTS_H_
