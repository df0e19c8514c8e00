// run_controller.h: what people ask of runs: notes, names, actions, policies, imports, an end.
//
// A request goes through the run's log and returns once it is durable and applied.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_CONTROLLER_H_
#define BELLWETHER_SERVER_ENGINE_RUN_CONTROLLER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/live_run.h"
#include "server/engine/log_replay.h"
#include "server/engine/ports/ownership.h"
#include "server/engine/ports/run_control.h"
#include "server/engine/run_registry.h"
#include "server/engine/shards.h"
#include "server/ingest/decode_limits.h"
#include "server/ingest/ingest_sink.h"

namespace bellwether::server {

class RunController final : public RunControl {
 public:
  // What the controller works with; all must outlive it.
  struct Parts {
    const LiveRunParts* runs = nullptr;
    const Shards* shards = nullptr;
    const Ownership* ownership = nullptr;
    const LogReplay* replay = nullptr;
    RunRegistry* registry = nullptr;
    ImportSink* imports = nullptr;
    DecodeLimits limits;
  };
  explicit RunController(const Parts& parts);

  // Refuses requests that change a run from here on.
  void Close() { closing_ = true; }

  // RunControl
  absl::Status Annotate(RunId run, const RunEvent& event) override;
  absl::Status NoteAlert(RunId run, const std::string& key, const Database::AlertNote& note) override;
  absl::Status SayFalseAlarm(RunId run, const std::string& key, const Database::AlertNote& note) override;
  absl::Status Rename(RunId run, const std::string& name) override;
  absl::Status Delete(RunId run) override;
  std::unique_ptr<RunImport> StartImport(const std::string& as_name, bool notify) override;
  absl::Status Export(RunId run, const std::function<bool(std::string_view)>& sink) override;
  absl::StatusOr<Action> Act(RunId run, const ActionRequest& request, const std::string& malformed) override;
  absl::StatusOr<PolicyView> GetPolicy(RunId run) override;
  absl::StatusOr<PolicyView> SetPolicy(RunId run, const std::string& text, const std::string& by,
                                       const std::string& malformed) override;
  absl::Status Ready() const override;

 private:
  // Deletes a run that has ended, once no session of it can be opened.
  absl::Status DeleteEnded(const RunSnapshot& run);
  // Why a run is not here: UNAVAILABLE or NOT_FOUND.
  absl::Status Unknown(RunId run) const;
  absl::StatusOr<RunSnapshotPtr> Find(RunId run) const;
  // Logs a request, and returns once it is durable and applied.
  absl::Status Request(RunId run, WalKind kind, std::string payload, IngestMessage message);

  // Constant after construction.
  const LiveRunParts& runs_;
  const Shards& shards_;
  const Ownership& ownership_;
  const LogReplay& replay_;
  RunRegistry& registry_;
  ImportSink* const imports_;
  const DecodeLimits limits_;

  std::atomic<bool> closing_ = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_CONTROLLER_H_
