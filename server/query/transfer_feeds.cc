// ImportRun and ExportRun.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/query/convert.h"
#include "server/query/feeds.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

void Export(RunControl* control, RunId run, int64_t chunk_bytes_max, int64_t idle_ms_max, ExportFeed::Stream* stream) {
  const auto chunk_max = static_cast<size_t>(chunk_bytes_max);
  const auto send = [&](std::string_view bytes) {
    for (size_t at = 0; at < bytes.size(); at += chunk_max) {
      if (!stream->AwaitReady(absl::Milliseconds(idle_ms_max))) {
        // Has no effect if it is ending already.
        stream->End({grpc::StatusCode::DEADLINE_EXCEEDED, absl::StrCat("no chunk was taken for ", idle_ms_max, " ms")});
        return false;
      }
      v1::ExportRunResponse response;
      response.set_chunk(std::string(bytes.substr(at, chunk_max)));
      if (!stream->Send(std::move(response))) return false;
    }
    return true;
  };
  stream->End(ToGrpc(control->Export(run, send)));
}

std::shared_ptr<ImportStream> ImportStream::Create(const Options& options, const QueryEngine* engine, WorkPool* pool,
                                                   v1::ImportRunResponse* response,
                                                   std::function<void(const grpc::Status&)> on_done) {
  auto stream = std::shared_ptr<ImportStream>(new ImportStream(options, engine, pool, response, std::move(on_done)));
  stream->self_ = stream;
  return stream;
}

ImportStream::ImportStream(const Options& options, const QueryEngine* engine, WorkPool* pool,
                           v1::ImportRunResponse* response, std::function<void(const grpc::Status&)> on_done)
    : options_(options), engine_(engine), pool_(pool), response_(response), on_done_(std::move(on_done)) {}

void ImportStream::Start() {
  absl::MutexLock lock(&mutex_);
  if (ending_) return;
  reading_since_ns_ = engine_->stores().clock->MonotonicNanos();
  StartRead(&request_);
}

void ImportStream::End(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (ending_) return;
  ending_ = true;
  status_ = status;
  ServerReadReactor::Finish(status);
}

bool ImportStream::CheckIdle(int64_t now_monotonic_ns) {
  bool idle = false;
  {
    absl::MutexLock lock(&mutex_);
    if (ending_) return false;
    idle = reading_since_ns_ != INT64_MAX && now_monotonic_ns - reading_since_ns_ > options_.idle_ms_max * 1'000'000;
  }
  if (idle) {
    End({grpc::StatusCode::DEADLINE_EXCEEDED, absl::StrCat("no chunk came for ", options_.idle_ms_max, " ms")});
  }
  return !idle;
}

void ImportStream::OnReadDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    reading_since_ns_ = INT64_MAX;
    if (ending_) return;
  }
  const std::shared_ptr<ImportStream> self = self_;  // Until the task is done, even if the call ends before.
  const bool posted = pool_->Post([self, ok] { ok ? self->Feed() : self->Finish(); });
  if (!posted) End(GoingDown());
}

void ImportStream::Feed() {
  {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
  }
  const absl::Status status = TakeChunk();
  if (status.ok()) {
    Start();
  } else {
    End(ToGrpc(status));
  }
}

// A recording's own name is known only when it has been read: who may not write
// every run says what it is to be called.
absl::Status ImportStream::Admit() const {
  if (options_.grant == nullptr) return absl::OkStatus();
  const absl::Status admitted =
      name_.empty() ? options_.grant->CheckAll(Role::kWrite) : options_.grant->Check(Role::kWrite, name_);
  if (!admitted.ok()) options_.grant->Note("ImportRun", name_, admitted, true);
  return admitted;
}

absl::Status ImportStream::TakeChunk() {
  const auto bytes = static_cast<int64_t>(request_.chunk().size());
  if (bytes > options_.chunk_bytes_max) {
    engine_->stores().counters->counter("bellwether_query_limit_refused_total", {{"limit", "chunk"}})->Add();
    return absl::InvalidArgumentError(absl::StrCat("chunk: ", bytes, " bytes: at most ", options_.chunk_bytes_max));
  }
  if (import_ == nullptr) {
    // The run's own name is checked where it is recorded.
    if (request_.as_name().size() > engine_->options().name_bytes_max) {
      return absl::InvalidArgumentError(
          absl::StrCat("as_name: ", request_.as_name().size(), " bytes: at most ", engine_->options().name_bytes_max));
    }
    name_ = request_.as_name();
    BW_RETURN_IF_ERROR(Admit());
    import_ = engine_->stores().control->StartImport(name_);
  }
  return import_->Feed(request_.chunk());
}

void ImportStream::Finish() {
  {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
  }
  absl::StatusOr<v1::ImportRunResponse> result = Complete();
  absl::MutexLock lock(&mutex_);
  if (ending_) return;  // response_ is gone.
  ending_ = true;
  if (result.ok()) *response_ = *std::move(result);
  status_ = ToGrpc(result.status());
  ServerReadReactor::Finish(status_);
}

absl::StatusOr<v1::ImportRunResponse> ImportStream::Complete() {
  if (import_ == nullptr) return absl::InvalidArgumentError("chunk: the stream ended before the first one");
  const absl::StatusOr<RunImport::Result> finished = import_->Finish();
  if (options_.grant != nullptr) options_.grant->Note("ImportRun", name_, finished.status(), true);
  BW_ASSIGN_OR_RETURN(const RunImport::Result result, finished);
  v1::ImportRunResponse response;
  response.set_frames(result.frames);
  response.set_events(result.events);
  if (const RunSnapshotPtr run = engine_->stores().runs->Get(result.run)) *response.mutable_run() = ToProto(*run);
  return response;
}

void ImportStream::OnCancel() { End({grpc::StatusCode::CANCELLED, "the caller went away"}); }

void ImportStream::OnDone() {
  grpc::Status status;
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
    status = status_;
  }
  on_done_(status);
  const std::shared_ptr<ImportStream> last = std::move(self_);
}

}  // namespace bellwether::server
