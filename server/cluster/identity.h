// identity.h: which database of a cluster each one is.
//
// A run's number says which database has it by its place in the list of them, so
// that a list in another order, or of another length, would look for runs where they
// are not.  Each database has a name, and the names of all in their order: whoever
// starts compares them with the list that it was given.
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
// has not learned yet.  Whoever comes to one of the rest later asks CheckPlace().
absl::StatusOr<std::vector<std::string>> CheckIdentity(const std::vector<std::string>& dsns, int64_t answer_ms);

// Whether the database at the other end is the one of that place; errors as above.
absl::Status CheckPlace(const std::vector<std::string>& names, size_t place, int64_t answer_ms,
                        PgConnection* connection);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_IDENTITY_H_
