#include "server/engine/run_deletion.h"

#include "server/util/status_macros.h"

namespace bellwether::server {

absl::Status DeleteStored(const LiveRunParts& parts, const RunRecord& run) {
  BW_RETURN_IF_ERROR(parts.database->DeleteRun(run));
  parts.series->Forget(run.id);
  parts.alerts->Forget(run.id);
  return parts.baselines == nullptr ? absl::OkStatus() : parts.baselines->Remove(run.id);
}

}  // namespace bellwether::server
