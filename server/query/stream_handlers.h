// stream_handlers.h: what the streams of service Query do, one class per method.

#ifndef BELLWETHER_SERVER_QUERY_STREAM_HANDLERS_H_
#define BELLWETHER_SERVER_QUERY_STREAM_HANDLERS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "bellwether/v1/query.grpc.pb.h"
#include "server/query/alert_cursor.h"
#include "server/query/call_deadline.h"
#include "server/query/import_target.h"
#include "server/query/query_engine.h"
#include "server/query/stream_pump.h"
#include "server/query/write_stream.h"
#include "server/util/grpc_status.h"
#include "server/util/work_pool.h"

namespace bellwether::server {

// WatchAlerts.
class AlertStream final : public StreamHandler {
 public:
  using Stream = WriteStream<v1::WatchAlertsResponse>;
  // Of `run`; "" = of all that `grant` sees.  `grant` as in CallContext; the
  // stream ends with it.
  AlertStream(const QueryEngine* engine, std::shared_ptr<Stream> stream, std::unique_ptr<AlertCursor> cursor,
              GrantPtr grant, std::string run)
      : engine_(engine),
        stream_(std::move(stream)),
        cursor_(std::move(cursor)),
        grant_(std::move(grant)),
        run_(std::move(run)) {}
  bool Pump(int64_t now_monotonic_ns) override;
  void End(const grpc::Status& status) override { stream_->End(status); }

 private:
  const QueryEngine* const engine_;
  const std::shared_ptr<Stream> stream_;
  const std::unique_ptr<AlertCursor> cursor_;
  const GrantPtr grant_;
  const std::string run_;
};

// WatchRun.
class RunStream final : public StreamHandler {
 public:
  using Stream = WriteStream<v1::WatchRunResponse>;
  // `request` is Prepare()d; `grant` as above.
  RunStream(const QueryEngine* engine, std::shared_ptr<Stream> stream, v1::WatchRunRequest request, RunId run,
            GrantPtr grant)
      : engine_(engine),
        stream_(std::move(stream)),
        request_(std::move(request)),
        run_(run),
        grant_(std::move(grant)) {}
  bool Pump(int64_t now_monotonic_ns) override;
  void End(const grpc::Status& status) override { stream_->End(status); }

 private:
  const QueryEngine* const engine_;
  const std::shared_ptr<Stream> stream_;
  const v1::WatchRunRequest request_;
  const RunId run_;
  const GrantPtr grant_;
  RunSnapshotPtr sent_;
  int64_t next_ns_ = INT64_MIN;
};

// ExportRun.  Pump only notices the end: a task of the pool writes.
class ExportStream final : public StreamHandler {
 public:
  using Stream = WriteStream<v1::ExportRunResponse>;
  // `grant` as above; `run` by its name.
  ExportStream(std::shared_ptr<Stream> stream, GrantPtr grant, std::string run)
      : stream_(std::move(stream)), grant_(std::move(grant)), run_(std::move(run)) {}
  bool Pump(int64_t) override;
  void End(const grpc::Status& status) override { stream_->End(status); }

 private:
  const std::shared_ptr<Stream> stream_;
  const GrantPtr grant_;
  const std::string run_;
};

// Runs the whole export, waiting for the peer at most `idle_ms_max` a chunk.
void Export(RunControl* control, RunId run, int64_t chunk_bytes_max, int64_t idle_ms_max, ExportStream::Stream* stream);

// ImportRun: reads a chunk, lets a pool feed it, reads the next.
class ImportStream final : public grpc::ServerReadReactor<v1::ImportRunRequest> {
 public:
  struct Options {
    int64_t chunk_bytes_max = 0;
    int64_t idle_ms_max = 0;
    int64_t answer_ms_max = 0;  // The peer takes the answer within this.
    GrantPtr grant;             // As in CallContext.
  };
  // What may have to wait for another server runs on `peer_pool`, null where there is
  // none: two servers that import for each other would else wait for each other's
  // threads.  `on_done` is called last of all.  Everything must outlive the call.
  static std::shared_ptr<ImportStream> Create(const Options& options, const QueryEngine* engine, WorkPool* pool,
                                              WorkPool* peer_pool, grpc::CallbackServerContext* context,
                                              v1::ImportRunResponse* response,
                                              std::function<void(const grpc::Status&)> on_done);
  void Start();
  void End(const grpc::Status& status);
  // Ends the call if the peer is silent for too long, or may not import any more;
  // false: it has ended.
  bool CheckOpen(int64_t now_monotonic_ns);

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  ImportStream(const Options& options, const QueryEngine* engine, WorkPool* pool, WorkPool* peer_pool,
               grpc::CallbackServerContext* context, v1::ImportRunResponse* response,
               std::function<void(const grpc::Status&)> on_done);
  void Feed();
  void Finish();
  absl::Status Allowed(const std::string& name) const;
  absl::Status TakeChunk();
  std::shared_ptr<ImportTarget> Target();
  absl::StatusOr<v1::ImportRunResponse> Complete();

  const Options options_;
  const QueryEngine* const engine_;
  WorkPool* const pool_;
  WorkPool* const peer_pool_;
  v1::ImportRunResponse* const response_;
  const std::function<void(const grpc::Status&)> on_done_;
  std::shared_ptr<ImportStream> self_;  // gRPC's reference.
  v1::ImportRunRequest request_;        // Of the read in flight, or of the task.
  absl::Mutex mutex_;
  std::optional<std::string> name_ ABSL_GUARDED_BY(mutex_);  // As it was asked for; no value: not yet.
  // Used by the pools' tasks, one at a time.
  std::shared_ptr<ImportTarget> target_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
  CallDeadline deadline_;                                         // Set before Finish().
  int64_t reading_since_ns_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;  // INT64_MAX = not reading
};

class ImportHandler final : public StreamHandler {
 public:
  explicit ImportHandler(std::shared_ptr<ImportStream> stream) : stream_(std::move(stream)) {}
  bool Pump(int64_t now_monotonic_ns) override { return stream_->CheckOpen(now_monotonic_ns); }
  void End(const grpc::Status& status) override { stream_->End(status); }

 private:
  const std::shared_ptr<ImportStream> stream_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_STREAM_HANDLERS_H_
