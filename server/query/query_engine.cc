// The checks that all calls share, and the calls about runs and the server.
#include "server/query/query_engine.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/ingest/decode.h"
#include "server/model/ranges.h"
#include "server/query/convert.h"
#include "server/query/run_router.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

QueryEngine::QueryEngine(const Options& options, const QueryStores& stores)
    : options_(options), stores_(stores), memory_(options.memory, stores.counters) {}

CallContext QueryEngine::NewContext(GrantPtr grant) const {
  CallContext context{.deadline_monotonic_ns = stores_.clock->MonotonicNanos() + options_.deadline_ms * 1'000'000};
  context.memory = NewMemory(grant.get());
  context.grant = std::move(grant);
  return context;
}

std::shared_ptr<QueryMemory::Use> QueryEngine::NewMemory(const Grant* grant) const {
  return std::make_shared<QueryMemory::Use>(&memory_, grant == nullptr ? "" : grant->who());
}

void QueryEngine::CountCall(const char* method, int64_t start_monotonic_ns) const {
  stores_.counters->histogram("bellwether_query_seconds", {{"method", method}})
      ->Observe(static_cast<double>(stores_.clock->MonotonicNanos() - start_monotonic_ns) * 1e-9);
}

absl::Status QueryEngine::Check(const CallContext& context) const {
  if (context.cancelled && context.cancelled()) return absl::CancelledError("the caller went away");
  if (stores_.clock->MonotonicNanos() >= context.deadline_monotonic_ns) {
    return absl::DeadlineExceededError(
        absl::StrCat("the query took too long (limit ", options_.deadline_ms, " ms): ask for less"));
  }
  return absl::OkStatus();
}

absl::Status QueryEngine::Range(const char* field, int64_t value, int64_t low, int64_t high) const {
  if (value >= low && value <= high) return absl::OkStatus();
  stores_.counters->counter("bellwether_query_limit_refused_total", {{"limit", field}})->Add();
  return absl::InvalidArgumentError(absl::StrCat(field, " ", value, ": must be ", low, "..", high));
}

absl::Status QueryEngine::Text(const char* field, const std::string& value, uint32_t bytes_max) const {
  if (value.size() > bytes_max) {
    stores_.counters->counter("bellwether_query_limit_refused_total", {{"limit", field}})->Add();
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", value.size(), " bytes: at most ", bytes_max));
  }
  const bool control = std::any_of(value.begin(), value.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f;
  });
  if (control) return absl::InvalidArgumentError(absl::StrCat(field, ": must not hold control characters"));
  return absl::OkStatus();
}

absl::StatusOr<const SignalInfo*> QueryEngine::Signal(const char* field, const std::string& name) const {
  if (const SignalInfo* const signal = FindSignal(std::string_view(name))) return signal;
  return absl::InvalidArgumentError(absl::StrCat(field, " \"", name.substr(0, 64),
                                                 "\": must be a name of the signal catalogue, such as drift_ratio"));
}

absl::StatusOr<const OwnSignal*> QueryEngine::Own(const char* field, const std::string& name,
                                                  const RunRows& rows) const {
  if (const OwnSignal* const own = rows.FindOwn(name)) return own;
  return absl::InvalidArgumentError(absl::StrCat(field, " \"", name.substr(0, 64),
                                                 "\": must be a name of the signal catalogue, such as drift_ratio, or "
                                                 "a signal of the run's own"));
}

absl::StatusOr<RunSnapshotPtr> QueryEngine::FindRun(const std::string& name) const {
  if (name.empty()) return absl::InvalidArgumentError("run \"\": must be a run's name or its uuid in hexadecimal");
  if (RunSnapshotPtr run = stores_.runs->Find(name)) return run;
  if (stores_.router != nullptr) return stores_.router->Absent(name);
  return absl::NotFoundError(absl::StrCat("run \"", name.substr(0, 128), "\": no run has this name or uuid"));
}

absl::StatusOr<v1::ListRunsResponse> QueryEngine::ListRuns(const v1::ListRunsRequest& request,
                                                           const CallContext& context) const {
  BW_RETURN_IF_ERROR(Range("limit", request.limit(), 0, options_.runs_max));
  const size_t limit = request.limit() == 0 ? 100 : request.limit();
  std::vector<RunSnapshotPtr> runs = stores_.runs->List();
  std::erase_if(runs, [&request, &context](const RunSnapshotPtr& run) {
    return (request.live_only() && run->record.ended) || !context.Sees(run->record.description.name) ||
           run->record.description.name.find(request.name_contains()) == std::string::npos;
  });
  for (RunSnapshotPtr& run : runs) run = stores_.alerts->WithoutMuted(std::move(run));
  std::stable_sort(runs.begin(), runs.end(), [](const RunSnapshotPtr& a, const RunSnapshotPtr& b) {
    if (a->record.ended != b->record.ended) return b->record.ended;
    if (a->record.stage != b->record.stage) return a->record.stage > b->record.stage;
    return a->record.last_report_unix_ns > b->record.last_report_unix_ns;
  });
  v1::ListRunsResponse response;
  response.set_total(static_cast<uint32_t>(runs.size()));
  for (size_t i = 0; i < std::min(limit, runs.size()); ++i) *response.add_runs() = ToProto(*runs[i]);
  return response;
}

absl::StatusOr<v1::Run> QueryEngine::GetRun(const v1::GetRunRequest& request, const CallContext&) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  v1::Run proto = ToProto(*stores_.alerts->WithoutMuted(run));
  if (run->rows == nullptr && run->record.description.layout.own > 0) {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*run, *stores_.database));
    AddOwnSignals(*rows, &proto);
  }
  return proto;
}

absl::StatusOr<v1::DeleteRunResponse> QueryEngine::DeleteRun(const v1::DeleteRunRequest& request,
                                                             const CallContext&) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_RETURN_IF_ERROR(stores_.control->Delete(run->record.id));
  const RunDescription& gone = run->record.description;
  v1::DeleteRunResponse response;
  response.set_name(gone.name);
  response.set_uuid(std::string(gone.uuid.begin(), gone.uuid.end()));
  return response;
}

absl::StatusOr<v1::Run> QueryEngine::RenameRun(const v1::RenameRunRequest& request, const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  const std::string& name = request.name();
  if (!IsRunName(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("name (", name.size(), " bytes): must match [a-zA-Z0-9_.:/-]{1,128}"));
  }
  // A run is asked for by either.
  if (name.size() == 32 && std::all_of(name.begin(), name.end(), absl::ascii_isxdigit)) {
    return absl::InvalidArgumentError(absl::StrCat("name \"", name, "\": must not look like a uuid"));
  }
  if (context.grant != nullptr && !context.grant->Covers(name)) return context.grant->Refuse(Role::kAct, name);
  if (const RunSnapshotPtr other = stores_.runs->Find(name); other != nullptr && other->record.id != run->record.id) {
    return absl::AlreadyExistsError(absl::StrCat("name \"", name, "\": another run has it"));
  }
  BW_RETURN_IF_ERROR(stores_.control->Rename(run->record.id, name));
  v1::GetRunRequest again;
  again.set_run(
      absl::BytesToHexString(std::string(run->record.description.uuid.begin(), run->record.description.uuid.end())));
  return GetRun(again, context);
}

absl::StatusOr<v1::AnnotateResponse> QueryEngine::Annotate(const v1::AnnotateRequest& request,
                                                           const CallContext&) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  RunEvent event = FromProto(request.event());
  BW_RETURN_IF_ERROR(Range("event.kind", request.event().kind(), 0, static_cast<int64_t>(EventKind::kAnnotation)));
  BW_RETURN_IF_ERROR(Range("event.step", event.step, 0, kStepMax));
  BW_RETURN_IF_ERROR(Range("event.attempt", event.attempt, 0, run->record.description.attempt));
  BW_RETURN_IF_ERROR(Text("event.text", event.text, options_.text_bytes_max));
  if (event.kind == EventKind::kNone) event.kind = EventKind::kAnnotation;
  if (event.kind == EventKind::kAnnotation && event.text.empty()) {
    return absl::InvalidArgumentError("event.text \"\": an annotation needs words");
  }
  if (event.time_unix_ns == 0) event.time_unix_ns = stores_.clock->UnixNanos();
  BW_RETURN_IF_ERROR(stores_.control->Annotate(run->record.id, event));
  return v1::AnnotateResponse();
}

absl::StatusOr<v1::ListEventsResponse> QueryEngine::ListEvents(const v1::ListEventsRequest& request,
                                                               const CallContext&) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_RETURN_IF_ERROR(Range("limit", request.limit(), 0, options_.events_max));
  BW_ASSIGN_OR_RETURN(const uint64_t total, CountEventsOf(*run, *stores_.database));
  const size_t limit = request.limit() == 0 ? options_.events_max : request.limit();
  BW_ASSIGN_OR_RETURN(const std::vector<RunEvent> events, EventsOf(*run, *stores_.database, request.after(), limit));
  v1::ListEventsResponse response;
  for (const RunEvent& event : events) *response.add_events() = ToProto(event);
  response.set_total(total);
  const uint64_t next = request.after() + events.size();
  if (!events.empty() && next < total) response.set_next_after(next);
  return response;
}

absl::StatusOr<v1::ServerInfo> QueryEngine::GetServerInfo(const v1::GetServerInfoRequest&,
                                                          const CallContext& context) const {
  v1::ServerInfo info = ToProto(stores_.info());
  v1::Caller& caller = *info.mutable_caller();
  caller.set_name(context.grant != nullptr ? context.grant->who() : "");
  caller.set_may_act(context.grant == nullptr || context.grant->May(Role::kAct));
  caller.set_may_admin(context.grant == nullptr || context.grant->May(Role::kAdmin));
  if (context.grant != nullptr && !context.grant->SeesAll()) {
    // Of others' runs, and of the machine.
    info.clear_options();
    info.clear_counters();
    info.clear_storage_path();
  }
  if (stores_.router != nullptr) {
    for (const auto& [number, epoch] : stores_.router->peers().holdings()) {
      v1::HeldPartition& held = *info.add_partitions();
      held.set_number(number);
      held.set_epoch(epoch);
    }
  }
  auto& limits = *info.mutable_limits();
  limits["query_deadline_ms"] = static_cast<double>(options_.deadline_ms);
  limits["query_series"] = options_.series_max;
  limits["query_points_per_series"] = options_.points_max;
  limits["query_runs"] = options_.runs_max;
  limits["query_alerts"] = options_.alerts_max;
  limits["query_memory_bytes"] = static_cast<double>(options_.memory.bytes_max);
  limits["query_events"] = options_.events_max;
  limits["query_heads"] = options_.heads_max;
  return info;
}

}  // namespace bellwether::server
