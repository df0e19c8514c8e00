#include "server/engine/run_controller.h"

#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/engine/log_truncator.h"
#include "server/engine/run_deletion.h"
#include "server/engine/run_publisher.h"
#include "server/ingest/log_records.h"
#include "server/ingest/run_import.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

RunController::RunController(const Parts& parts)
    : runs_(*parts.runs),
      shards_(*parts.shards),
      ownership_(*parts.ownership),
      replay_(*parts.replay),
      registry_(*parts.registry),
      imports_(parts.imports),
      limits_(parts.limits) {}

absl::Status RunController::Unknown(RunId run) const {
  // It was here when the caller looked it up, and may have moved since.
  if (!ownership_.Serves(run)) return absl::UnavailableError("another server takes the run over: ask again");
  return absl::NotFoundError("no such run");
}

absl::StatusOr<RunSnapshotPtr> RunController::Find(RunId run) const {
  if (RunSnapshotPtr snapshot = runs_.table->Get(run)) return snapshot;
  return Unknown(run);
}

absl::Status RunController::Annotate(RunId run, const RunEvent& event) {
  BW_RETURN_IF_ERROR(replay_.Await());
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr snapshot, Find(run));
  BW_ASSIGN_OR_RETURN(const uint64_t events, CountEventsOf(*snapshot, *runs_.database));
  // The last place is for the note that no more are kept.
  if (events + 1 >= runs_.events_max) {
    return absl::ResourceExhaustedError(absl::StrCat("events of run ", snapshot->record.description.name, " = ", events,
                                                     ": at most ", runs_.events_max,
                                                     " are kept (limits.events_per_run_max)"));
  }
  WalRecord record;
  record.kind = WalKind::kMessage;
  record.run = run;
  record.attempt = event.attempt;
  record.payload = EncodeEvent(event);
  return shards_.LogAndApply(std::move(record), {0, event});
}

absl::Status RunController::NoteAlert(RunId run, const std::string& key, const Database::AlertNote& note) {
  BW_RETURN_IF_ERROR(runs_.wal->LogOf(run)->health());  // A database that is known to be silent is not waited for.
  return runs_.alerts->Annotate(run, key, note);
}

absl::Status RunController::SayFalseAlarm(RunId run, const std::string& key, const Database::AlertNote& note) {
  FalseAlarmMessage message{note.false_alarms.back()};
  message.said.key = key;
  std::string payload = EncodeFalseAlarm(message);
  // The log first: whoever is told of an error says it again, and then both have it.
  BW_RETURN_IF_ERROR(Request(run, WalKind::kFalseAlarm, std::move(payload), {0, std::move(message)}));
  BW_RETURN_IF_ERROR(NoteAlert(run, key, note));
  shards_.Of(run).PublishAgain(run);
  return absl::OkStatus();
}

absl::Status RunController::Rename(RunId run, const std::string& name) {
  const RenameMessage message{name};
  BW_RETURN_IF_ERROR(Request(run, WalKind::kRename, EncodeRename(message), {0, message}));
  shards_.Of(run).PublishAgain(run);
  return absl::OkStatus();
}

absl::Status RunController::Delete(RunId run) {
  if (closing_) return absl::UnavailableError("the server is draining; come back");
  BW_RETURN_IF_ERROR(replay_.Await());
  BW_RETURN_IF_ERROR(runs_.wal->LogOf(run)->health());  // Its end must be saved before it is deleted.
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr snapshot, Find(run));
  std::shared_ptr<RunEntry> entry;
  {
    absl::MutexLock registry(&registry_.mutex());
    entry = registry_.Find(run);
    if (entry == nullptr) return Unknown(run);
    if (entry->deleting) return absl::UnavailableError("the run is being deleted by another call");
    entry->deleting = true;
  }
  const absl::Status status = DeleteEnded(*snapshot);
  absl::MutexLock registry(&registry_.mutex());
  if (status.ok()) {
    registry_.Forget(*entry);
    registry_.PassOver(run);
  } else {
    entry->deleting = false;
  }
  return status;
}

absl::Status RunController::DeleteEnded(const RunSnapshot& snapshot) {
  const RunId run = snapshot.record.id;
  const std::string& name = snapshot.record.description.name;
  if (!snapshot.record.ended) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run ", name, " has not ended: it is deleted once its job has ended, or has been silent for long"));
  }
  if (runs_.attached != nullptr && runs_.attached(run)) {
    return absl::FailedPreconditionError(absl::StrCat("run ", name, ": a process of it is still connected"));
  }
  Shard& shard = shards_.Of(run);
  // All of it must be saved: what the log still has of the run is then of no use.
  const Lsn needed = shard.Drop(run, run + 1, /*save=*/true);
  const absl::Cleanup expect = [&] { shard.Expect(run, run + 1); };
  if (needed != std::numeric_limits<Lsn>::max()) {
    return absl::UnavailableError(absl::StrCat("run ", name, ": its end could not be saved yet; ask again"));
  }
  BW_ASSIGN_OR_RETURN(const RunRecord record, runs_.database->GetRun(run));
  if (!record.ended) return absl::FailedPreconditionError(absl::StrCat("run ", name, " goes on"));
  runs_.table->Remove(run);  // Nobody begins to read it, or to learn from it.
  if (const absl::Status deleted = DeleteStored(runs_, record); !deleted.ok()) {
    // What is left is deleted by the next call, or the next start.
    RunPublisher::PublishRecord(record, runs_);
    return deleted;
  }
  LogInfo("run {} was deleted", name);
  return absl::OkStatus();
}

std::unique_ptr<RunImport> RunController::StartImport(const std::string& as_name, bool notify) {
  return ImportRecording(imports_, runs_.table, limits_, as_name, notify);
}

absl::Status RunController::Export(RunId run, const std::function<bool(std::string_view)>& sink) {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr snapshot, Find(run));
  EventReader events(snapshot.get(), runs_.database);
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*snapshot, *runs_.database));
  return ExportRecording(snapshot->record, *rows, &events, *runs_.series, sink);
}

absl::Status RunController::Request(RunId run, WalKind kind, std::string payload, IngestMessage message) {
  if (closing_) return absl::UnavailableError("the server is draining; come back");
  BW_RETURN_IF_ERROR(replay_.Await());
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr snapshot, Find(run));
  WalRecord record;
  record.kind = kind;
  record.run = run;
  record.attempt = snapshot->record.description.attempt;
  record.payload = std::move(payload);
  return shards_.LogAndApply(std::move(record), std::move(message));
}

absl::StatusOr<Action> RunController::Act(RunId run, const ActionRequest& request, const std::string& malformed) {
  ActionRequestMessage message{.request = request, .malformed = malformed};
  message.outcome = std::make_shared<ActionOutcome>();
  const std::shared_ptr<ActionOutcome> outcome = message.outcome;
  std::string payload = EncodeActionRequest(message);
  BW_RETURN_IF_ERROR(Request(run, WalKind::kActionRequest, std::move(payload), {0, std::move(message)}));
  BW_RETURN_IF_ERROR(outcome->status);
  return outcome->action;
}

absl::StatusOr<RunControl::PolicyView> RunController::GetPolicy(RunId run) {
  BW_RETURN_IF_ERROR(replay_.Await());  // The log may hold another one.
  absl::StatusOr<PolicyView> view = Unknown(run);
  shards_.Of(run).WithRun(run, [&view](const LiveRun* live) {
    if (live == nullptr) return;
    const RunState& state = live->state();
    view = PolicyView{static_cast<uint8_t>(state.policy()->mode), state.policy()->text, state.policy_is_own()};
  });
  return view;
}

absl::StatusOr<RunControl::PolicyView> RunController::SetPolicy(RunId run, const std::string& text,
                                                                const std::string& by, const std::string& malformed) {
  PolicyMessage message{.own = !text.empty(), .by = by, .malformed = malformed};
  message.text = std::make_shared<const std::string>(text.empty() ? runs_.policy->current()->text : text);
  message.outcome = std::make_shared<ActionOutcome>();
  const std::shared_ptr<ActionOutcome> outcome = message.outcome;
  std::string payload = EncodePolicy(message);
  BW_RETURN_IF_ERROR(Request(run, WalKind::kPolicy, std::move(payload), {0, std::move(message)}));
  BW_RETURN_IF_ERROR(outcome->status);
  return GetPolicy(run);
}

absl::Status RunController::Ready() const {
  if (closing_) return absl::UnavailableError("draining");
  return AnyLaneHealth(runs_.wal);
}

}  // namespace bellwether::server
