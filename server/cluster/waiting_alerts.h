// waiting_alerts.h: alerts of runs in a database that does not number them
// (alert_numbers.h), until they have a number.
//
// They are stored with the run, fenced like all that is written for it, so that
// neither a stale owner nor a first database that is away makes, changes or loses
// one; then they are numbered, by this owner or by the next.
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

// The same again replaces it: whoever comes later concluded it from the log.
absl::Status KeepWaitingAlert(const Fence& fence, const std::string& owner, const AlertTransition& transition,
                              SharedPgLink* link);
// Those that the partition's owners before this one kept; some at a time.
absl::StatusOr<std::vector<WaitingAlert>> ListWaitingAlerts(const Fence& fence, SharedPgLink* link);
absl::Status DropWaitingAlert(uint32_t partition, const AlertTransition& transition, SharedPgLink* link);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_WAITING_ALERTS_H_
