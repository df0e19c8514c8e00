// retention_state.h: what the retention knows of a run, row x of the database.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_STORE_RETENTION_STATE_H_
#define BELLWETHER_SERVER_STORE_RETENTION_STATE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// A place in a run's history; later attempts are greater.
using HistoryPoint = std::pair<uint32_t, int64_t>;  // attempt, step

// Row x.
struct RetentionState {
  struct Mark {
    int64_t time_unix_ns = 0;
    HistoryPoint newest;  // What was stored by then.
  };
  std::vector<Mark> marks;  // Oldest first.
  // Everything up to and with these is done; (0, INT64_MIN) = nothing yet.
  HistoryPoint rounded{0, INT64_MIN}, summarized{0, INT64_MIN}, dropped{0, INT64_MIN};
  // It was looked at from its beginning since it ended: a run that was silent for long
  // stores its last steps then, which are as old as what was done already.
  bool whole = false;
};
std::string EncodeRetentionState(const RetentionState& state);
absl::StatusOr<RetentionState> DecodeRetentionState(std::string_view bytes);  // DATA_LOSS
std::string RetentionKey(RunId run);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_RETENTION_STATE_H_
