// postgres_alerts.h: the alerts of all servers in their one order, in PostgreSQL.
//
// Numbers are counted in one row, whose lock holds until the commit: they become
// visible in their order, and one whose transaction was void is given again.
//
// Errors as shared_rows.h says.  Pure functions over a link; any thread.

#ifndef BELLWETHER_SERVER_CLUSTER_POSTGRES_ALERTS_H_
#define BELLWETHER_SERVER_CLUSTER_POSTGRES_ALERTS_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cluster/fence.h"
#include "server/cluster/link.h"
#include "server/model/alert_transition.h"

namespace bellwether::server {

// In a transaction that begins with `begin`; `stored` is what it is stored with.  True
// also for one that the same owner stored under the same epoch and was not answered.
absl::StatusOr<bool> PutPostgresTransition(std::vector<PgStatement> begin, const Fence& stored,
                                           const std::string& owner, AlertTransition* transition, SharedPgLink* link);
// Of a run in the same database, fenced.
inline absl::StatusOr<bool> PutPostgresTransition(const Fence& fence, const std::string& owner,
                                                  AlertTransition* transition, SharedPgLink* link) {
  return PutPostgresTransition(FencedFlight(fence), fence, owner, transition, link);
}
// Of all servers, at most `limit` with numbers above `after`; fewer: there are no more.  One
// that cannot be read, a newer server's for instance, is left out, and said once:
// `unreadable` is the highest of those so far.
absl::StatusOr<std::vector<AlertTransition>> ListPostgresTransitions(uint64_t after, size_t limit, SharedPgLink* link,
                                                                     std::atomic<uint64_t>* unreadable);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_POSTGRES_ALERTS_H_
