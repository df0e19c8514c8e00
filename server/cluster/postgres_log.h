// postgres_log.h: the shared log and rows on one PostgreSQL, of the log's queue
// (commit_queue.h), its tables (frame_tables.h), and rows and alerts
// (postgres_rows.h, postgres_alerts.h).  Partitions are counted as in this database,
// 0 to 63; which of several it is says nothing but a run's number (partition.h).
// Whatever is written for a partition is one transaction in one flight:
//
//   BEGIN
//   SELECT ... FROM lease WHERE p = $p FOR UPDATE     a takeover waits, or was first
//   SELECT 1 / count(*) FROM lease WHERE p = $p AND epoch = $e     an error if stale
//   INSERT ...
//   COMMIT                                            with a warning: no commit
//
// An acknowledgement means: COMMIT has returned with synchronous_commit = on.  Which
// standbys have it then is the database's synchronous_standby_names.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_POSTGRES_LOG_H_
#define BELLWETHER_SERVER_CLUSTER_POSTGRES_LOG_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/cluster/alert_numbers.h"
#include "server/cluster/lsn_count.h"
#include "server/engine/ports/shared_log.h"

namespace bellwether::server {

// The version of deploy/postgres that this server speaks.
inline constexpr int64_t kSharedSchemaVersion = 3;

struct PostgresLogOptions {
  std::string dsn;
  std::string owner;                  // As in the lease table: this process, no other.
  int writers = 4;                    // Connections that commit frames, 1..64.
  int64_t group_bytes_max = 1 << 20;  // Of a commit, before it is compressed.
  int64_t record_bytes_max = (1 << 20) + 1024;
  int64_t pending_bytes_max = 64 << 20;  // Appends are refused beyond.
  int64_t answer_ms_max = 5000;          // A flight without an answer for so long has failed.
  int64_t patience_ms = 1000;            // The database is away: health() says so after that.
  bool may_be_away = false;              // At the start: what must be there is asked when leases are taken.
  // Shared with the logs of the cluster's other databases; null: there is no other.
  std::shared_ptr<LsnCount> lsns;
  // Where alerts are numbered, in another database; null: in this one.
  std::shared_ptr<AlertNumbers> numbers;
};

// UNAVAILABLE: it cannot be reached.  FAILED_PRECONDITION: no libpq, no tables or
// of another version, rights are missing.
absl::StatusOr<std::unique_ptr<SharedLog>> OpenPostgresLog(const PostgresLogOptions& options,
                                                           LogBackend::DurableCallback on_durable);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_POSTGRES_LOG_H_
