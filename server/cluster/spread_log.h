// spread_log.h: the shared log over the databases of a cluster.
//
// Each database is a lane of its own (log_backend.h), with its own leases, commits
// and rows: one that is away holds its runs, and no others.  Two things are the first
// database's alone: the numbers of alerts (alert_numbers.h), and the key by which
// servers know each other (members.h).
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_SPREAD_LOG_H_
#define BELLWETHER_SERVER_CLUSTER_SPREAD_LOG_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cluster/postgres_log.h"
#include "server/engine/ports/shared_log.h"

namespace bellwether::server {

// `dsns`: 1 to kDatabasesMax, in the order that never changes; that of `options` is
// not used.  Errors as of OpenPostgresLog() and CheckIdentity().
absl::StatusOr<std::unique_ptr<SharedLog>> OpenSpreadLog(const std::vector<std::string>& dsns,
                                                         const PostgresLogOptions& options,
                                                         SharedLog::LaneDurableCallback on_durable);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_SPREAD_LOG_H_
