#include "server/query/query_service.h"

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/access/grpc_credentials.h"
#include "server/query/call_access.h"
#include "server/query/feeds.h"
#include "server/query/stream_feeder.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// A call that was refused before it began.
template <typename Message>
grpc::ServerWriteReactor<Message>* Refused(const grpc::Status& status) {
  const auto stream = WriteStream<Message>::Create([] {}, [](const grpc::Status&) {});
  stream->End(status);
  return stream.get();  // gRPC's reference keeps it.
}

const char* CodeName(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {
      "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
      "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
      "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
      "DataLoss", "Unauthenticated"};
  return static_cast<size_t>(code) < std::size(kNames) ? kNames[code] : "Unknown";
}

}  // namespace

QueryService::QueryService(const Options& options, const QueryEngine* engine)
    : options_(options),
      engine_(engine),
      pool_(options.threads, options.queue_max),
      transfer_pool_(options.transfer_threads, options.transfers_max),
      feeder_(std::make_unique<StreamFeeder>(engine->stores().clock)) {}

QueryService::~QueryService() { Shutdown(); }

void QueryService::Shutdown() {
  stopping_ = true;
  feeder_->Stop();
}

absl::StatusOr<GrantPtr> QueryService::Admit(const grpc::CallbackServerContext& context, const char* method) const {
  if (stopping_) return absl::UnavailableError(GoingDown().error_message());
  return Identify(options_.access, context, method);
}

absl::StatusOr<GrantPtr> QueryService::AdmitStream(const grpc::CallbackServerContext& context, const char* method,
                                                   const std::string& run) const {
  BW_ASSIGN_OR_RETURN(GrantPtr grant, Admit(context, method));
  BW_RETURN_IF_ERROR(CheckCall(*engine_, grant.get(), method, {run}));
  return grant;
}

grpc::Status QueryService::Reserve(std::atomic<size_t>* open, size_t max, const char* limit) const {
  if (open->fetch_add(1) < max) return grpc::Status::OK;
  open->fetch_sub(1);
  engine_->stores().counters->counter("bellwether_query_limit_refused_total", {{"limit", limit}})->Add();
  return {grpc::StatusCode::RESOURCE_EXHAUSTED, absl::StrCat(limit, ": ", max, " are open already")};
}

void QueryService::Handled(const char* method, grpc::StatusCode code, int64_t start_ns) const {
  const QueryStores& stores = engine_->stores();
  const std::string_view name = method;
  const char* const type = name == "ImportRun"                                   ? "client_stream"
                           : name == "ExportRun" || name.substr(0, 5) == "Watch" ? "server_stream"
                                                                                 : "unary";
  const Labels labels = {{"grpc_type", type}, {"grpc_service", "bellwether.v1.Query"}, {"grpc_method", method}};
  stores.counters->histogram("grpc_server_handling_seconds", labels)
      ->Observe(static_cast<double>(stores.clock->MonotonicNanos() - start_ns) * 1e-9);
  Labels with_code = labels;
  with_code.emplace_back("grpc_code", CodeName(code));
  stores.counters->counter("grpc_server_handled_total", with_code)->Add();
}

template <typename Request, typename Response>
grpc::ServerUnaryReactor* QueryService::Unary(const char* method, grpc::CallbackServerContext* context,
                                              const Request* in, Response* out,
                                              absl::StatusOr<Response> (QueryEngine::*call)(const Request&,
                                                                                            const CallContext&) const) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  const auto finish = [this, method, reactor, start_ns](const grpc::Status& status) {
    Handled(method, status.error_code(), start_ns);
    reactor->Finish(status);
  };
  absl::StatusOr<GrantPtr> grant = Admit(*context, method);
  if (!grant.ok()) {
    finish(ToGrpc(grant.status()));
    return reactor;
  }
  // Time in the queue counts.
  CallContext limits = engine_->NewContext();
  limits.grant = *std::move(grant);
  const auto left = context->deadline() - std::chrono::system_clock::now();
  if (left < std::chrono::milliseconds(engine_->options().deadline_ms)) {
    limits.deadline_monotonic_ns = start_ns + std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  }
  limits.cancelled = [context] { return context->IsCancelled(); };
  // The engine by a capture of its own: GCC 12's UBSan checks the type of a
  // wrong pointer for this->engine_ inside a lambda.
  const bool posted = pool_.Post([this, method, start_ns, engine = engine_, in, out, call, limits, finish] {
    if (stopping_) return finish(GoingDown());
    absl::StatusOr<Response> response = CallFor(*engine, method, *in, limits, call);
    engine->CountCall(method, start_ns);
    if (response.ok()) *out = *std::move(response);
    finish(ToGrpc(response.status()));
  });
  if (!posted) {
    engine_->stores().counters->counter("bellwether_query_limit_refused_total", {{"limit", "queue"}})->Add();
    finish(
        {grpc::StatusCode::RESOURCE_EXHAUSTED, absl::StrCat("queue: ", options_.queue_max, " queries wait already")});
  }
  return reactor;
}

#define BW_UNARY(name, request, response)                                                                   \
  grpc::ServerUnaryReactor* QueryService::name(grpc::CallbackServerContext* context, const v1::request* in, \
                                               v1::response* out) {                                         \
    return Unary(#name, context, in, out, &QueryEngine::name);                                              \
  }
BW_UNARY(ListRuns, ListRunsRequest, ListRunsResponse)
BW_UNARY(GetRun, GetRunRequest, Run)
BW_UNARY(GetSeries, GetSeriesRequest, GetSeriesResponse)
BW_UNARY(GetMatrix, GetMatrixRequest, GetMatrixResponse)
BW_UNARY(TopHeads, TopHeadsRequest, TopHeadsResponse)
BW_UNARY(CompareRuns, CompareRunsRequest, CompareRunsResponse)
BW_UNARY(ListBaselines, ListBaselinesRequest, ListBaselinesResponse)
BW_UNARY(GetBaseline, GetBaselineRequest, GetBaselineResponse)
BW_UNARY(ListAlerts, ListAlertsRequest, ListAlertsResponse)
BW_UNARY(GetAlert, GetAlertRequest, GetAlertResponse)
BW_UNARY(AcknowledgeAlert, AcknowledgeAlertRequest, Alert)
BW_UNARY(SilenceAlert, SilenceAlertRequest, Alert)
BW_UNARY(Annotate, AnnotateRequest, AnnotateResponse)
BW_UNARY(ListEvents, ListEventsRequest, ListEventsResponse)
BW_UNARY(ListActions, ListActionsRequest, ListActionsResponse)
BW_UNARY(ProposeAction, ProposeActionRequest, Action)
BW_UNARY(ApproveAction, DecideActionRequest, Action)
BW_UNARY(RejectAction, DecideActionRequest, Action)
BW_UNARY(UndoAction, DecideActionRequest, Action)
BW_UNARY(GetPolicy, GetPolicyRequest, Policy)
BW_UNARY(SetPolicy, SetPolicyRequest, Policy)
BW_UNARY(GetServerInfo, GetServerInfoRequest, ServerInfo)
#undef BW_UNARY

grpc::ServerWriteReactor<v1::WatchAlertsResponse>* QueryService::WatchAlerts(grpc::CallbackServerContext* context,
                                                                             const v1::WatchAlertsRequest* request) {
  const absl::StatusOr<GrantPtr> grant = AdmitStream(*context, "WatchAlerts", request->run());
  if (!grant.ok()) return Refused<v1::WatchAlertsResponse>(ToGrpc(grant.status()));
  AlertCursor::Filter filter;
  if (*grant != nullptr) filter.sees = [grant = *grant](const std::string& run) { return grant->Sees(run); };
  if (!request->run().empty()) {
    const absl::StatusOr<RunSnapshotPtr> run = engine_->FindRun(request->run());
    if (!run.ok()) return Refused<v1::WatchAlertsResponse>(ToGrpc(run.status()));
    filter.run = (*run)->record.id;
  }
  if (request->severity_min() < 0 || request->severity_min() > static_cast<int>(Severity::kCritical)) {
    return Refused<v1::WatchAlertsResponse>(
        {grpc::StatusCode::INVALID_ARGUMENT, absl::StrCat("severity_min ", request->severity_min(), ": must be 0..3")});
  }
  filter.severity_min = static_cast<Severity>(request->severity_min());
  if (grpc::Status taken = Reserve(&watches_open_, options_.streams_max, "streams"); !taken.ok()) {
    return Refused<v1::WatchAlertsResponse>(taken);
  }
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  StreamFeeder* const feeder = feeder_.get();
  const auto stream = AlertFeed::Stream::Create([feeder] { feeder->Wake(); },
                                                [this, start_ns](const grpc::Status& status) {
                                                  watches_open_.fetch_sub(1);
                                                  Handled("WatchAlerts", status.error_code(), start_ns);
                                                });
  auto cursor = std::make_unique<AlertCursor>(options_.alerts, engine_->stores().alerts, filter, request->after_id(),
                                              [feeder] { feeder->Wake(); });
  feeder_->Add(std::make_shared<AlertFeed>(engine_, stream, std::move(cursor), *grant));
  return stream.get();
}

grpc::ServerWriteReactor<v1::WatchRunResponse>* QueryService::WatchRun(grpc::CallbackServerContext* context,
                                                                       const v1::WatchRunRequest* request) {
  const absl::StatusOr<GrantPtr> grant = AdmitStream(*context, "WatchRun", request->run());
  if (!grant.ok()) return Refused<v1::WatchRunResponse>(ToGrpc(grant.status()));
  v1::WatchRunRequest prepared = *request;
  if (const absl::Status status = engine_->Prepare(&prepared); !status.ok()) {
    return Refused<v1::WatchRunResponse>(ToGrpc(status));
  }
  const absl::StatusOr<RunSnapshotPtr> run = engine_->FindRun(prepared.run());
  if (!run.ok()) return Refused<v1::WatchRunResponse>(ToGrpc(run.status()));
  if (grpc::Status taken = Reserve(&watches_open_, options_.streams_max, "streams"); !taken.ok()) {
    return Refused<v1::WatchRunResponse>(taken);
  }
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  StreamFeeder* const feeder = feeder_.get();
  const auto stream = RunFeed::Stream::Create([feeder] { feeder->Wake(); },
                                              [this, start_ns](const grpc::Status& status) {
                                                watches_open_.fetch_sub(1);
                                                Handled("WatchRun", status.error_code(), start_ns);
                                              });
  feeder_->Add(std::make_shared<RunFeed>(engine_, stream, std::move(prepared), (*run)->record.id, *grant));
  return stream.get();
}

grpc::ServerWriteReactor<v1::ExportRunResponse>* QueryService::ExportRun(grpc::CallbackServerContext* context,
                                                                         const v1::ExportRunRequest* request) {
  const absl::StatusOr<GrantPtr> grant = AdmitStream(*context, "ExportRun", request->run());
  if (!grant.ok()) return Refused<v1::ExportRunResponse>(ToGrpc(grant.status()));
  const absl::StatusOr<RunSnapshotPtr> run = engine_->FindRun(request->run());
  if (!run.ok()) return Refused<v1::ExportRunResponse>(ToGrpc(run.status()));
  if (grpc::Status taken = Reserve(&transfers_open_, options_.transfers_max, "transfers"); !taken.ok()) {
    return Refused<v1::ExportRunResponse>(taken);
  }
  if (*grant != nullptr) (*grant)->Note("ExportRun", request->run(), absl::OkStatus(), true);
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  const auto stream = ExportFeed::Stream::Create([] {},
                                                 [this, start_ns](const grpc::Status& status) {
                                                   transfers_open_.fetch_sub(1);
                                                   Handled("ExportRun", status.error_code(), start_ns);
                                                 });
  feeder_->Add(std::make_shared<ExportFeed>(stream));
  const bool posted = transfer_pool_.Post([this, stream, id = (*run)->record.id] {
    Export(engine_->stores().control, id, options_.chunk_bytes_max, options_.transfer_idle_ms_max, stream.get());
  });
  if (!posted) stream->End(GoingDown());
  return stream.get();
}

grpc::ServerReadReactor<v1::ImportRunRequest>* QueryService::ImportRun(grpc::CallbackServerContext* context,
                                                                       v1::ImportRunResponse* response) {
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  const absl::StatusOr<GrantPtr> grant = AdmitStream(*context, "ImportRun", "");
  grpc::Status taken = ToGrpc(grant.status());
  bool reserved = false;
  if (taken.ok()) {
    taken = Reserve(&transfers_open_, options_.transfers_max, "transfers");
    reserved = taken.ok();
  }
  const auto stream =
      ImportStream::Create({.chunk_bytes_max = options_.chunk_bytes_max,
                            .idle_ms_max = options_.transfer_idle_ms_max,
                            .grant = grant.ok() ? *grant : nullptr},
                           engine_, &transfer_pool_, response, [this, start_ns, reserved](const grpc::Status& status) {
                             if (reserved) transfers_open_.fetch_sub(1);
                             Handled("ImportRun", status.error_code(), start_ns);
                           });
  if (!taken.ok()) {
    stream->End(taken);
    return stream.get();
  }
  stream->Start();
  feeder_->Add(std::make_shared<ImportFeed>(stream));
  return stream.get();
}

}  // namespace bellwether::server
