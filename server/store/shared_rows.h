// shared_rows.h: the shared store that a database's rows also go to, when
// several servers share what they keep.
//
// A server that shares its runs keeps what it serves now in its own database,
// and each row of it in the shared store.  So the server that takes a run over
// finds its state, its series, its notes and its actions there.  Alerts get
// their ids from the shared store alone: one order for all servers.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_STORE_SHARED_ROWS_H_
#define BELLWETHER_SERVER_STORE_SHARED_ROWS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/alert_transition.h"
#include "server/model/run_types.h"

namespace bellwether::server {

struct SharedRow {
  std::string key;                   // As in database.h; the run's number stands in it.
  std::optional<std::string> value;  // nullopt = the row is deleted.
};

class SharedRows {
 public:
  virtual ~SharedRows() = default;

  // All of them or none, durable when it returns.  ABORTED: another server owns
  // the run by now, and nothing was written.  UNAVAILABLE: the store cannot be
  // reached; whether they were written is not known, and putting them again is right.
  virtual absl::Status PutRows(RunId run, const std::vector<SharedRow>& rows) = 0;
  // As Database::PutTransition; errors as above.
  virtual absl::StatusOr<bool> PutTransition(AlertTransition* transition) = 0;
  // The number of the run's store, if there are several.  An error of one store
  // does not keep a transition out of another.
  virtual uint32_t StoreOf(RunId) const { return 0; }
  // Where ids are given in another store than the run's: keeps the transition with its
  // run until PutTransition() of it, by this owner or the next, gives it one.
  virtual absl::Status KeepTransition(const AlertTransition&) { return absl::OkStatus(); }
  // Of all servers, ids above `after`, rising, at most `limit`.  What has an id
  // below one that was ever listed was listed, too.
  virtual absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t limit) const = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SHARED_ROWS_H_
