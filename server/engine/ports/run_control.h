// run_control.h: what the readers' side may ask of the engine.
//
// The engine's RunController implements it; query/ and http/ include this port alone.
// Thread-safe; every call returns once its effect is durable.

#ifndef BELLWETHER_SERVER_ENGINE_PORTS_RUN_CONTROL_H_
#define BELLWETHER_SERVER_ENGINE_PORTS_RUN_CONTROL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/action.h"
#include "server/model/run_types.h"
#include "server/store/alert_store.h"

namespace bellwether::server {

// An import in progress; dropping it before Finish() leaves what came so far.
class RunImport {
 public:
  struct Result {
    RunId run = 0;
    uint64_t frames = 0;
    uint64_t events = 0;
  };
  virtual ~RunImport() = default;
  // INVALID_ARGUMENT: not a .bwrun, or damaged; ALREADY_EXISTS: the run is here.
  virtual absl::Status Feed(std::string_view bytes) = 0;
  // Ends when everything is durable and judged.
  virtual absl::StatusOr<Result> Finish() = 0;
};

class RunControl {
 public:
  virtual ~RunControl() = default;

  virtual absl::Status Annotate(RunId run, const RunEvent& event) = 0;
  virtual absl::Status NoteAlert(RunId run, const std::string& key, const Database::AlertNote& note) = 0;
  // As NoteAlert(), and what the note's last false alarm says is followed: nothing more is
  // proposed for the illness, or all is again, and readers are shown the run anew.
  virtual absl::Status SayFalseAlarm(RunId run, const std::string& key, const Database::AlertNote& note) = 0;
  // As RenameRun in query.proto; the caller has looked whether another run has the name.
  virtual absl::Status Rename(RunId run, const std::string& name) = 0;
  // As DeleteRun in query.proto.  UNAVAILABLE: it cannot be deleted now; ask again.
  virtual absl::Status Delete(RunId run) = 0;
  // `notify`: people are told of its alerts.
  virtual std::unique_ptr<RunImport> StartImport(const std::string& as_name, bool notify) = 0;
  // Writes the run as a .bwrun; `sink` returns false to stop.
  virtual absl::Status Export(RunId run, const std::function<bool(std::string_view)>& sink) = 0;

  // The action as it is then.  FAILED_PRECONDITION, PERMISSION_DENIED, NOT_FOUND,
  // INVALID_ARGUMENT: as ActionEngine::OnRequest; refused, and in the audit.
  // `malformed` is not empty: why it cannot be asked; only kept.  UNAVAILABLE:
  // the log failed, and nothing happens.
  virtual absl::StatusOr<Action> Act(RunId run, const ActionRequest& request, const std::string& malformed) = 0;
  struct PolicyView {
    uint8_t mode = 0;  // Numbers as Policy.Mode in query.proto.
    std::string text;
    bool own = false;  // Set for this run; else the server's.
  };
  virtual absl::StatusOr<PolicyView> GetPolicy(RunId run) = 0;
  // `text` empty: back to the server's.  Errors as Act().
  virtual absl::StatusOr<PolicyView> SetPolicy(RunId run, const std::string& text, const std::string& by,
                                               const std::string& malformed) = 0;

  // OK while acknowledged means durable; else why not.
  virtual absl::Status Ready() const = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PORTS_RUN_CONTROL_H_
