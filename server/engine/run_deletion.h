// run_deletion.h: deletes what the stores keep of a run.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_DELETION_H_
#define BELLWETHER_SERVER_ENGINE_RUN_DELETION_H_

#include "absl/status/status.h"
#include "server/engine/live_run_parts.h"

namespace bellwether::server {

// Deletes everything of a run that no shard has, but its record (Database::DeleteRun).  Called
// again after an error, and after a crash for each record that says it is deleted.
// Thread-safe.
absl::Status DeleteStored(const LiveRunParts& parts, const RunRecord& run);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_DELETION_H_
