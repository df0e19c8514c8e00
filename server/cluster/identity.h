// identity.h: which database of a cluster each one is.
//
// A run's number holds the place of its database in the list of databases.  With a list
// in another order, or of another length, runs would be looked for in wrong databases.
// So each database stores its own name and the names of all, in order.  A server compares
// them with its list when it starts.
//
// Waits for the databases; any thread.

#ifndef BELLWETHER_SERVER_CLUSTER_IDENTITY_H_
#define BELLWETHER_SERVER_CLUSTER_IDENTITY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cluster/connection.h"

namespace bellwether::server {

// The names of all in their order.  New databases learn their places here; nothing is
// written to any while one of them says something else.  FAILED_PRECONDITION: which it
// is then.  UNAVAILABLE: the first cannot be reached, or another whose name the first
// has not learned yet.  The rest are checked by CheckPlace() when they are first used.
absl::StatusOr<std::vector<std::string>> CheckIdentity(const std::vector<std::string>& dsns, int64_t answer_ms);

// Whether the database at the other end is the one of that place; errors as above.
absl::Status CheckPlace(const std::vector<std::string>& names, size_t place, int64_t answer_ms,
                        PgConnection* connection);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_IDENTITY_H_
