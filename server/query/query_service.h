// query_service.h: the gRPC face of query/.
//
// Unary calls run on a pool of their own: gRPC's threads never wait for the
// store, and a flood of queries can hold up neither ingest nor the streams.
// One thread feeds the streams WatchAlerts and WatchRun.  Imports and exports
// have two of their own, because they may take minutes.  Imports that go on to
// other servers of a cluster have two more.

#ifndef BELLWETHER_SERVER_QUERY_QUERY_SERVICE_H_
#define BELLWETHER_SERVER_QUERY_QUERY_SERVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bellwether/v1/query.grpc.pb.h"
#include "server/query/alert_cursor.h"
#include "server/query/query_engine.h"
#include "server/query/write_stream.h"
#include "server/util/work_pool.h"

namespace bellwether::server {

class StreamPump;

// Counts grpc_server_handled_total and grpc_server_handling_seconds.
// Thread-safe: gRPC calls every method from its own threads.
class QueryService final : public v1::Query::CallbackService {
 public:
  // Refusals count in bellwether_query_limit_refused_total{limit}.
  struct Options {
    int threads = 2;           // for unary calls
    size_t queue_max = 256;    // unary calls that wait
    size_t streams_max = 256;  // WatchAlerts and WatchRun together
    int peer_threads = 8;      // for what other servers of a cluster are asked
    int transfer_threads = 2;  // imports and exports
    size_t transfers_max = 8;  // open at once
    int64_t chunk_bytes_max = 256 << 10;
    int64_t transfer_idle_ms_max = 30'000;  // A peer takes or sends a chunk within this.
    int64_t answer_ms_max = 30'000;         // A caller takes an answer, or what ends a transfer, within this.
    AlertCursor::Options alerts;
    // Finds the caller's identity and rights.  Null: no caller is asked.
    Access* access = nullptr;
  };

  // `engine` must outlive this object, and this object grpc::Server's
  // Shutdown(): calls use it to their end.
  QueryService(const Options& options, const QueryEngine* engine);
  ~QueryService() override;  // As Shutdown(), then waits for running calls.

  // Ends every stream with UNAVAILABLE and refuses new calls so; the unary
  // calls that wait are answered the same.  Returns at once; afterwards
  // grpc::Server::Shutdown() waits for nothing of this service but calls that
  // are in the store.
  void Shutdown();

  // Watches and transfers.
  size_t streams_open() const { return watches_open_ + transfers_open_; }

  // CANCELLED           the caller did not take the answer within answer_ms_max.
  // RESOURCE_EXHAUSTED  queue_max calls wait, or streams_max streams, or
  //                     transfers_max transfers, are open; or the limits on calls of
  //                     other servers (run_router.h).
  // UNAUTHENTICATED     the caller has no valid identity; also of streams, when it
  //                     has lost it.
  // PERMISSION_DENIED   call_access.h.
  // UNAVAILABLE         the server is going down.
  // Else as in query_engine.h.
#define BW_UNARY(name, request, response)                                                                        \
  grpc::ServerUnaryReactor* name(grpc::CallbackServerContext* context, const v1::request* in, v1::response* out) \
      override
  BW_UNARY(ListRuns, ListRunsRequest, ListRunsResponse);
  BW_UNARY(GetRun, GetRunRequest, Run);
  BW_UNARY(GetSeries, GetSeriesRequest, GetSeriesResponse);
  BW_UNARY(GetMatrix, GetMatrixRequest, GetMatrixResponse);
  BW_UNARY(TopHeads, TopHeadsRequest, TopHeadsResponse);
  BW_UNARY(CompareRuns, CompareRunsRequest, CompareRunsResponse);
  BW_UNARY(ListBaselines, ListBaselinesRequest, ListBaselinesResponse);
  BW_UNARY(GetBaseline, GetBaselineRequest, GetBaselineResponse);
  BW_UNARY(ListAlerts, ListAlertsRequest, ListAlertsResponse);
  BW_UNARY(GetAlert, GetAlertRequest, GetAlertResponse);
  BW_UNARY(AcknowledgeAlert, AcknowledgeAlertRequest, Alert);
  BW_UNARY(SilenceAlert, SilenceAlertRequest, Alert);
  BW_UNARY(MarkFalseAlarm, MarkFalseAlarmRequest, Alert);
  BW_UNARY(Annotate, AnnotateRequest, AnnotateResponse);
  BW_UNARY(ListEvents, ListEventsRequest, ListEventsResponse);
  BW_UNARY(ListActions, ListActionsRequest, ListActionsResponse);
  BW_UNARY(ProposeAction, ProposeActionRequest, Action);
  BW_UNARY(ApproveAction, DecideActionRequest, Action);
  BW_UNARY(RejectAction, DecideActionRequest, Action);
  BW_UNARY(UndoAction, DecideActionRequest, Action);
  BW_UNARY(GetPolicy, GetPolicyRequest, Policy);
  BW_UNARY(SetPolicy, SetPolicyRequest, Policy);
  BW_UNARY(DeleteRun, DeleteRunRequest, DeleteRunResponse);
  BW_UNARY(RenameRun, RenameRunRequest, Run);
  BW_UNARY(GetServerInfo, GetServerInfoRequest, ServerInfo);
#undef BW_UNARY

  // After kResync the stream ends with OK: ask again with after_id =
  // resync_from.
  grpc::ServerWriteReactor<v1::WatchAlertsResponse>* WatchAlerts(grpc::CallbackServerContext* context,
                                                                 const v1::WatchAlertsRequest* request) override;
  // Ends with OK once the run has ended and its last state was sent.
  grpc::ServerWriteReactor<v1::WatchRunResponse>* WatchRun(grpc::CallbackServerContext* context,
                                                           const v1::WatchRunRequest* request) override;
  grpc::ServerReadReactor<v1::ImportRunRequest>* ImportRun(grpc::CallbackServerContext* context,
                                                           v1::ImportRunResponse* response) override;
  grpc::ServerWriteReactor<v1::ExportRunResponse>* ExportRun(grpc::CallbackServerContext* context,
                                                             const v1::ExportRunRequest* request) override;

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Unary(const char* method, grpc::CallbackServerContext* context, const Request* in,
                                  Response* out,
                                  absl::StatusOr<Response> (QueryEngine::*call)(const Request&, const CallContext&)
                                      const);
  // The caller, or UNAUTHENTICATED, or UNAVAILABLE.
  absl::StatusOr<GrantPtr> Admit(const grpc::CallbackServerContext& context, const char* method) const;
  // A stream of answers: the rights to open it, how many may be open, and how
  // it begins.  The latter is called where the run is; its error ends the
  // stream.
  template <typename Request, typename Response>
  struct StreamCall {
    const char* method;
    std::atomic<size_t>* open;
    size_t open_max;
    const char* limit;
    bool waits_for_ok;  // As WriteStream's.
    std::function<absl::Status(const std::shared_ptr<WriteStream<Response>>&, const Request&, const GrantPtr&)> begin;
  };
  template <typename Request, typename Response>
  grpc::ServerWriteReactor<Response>* Serve(StreamCall<Request, Response> call, grpc::CallbackServerContext* context,
                                            const Request* request);
  // Here, or at the owner of the run.
  template <typename Request, typename Response>
  absl::Status BeginStream(const StreamCall<Request, Response>& call,
                           const std::shared_ptr<WriteStream<Response>>& stream, Request request,
                           const GrantPtr& grant);
  void Handled(const char* method, grpc::StatusCode code, int64_t start_ns) const;
  // Takes a place among `max`, or returns RESOURCE_EXHAUSTED and takes none.
  grpc::Status Reserve(std::atomic<size_t>* open, size_t max, const char* limit) const;

  const Options options_;
  const QueryEngine* const engine_;
  std::atomic<bool> stopping_ = false;
  std::atomic<size_t> watches_open_ = 0;
  std::atomic<size_t> transfers_open_ = 0;
  WorkPool pool_;
  WorkPool transfer_pool_;
  const std::unique_ptr<WorkPool> peer_pool_, peer_transfer_pool_;  // Null: this server is alone.
  // For other servers' answers, which may come when this service is gone.
  struct Wake {
    absl::Mutex mutex;
    StreamPump* pump ABSL_GUARDED_BY(mutex) = nullptr;
  };
  const std::shared_ptr<Wake> wake_ = std::make_shared<Wake>();
  const std::unique_ptr<StreamPump> stream_pump_;  // First to go: it uses the rest.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_QUERY_SERVICE_H_
