// postgres_rows.h: what an owner keeps of its runs beside the log, in PostgreSQL
// (table run_rows).
//
// The row kWriteNumberKey holds the number (write_numbers.h) of the newest write to the
// partition, with its epoch; a write with a lower one is ABORTED.
//
// Errors as shared_rows.h says.  Pure functions over a link; any thread.

#ifndef BELLWETHER_SERVER_CLUSTER_POSTGRES_ROWS_H_
#define BELLWETHER_SERVER_CLUSTER_POSTGRES_ROWS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cluster/fence.h"
#include "server/cluster/link.h"
#include "server/cluster/write_numbers.h"
#include "server/store/shared_rows.h"

namespace bellwether::server {

// Below the keys of all rows (database.h).
inline constexpr char kWriteNumberKey[] = "!";

// All of them in one transaction; of a key that stands twice the last counts.
absl::Status PutPostgresRows(const Fence& fence, const std::vector<SharedRow>& rows, WriteNumbers* numbers,
                             SharedPgLink* link);
// Those with a key in (first, end), by key, some at a time.
absl::Status ReadPostgresRows(uint32_t partition, std::string_view first, const std::string& end, SharedPgLink* link,
                              const std::function<absl::Status(const std::vector<SharedRow>& rows)>& visit);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_POSTGRES_ROWS_H_
