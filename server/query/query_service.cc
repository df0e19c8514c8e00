#include "server/query/query_service.h"

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/access/grpc_credentials.h"
#include "server/query/call_access.h"
#include "server/query/proxy_stream.h"
#include "server/query/stream_handlers.h"
#include "server/query/stream_pump.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// A call that was refused before it began.
template <typename Message>
grpc::ServerWriteReactor<Message>* Refused(grpc::CallbackServerContext* context, const grpc::Status& status) {
  const auto stream = WriteStream<Message>::Create(
      context, {}, [] {}, [](const grpc::Status&) {});
  stream->End(status);
  return stream.get();  // gRPC's reference keeps it.
}

// What a call takes beside its answer: gRPC's own of it.
constexpr int64_t kCallBytes = 16 << 10;

// Has the answer's share of the memory of queries until it was sent.
class UnaryReactor final : public grpc::ServerUnaryReactor {
 public:
  explicit UnaryReactor(grpc::CallbackServerContext* context) : deadline_(context) {}
  void Keep(std::shared_ptr<const void> memory) { memory_ = std::move(memory); }
  // The caller has so long to take the answer.
  void Finish(const grpc::Status& status, int64_t answer_ms_max) {
    if (status.ok()) deadline_.Set(answer_ms_max);
    ServerUnaryReactor::Finish(status);
  }
  void OnDone() override {
    deadline_.Done();
    delete this;
  }

 private:
  std::shared_ptr<const void> memory_;
  CallDeadline deadline_;
};

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
      peer_pool_(engine->stores().router == nullptr
                     ? nullptr
                     : std::make_unique<WorkPool>(options.peer_threads, options.queue_max)),
      peer_transfer_pool_(engine->stores().router == nullptr
                              ? nullptr
                              : std::make_unique<WorkPool>(options.transfer_threads, options.transfers_max)),
      stream_pump_(std::make_unique<StreamPump>(engine->stores().clock)) {
  absl::MutexLock lock(&wake_->mutex);
  wake_->pump = stream_pump_.get();
}

QueryService::~QueryService() {
  Shutdown();
  for (WorkPool* const pool : {peer_pool_.get(), peer_transfer_pool_.get()}) {
    if (pool != nullptr) pool->Stop();  // Its tasks use the pump.
  }
  absl::MutexLock lock(&wake_->mutex);
  wake_->pump = nullptr;
}

void QueryService::Shutdown() {
  stopping_ = true;
  stream_pump_->Stop();
}

absl::StatusOr<GrantPtr> QueryService::Admit(const grpc::CallbackServerContext& context, const char* method) const {
  if (stopping_) return absl::UnavailableError(GoingDown().error_message());
  return Identify(options_.access, context, method);
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
  auto* const reactor = new UnaryReactor(context);  // Deletes itself.
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  const auto finish = [this, method, reactor, start_ns](const grpc::Status& status) {
    Handled(method, status.error_code(), start_ns);
    reactor->Finish(status, options_.answer_ms_max);
  };
  absl::StatusOr<GrantPtr> grant = Admit(*context, method);
  if (!grant.ok()) {
    finish(ToGrpc(grant.status()));
    return reactor;
  }
  // Time in the queue counts.
  CallContext limits = engine_->NewContext(*std::move(grant));
  reactor->Keep(limits.memory);
  const auto left = context->deadline() - std::chrono::system_clock::now();
  if (left < std::chrono::milliseconds(engine_->options().deadline_ms)) {
    limits.deadline_monotonic_ns = start_ns + std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  }
  limits.cancelled = [context] { return context->IsCancelled(); };
  // The engine by a capture of its own: GCC 12's UBSan checks the type of a
  // wrong pointer for this->engine_ inside a lambda.
  WorkPool& pool = MayAskOthers(*engine_, limits.grant.get(), *in) ? *peer_pool_ : pool_;
  const bool posted = pool.Post([this, method, start_ns, engine = engine_, in, out, call, limits, finish] {
    if (stopping_) return finish(GoingDown());
    absl::StatusOr<Response> response = CallFor(*engine, method, *in, limits, call);
    engine->CountCall(method, start_ns);
    absl::Status status = response.status();
    if (status.ok()) {
      // It is here once more while it is sent.
      const auto bytes = static_cast<int64_t>(2 * response->ByteSizeLong()) + kCallBytes;
      status = limits.memory->GrowTo(bytes);
      limits.memory->ShrinkTo(bytes);
    }
    if (status.ok()) *out = *std::move(response);
    finish(ToGrpc(status));
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
BW_UNARY(MarkFalseAlarm, MarkFalseAlarmRequest, Alert)
BW_UNARY(Annotate, AnnotateRequest, AnnotateResponse)
BW_UNARY(ListEvents, ListEventsRequest, ListEventsResponse)
BW_UNARY(ListActions, ListActionsRequest, ListActionsResponse)
BW_UNARY(ProposeAction, ProposeActionRequest, Action)
BW_UNARY(ApproveAction, DecideActionRequest, Action)
BW_UNARY(RejectAction, DecideActionRequest, Action)
BW_UNARY(UndoAction, DecideActionRequest, Action)
BW_UNARY(GetPolicy, GetPolicyRequest, Policy)
BW_UNARY(SetPolicy, SetPolicyRequest, Policy)
BW_UNARY(DeleteRun, DeleteRunRequest, DeleteRunResponse)
BW_UNARY(RenameRun, RenameRunRequest, Run)
BW_UNARY(GetServerInfo, GetServerInfoRequest, ServerInfo)
#undef BW_UNARY

template <typename Request, typename Response>
grpc::ServerWriteReactor<Response>* QueryService::Serve(StreamCall<Request, Response> call,
                                                        grpc::CallbackServerContext* context, const Request* request) {
  const absl::StatusOr<GrantPtr> grant = Admit(*context, call.method);
  if (!grant.ok()) return Refused<Response>(context, ToGrpc(grant.status()));
  if (grpc::Status taken = Reserve(call.open, call.open_max, call.limit); !taken.ok()) {
    return Refused<Response>(context, taken);
  }
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  const auto stream = WriteStream<Response>::Create(
      context, {.end_ms_max = options_.answer_ms_max, .waits_for_ok = call.waits_for_ok},
      [pump = stream_pump_.get()] { pump->Wake(); },
      [this, start_ns, open = call.open, method = call.method](const grpc::Status& status) {
        open->fetch_sub(1);
        Handled(method, status.error_code(), start_ns);
      });
  const auto begin = [this, call, stream, request = *request, grant = *grant] {
    const absl::Status begun = BeginStream(call, stream, request, grant);
    if (!begun.ok()) stream->End(ToGrpc(begun));
  };
  if (!MayAskOthers(*engine_, grant->get(), *request)) {
    begin();
  } else if (!peer_pool_->Post(begin)) {
    engine_->stores().counters->counter("bellwether_query_limit_refused_total", {{"limit", "queue"}})->Add();
    stream->End({grpc::StatusCode::RESOURCE_EXHAUSTED, absl::StrCat("queue: ", options_.queue_max, " calls wait")});
  }
  return stream.get();
}

template <typename Request, typename Response>
absl::Status QueryService::BeginStream(const StreamCall<Request, Response>& call,
                                       const std::shared_ptr<WriteStream<Response>>& stream, Request request,
                                       const GrantPtr& grant) {
  if (stopping_) return absl::UnavailableError(GoingDown().error_message());
  const int64_t deadline_ns = engine_->NewContext().deadline_monotonic_ns;
  BW_ASSIGN_OR_RETURN(const CallPlaces places,
                      PlaceCall(*engine_, grant.get(), call.method, request.run(), "", deadline_ns));
  if (places.router != nullptr && !places.run.uuid.empty()) request.set_run(places.run.uuid);
  if (places.router == nullptr || places.run.server.empty()) return call.begin(stream, request, grant);
  stream_pump_->Add(ProxyStream<Response>::Start(&places.router->peers(), places.run.server, call.method,
                                                 request.SerializeAsString(), grant, stream, [wake = wake_] {
                                                   absl::MutexLock lock(&wake->mutex);
                                                   if (wake->pump != nullptr) wake->pump->Wake();
                                                 }));
  return absl::OkStatus();
}

grpc::ServerWriteReactor<v1::WatchAlertsResponse>* QueryService::WatchAlerts(grpc::CallbackServerContext* context,
                                                                             const v1::WatchAlertsRequest* request) {
  const auto begin = [this](const std::shared_ptr<AlertStream::Stream>& stream, const v1::WatchAlertsRequest& asked,
                            const GrantPtr& grant) -> absl::Status {
    AlertCursor::Filter filter;
    if (grant != nullptr) filter.sees = [grant](const std::string& run) { return grant->Sees(run); };
    std::string name;
    if (!asked.run().empty()) {
      BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, engine_->FindRun(asked.run()));
      filter.run = run->record.id;
      name = run->record.description.name;
    }
    if (asked.severity_min() < 0 || asked.severity_min() > static_cast<int>(Severity::kCritical)) {
      return absl::InvalidArgumentError(absl::StrCat("severity_min ", asked.severity_min(), ": must be 0..3"));
    }
    filter.severity_min = static_cast<Severity>(asked.severity_min());
    auto cursor = std::make_unique<AlertCursor>(options_.alerts, engine_->stores().alerts, filter, asked.after_id(),
                                                [pump = stream_pump_.get()] { pump->Wake(); });
    stream_pump_->Add(std::make_shared<AlertStream>(engine_, stream, std::move(cursor), grant, name));
    return absl::OkStatus();
  };
  return Serve<v1::WatchAlertsRequest, v1::WatchAlertsResponse>(
      {"WatchAlerts", &watches_open_, options_.streams_max, "streams", true, begin}, context, request);
}

grpc::ServerWriteReactor<v1::WatchRunResponse>* QueryService::WatchRun(grpc::CallbackServerContext* context,
                                                                       const v1::WatchRunRequest* request) {
  const auto begin = [this](const std::shared_ptr<RunStream::Stream>& stream, const v1::WatchRunRequest& asked,
                            const GrantPtr& grant) -> absl::Status {
    v1::WatchRunRequest prepared = asked;
    BW_RETURN_IF_ERROR(engine_->Prepare(&prepared));
    BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, engine_->FindRun(prepared.run()));
    std::shared_ptr<QueryMemory::Use> memory = engine_->NewMemory(grant.get());
    BW_RETURN_IF_ERROR(memory->GrowTo(QueryEngine::WatchBytes(*run, prepared)));
    stream->Keep(std::move(memory));
    stream_pump_->Add(std::make_shared<RunStream>(engine_, stream, std::move(prepared), run->record.id, grant));
    return absl::OkStatus();
  };
  return Serve<v1::WatchRunRequest, v1::WatchRunResponse>(
      {"WatchRun", &watches_open_, options_.streams_max, "streams", true, begin}, context, request);
}

grpc::ServerWriteReactor<v1::ExportRunResponse>* QueryService::ExportRun(grpc::CallbackServerContext* context,
                                                                         const v1::ExportRunRequest* request) {
  const auto begin = [this](const std::shared_ptr<ExportStream::Stream>& stream, const v1::ExportRunRequest& asked,
                            const GrantPtr& grant) -> absl::Status {
    BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, engine_->FindRun(asked.run()));
    if (grant != nullptr) grant->Note("ExportRun", asked.run(), absl::OkStatus(), true);
    stream_pump_->Add(std::make_shared<ExportStream>(stream, grant, run->record.description.name));
    const bool posted = transfer_pool_.Post([this, stream, id = run->record.id] {
      Export(engine_->stores().control, id, options_.chunk_bytes_max, options_.transfer_idle_ms_max, stream.get());
    });
    return posted ? absl::OkStatus() : absl::UnavailableError(GoingDown().error_message());
  };
  return Serve<v1::ExportRunRequest, v1::ExportRunResponse>(
      {"ExportRun", &transfers_open_, options_.transfers_max, "transfers", false, begin}, context, request);
}

grpc::ServerReadReactor<v1::ImportRunRequest>* QueryService::ImportRun(grpc::CallbackServerContext* context,
                                                                       v1::ImportRunResponse* response) {
  const int64_t start_ns = engine_->stores().clock->MonotonicNanos();
  absl::StatusOr<GrantPtr> grant = Admit(*context, "ImportRun");
  if (grant.ok()) {
    if (const absl::Status allowed = CheckCall(*engine_, grant->get(), "ImportRun", ""); !allowed.ok()) grant = allowed;
  }
  grpc::Status taken = ToGrpc(grant.status());
  bool reserved = false;
  if (taken.ok()) {
    taken = Reserve(&transfers_open_, options_.transfers_max, "transfers");
    reserved = taken.ok();
  }
  const auto stream = ImportStream::Create({.chunk_bytes_max = options_.chunk_bytes_max,
                                            .idle_ms_max = options_.transfer_idle_ms_max,
                                            .answer_ms_max = options_.answer_ms_max,
                                            .grant = grant.ok() ? *grant : nullptr},
                                           engine_, &transfer_pool_, peer_transfer_pool_.get(), context, response,
                                           [this, start_ns, reserved](const grpc::Status& status) {
                                             if (reserved) transfers_open_.fetch_sub(1);
                                             Handled("ImportRun", status.error_code(), start_ns);
                                           });
  if (!taken.ok()) {
    stream->End(taken);
    return stream.get();
  }
  stream->Start();
  stream_pump_->Add(std::make_shared<ImportHandler>(stream));
  return stream.get();
}

}  // namespace bellwether::server
