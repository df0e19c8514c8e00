// query_engine.h: the answers to Query, without a wire.
//
// Each method takes a request of query.proto and returns its response or a
// status; gRPC (query_service.h) and JSON (json_api.h) are two faces of the
// same calls.  All data comes from the store's readers, which never disturb
// the writing side.
//
// INVALID_ARGUMENT   names the field, its value and the legal range.
// NOT_FOUND          names the run or the alert.
// DEADLINE_EXCEEDED  the call took longer than deadline_ms.
// CANCELLED          the caller went away.
//
// Thread-safe; calls are synchronous and may read from disk.

#ifndef BELLWETHER_SERVER_QUERY_QUERY_ENGINE_H_
#define BELLWETHER_SERVER_QUERY_QUERY_ENGINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bellwether/signal_table.h"
#include "bellwether/v1/query.pb.h"
#include "server/access/access.h"
#include "server/engine/ports/run_control.h"
#include "server/query/query_memory.h"
#include "server/query/server_info.h"
#include "server/store/action_store.h"
#include "server/store/alert_store.h"
#include "server/store/baselines.h"
#include "server/store/database.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

class ComparedRun;
class RunRouter;

// Samples in which every row that takes turns has had its own.
inline constexpr int kRowTurnsMax = 64;

// When to give up on a call.  The engine asks between two reads of the store.
struct CallContext {
  int64_t deadline_monotonic_ns = INT64_MAX;
  std::function<bool()> cancelled;  // Empty = never.
  GrantPtr grant;                   // The caller; null: no caller is asked for an identity.
  // Until the answer has been written; null = it is not counted.
  std::shared_ptr<QueryMemory::Use> memory = nullptr;
  bool as_text = false;  // The answer becomes JSON, which is several times as long.

  // For lists: whether the caller may know of the run.
  bool Sees(const std::string& run) const { return grant == nullptr || grant->Sees(run); }
  // Before it reads: what it may come to; RESOURCE_EXHAUSTED.
  absl::Status Reserve(int64_t bytes) const { return memory == nullptr ? absl::OkStatus() : memory->Reserve(bytes); }
};

// Where the answers come from.  All must outlive the engine.
struct QueryStores {
  RunTable* runs = nullptr;
  SeriesStore* series = nullptr;
  AlertStore* alerts = nullptr;
  Database* database = nullptr;
  Baselines* baselines = nullptr;
  RunControl* control = nullptr;
  Clock* clock = nullptr;
  Counters* counters = nullptr;
  ActionStore* actions = nullptr;
  RunRouter* router = nullptr;  // Null: this server is alone.
  std::function<ServerInfo()> info = [] { return ServerInfo(); };
};

class QueryEngine {
 public:
  // Each refusal counts in bellwether_query_limit_refused_total{limit}.
  struct Options {
    int64_t deadline_ms = 30'000;
    uint32_t series_max = 64;      // per GetSeries
    uint32_t points_max = 10'000;  // per series
    uint32_t points_default = 1'000;
    uint32_t runs_max = 1'000;           // per ListRuns
    uint32_t alerts_max = 1'000;         // per ListAlerts
    uint32_t events_max = 1'000;         // per ListEvents
    uint32_t heads_max = 1'024;          // per TopHeads, CompareRuns
    uint32_t history_max = 256;          // transitions per GetAlert, the newest
    uint32_t alert_series_max = 8;       // evidence series per GetAlert
    int64_t alert_window_steps = 2'000;  // of them before first_step; half after
    uint32_t compare_steps = 64;         // steps at which two runs are compared
    double compare_log2_min = 0.5;       // heads differ beyond this at least
    uint32_t name_bytes_max = 128;       // "by", names
    uint32_t text_bytes_max = 256;       // comments, event texts
    uint32_t silence_seconds_max = 2'592'000;
    uint32_t false_alarms_max = 64;  // marks of one alert, with those that were taken back
    uint32_t watch_signals_max = 8;  // matrices per WatchRun
    uint32_t watch_interval_ms_min = 100;
    uint32_t watch_interval_ms_max = 60'000;
    QueryMemory::Options memory;  // Of all queries together.
  };

  QueryEngine(const Options& options, const QueryStores& stores);
  QueryEngine(const QueryEngine&) = delete;
  QueryEngine& operator=(const QueryEngine&) = delete;

  const Options& options() const { return options_; }
  const QueryStores& stores() const { return stores_; }
  // INVALID_ARGUMENT: a number is out of its range.
  absl::Status CheckRanges(const v1::ListAlertsRequest& request) const;
  // Adds to an open alert, as ListAlerts has it, what waits for it and the advice as of now.  `known`: actions of runs,
  // which are read once each.
  absl::Status ShowActions(const AlertView& alert, const CallContext& context,
                           std::map<RunId, std::vector<Action>>* known, v1::Alert* shown) const;
  // A context whose deadline is deadline_ms from now.
  CallContext NewContext(GrantPtr grant = nullptr) const;
  // A stream's share of the memory of queries, as long as it lives.
  std::shared_ptr<QueryMemory::Use> NewMemory(const Grant* grant) const;
  // What WatchRun's answers take.
  static int64_t WatchBytes(const RunSnapshot& run, const v1::WatchRunRequest& request);

  // ---- runs ----
  absl::StatusOr<v1::ListRunsResponse> ListRuns(const v1::ListRunsRequest&, const CallContext&) const;
  absl::StatusOr<v1::Run> GetRun(const v1::GetRunRequest&, const CallContext&) const;
  absl::StatusOr<v1::DeleteRunResponse> DeleteRun(const v1::DeleteRunRequest&, const CallContext&) const;
  absl::StatusOr<v1::Run> RenameRun(const v1::RenameRunRequest&, const CallContext&) const;
  absl::StatusOr<v1::AnnotateResponse> Annotate(const v1::AnnotateRequest&, const CallContext&) const;
  absl::StatusOr<v1::ListEventsResponse> ListEvents(const v1::ListEventsRequest&, const CallContext&) const;
  absl::StatusOr<v1::ServerInfo> GetServerInfo(const v1::GetServerInfoRequest&, const CallContext&) const;

  // ---- series ----
  absl::StatusOr<v1::GetSeriesResponse> GetSeries(const v1::GetSeriesRequest&, const CallContext&) const;
  absl::StatusOr<v1::GetMatrixResponse> GetMatrix(const v1::GetMatrixRequest&, const CallContext&) const;

  // ---- heads ----
  // Values by size, those that were measured as NaN first: a head that is not
  // a number any more is the worst there is.  peer_score = (value - median) /
  // (1.4826 MAD) over the run's finite heads; 0 where all of them are equal.
  absl::StatusOr<v1::TopHeadsResponse> TopHeads(const v1::TopHeadsRequest&, const CallContext&) const;
  // As compare_runs.h describes; first_step is then made exact.
  absl::StatusOr<v1::CompareRunsResponse> CompareRuns(const v1::CompareRunsRequest&, const CallContext&) const;
  // The same of two runs wherever they are; signal and limit are the request's.
  absl::StatusOr<v1::CompareRunsResponse> Compare(ComparedRun* run, ComparedRun* baseline,
                                                  const v1::CompareRunsRequest& request,
                                                  const CallContext& context) const;
  // A run of this server's, which the caller calls `asked`; errors as
  // FindRun().
  absl::StatusOr<std::unique_ptr<ComparedRun>> OpenCompared(const std::string& run, const std::string& asked,
                                                            const CallContext& context) const;

  // ---- baselines ----
  absl::StatusOr<v1::ListBaselinesResponse> ListBaselines(const v1::ListBaselinesRequest&, const CallContext&) const;
  absl::StatusOr<v1::GetBaselineResponse> GetBaseline(const v1::GetBaselineRequest&, const CallContext&) const;

  // ---- alerts ----
  absl::StatusOr<v1::ListAlertsResponse> ListAlerts(const v1::ListAlertsRequest&, const CallContext&) const;
  absl::StatusOr<v1::GetAlertResponse> GetAlert(const v1::GetAlertRequest&, const CallContext&) const;
  absl::StatusOr<v1::Alert> AcknowledgeAlert(const v1::AcknowledgeAlertRequest&, const CallContext&) const;
  absl::StatusOr<v1::Alert> SilenceAlert(const v1::SilenceAlertRequest&, const CallContext&) const;
  absl::StatusOr<v1::Alert> MarkFalseAlarm(const v1::MarkFalseAlarmRequest&, const CallContext&) const;

  // ---- actions and policies ----
  // What is refused, for whatever reason, stands in the run's audit; only a run
  // that there is not has none.
  absl::StatusOr<v1::ListActionsResponse> ListActions(const v1::ListActionsRequest&, const CallContext&) const;
  absl::StatusOr<v1::Action> ProposeAction(const v1::ProposeActionRequest&, const CallContext&) const;
  absl::StatusOr<v1::Action> ApproveAction(const v1::DecideActionRequest&, const CallContext&) const;
  absl::StatusOr<v1::Action> RejectAction(const v1::DecideActionRequest&, const CallContext&) const;
  absl::StatusOr<v1::Action> UndoAction(const v1::DecideActionRequest&, const CallContext&) const;
  absl::StatusOr<v1::Policy> GetPolicy(const v1::GetPolicyRequest&, const CallContext&) const;
  absl::StatusOr<v1::Policy> SetPolicy(const v1::SetPolicyRequest&, const CallContext&) const;

  // ---- for the faces ----
  // Observes bellwether_query_seconds{method}.
  void CountCall(const char* method, int64_t start_monotonic_ns) const;
  // Checks a WatchRun request and fills in its defaults.
  absl::Status Prepare(v1::WatchRunRequest* request) const;
  // What WatchRun sends for the run as it stands; no disk is read.
  v1::WatchRunResponse Watch(const RunSnapshot& run, const v1::WatchRunRequest& request) const;
  // NOT_FOUND, or INVALID_ARGUMENT if `name` is empty.
  absl::StatusOr<RunSnapshotPtr> FindRun(const std::string& name) const;

 private:
  absl::Status Check(const CallContext& context) const;
  // What is in memory while one series is read.
  static int64_t ReadBytes(const RunSnapshot& run, const SignalInfo& signal, int64_t steps, size_t points);
  // INVALID_ARGUMENT naming field, value and range; counts the refusal.
  absl::Status Range(const char* field, int64_t value, int64_t low, int64_t high) const;
  absl::Status Text(const char* field, const std::string& value, uint32_t bytes_max) const;
  absl::StatusOr<const SignalInfo*> Signal(const char* field, const std::string& name) const;
  // A signal that the run's job has named itself.  INVALID_ARGUMENT, as of Signal(): the run has none.
  absl::StatusOr<const OwnSignal*> Own(const char* field, const std::string& name, const RunRows& rows) const;
  // Its cells as they were last measured at or before `step` (-1: the newest), row-major [layers][heads], and
  // the steps at which they were; `at`: the newest of these, -1 = nothing was measured.
  struct OwnMatrix {
    std::vector<float> values;
    std::vector<int64_t> steps;
    int64_t at = -1;
  };
  absl::StatusOr<OwnMatrix> ReadOwn(const RunSnapshot& run, const OwnSignal& signal, const RunRows& rows, int64_t step,
                                    const CallContext& context) const;
  absl::StatusOr<v1::TopHeadsResponse> TopOwn(const RunSnapshot& run, const v1::TopHeadsRequest& request, size_t limit,
                                              const CallContext& context) const;
  absl::StatusOr<v1::Series> ReadSeries(const RunSnapshot& run, const SeriesKey& key, int64_t begin, int64_t end,
                                        size_t points, int32_t attempt) const;
  absl::StatusOr<v1::Action> Act(const std::string& run, ActionRequest request, std::string malformed) const;
  absl::StatusOr<v1::Action> Decide(ActionRequest::Verb verb, const v1::DecideActionRequest& request) const;
  // Changes the note of an alert, one caller after the other.
  absl::StatusOr<v1::Alert> PutNote(const std::string& run, const std::string& key, const CallContext& context,
                                    const std::function<absl::Status(AlertView* alert)>& change) const;

  const Options options_;
  const QueryStores stores_;
  mutable QueryMemory memory_;
  mutable absl::Mutex notes_mutex_;  // Held from reading a note to its being stored.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_QUERY_ENGINE_H_
