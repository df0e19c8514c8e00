// ImportRun and ExportRun.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/query/still_allowed.h"
#include "server/query/stream_handlers.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

void Export(RunControl* control, RunId run, int64_t chunk_bytes_max, int64_t idle_ms_max,
            ExportStream::Stream* stream) {
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

bool ExportStream::Pump(int64_t) { return StillAllowed(grant_.get(), "ExportRun", run_, stream_.get()); }

std::shared_ptr<ImportStream> ImportStream::Create(const Options& options, const QueryEngine* engine, WorkPool* pool,
                                                   WorkPool* peer_pool, grpc::CallbackServerContext* context,
                                                   v1::ImportRunResponse* response,
                                                   std::function<void(const grpc::Status&)> on_done) {
  auto stream = std::shared_ptr<ImportStream>(
      new ImportStream(options, engine, pool, peer_pool, context, response, std::move(on_done)));
  stream->self_ = stream;
  return stream;
}

ImportStream::ImportStream(const Options& options, const QueryEngine* engine, WorkPool* pool, WorkPool* peer_pool,
                           grpc::CallbackServerContext* context, v1::ImportRunResponse* response,
                           std::function<void(const grpc::Status&)> on_done)
    : options_(options),
      engine_(engine),
      pool_(pool),
      peer_pool_(peer_pool),
      response_(response),
      on_done_(std::move(on_done)),
      deadline_(context) {}

void ImportStream::Start() {
  absl::MutexLock lock(&mutex_);
  if (ending_) return;
  reading_since_ns_ = engine_->stores().clock->MonotonicNanos();
  StartRead(&request_);
}

void ImportStream::End(const grpc::Status& status) {
  std::shared_ptr<ImportTarget> target;
  {
    absl::MutexLock lock(&mutex_);
    if (ending_) return;
    ending_ = true;
    status_ = status;
    target = target_;
    ServerReadReactor::Finish(status);
  }
  if (target != nullptr) target->Cancel();
}

bool ImportStream::CheckOpen(int64_t now_monotonic_ns) {
  bool idle = false;
  std::optional<std::string> name;
  {
    absl::MutexLock lock(&mutex_);
    if (ending_) return false;
    name = name_;
    idle = reading_since_ns_ != INT64_MAX && now_monotonic_ns - reading_since_ns_ > options_.idle_ms_max * 1'000'000;
  }
  if (idle) {
    End({grpc::StatusCode::DEADLINE_EXCEEDED, absl::StrCat("no chunk came for ", options_.idle_ms_max, " ms")});
    return false;
  }
  if (options_.grant == nullptr) return true;
  // Before the first chunk nobody knows of which run it is.
  const absl::Status allowed = name.has_value() ? Allowed(*name) : options_.grant->Check(Role::kWrite);
  if (allowed.ok()) return true;
  options_.grant->RecordEnd("ImportRun", Role::kWrite, name.value_or(""), allowed);
  End(ToGrpc(allowed));
  return false;
}

void ImportStream::OnReadDone(bool ok) {
  bool asks_others = peer_pool_ != nullptr && options_.grant != nullptr && !options_.grant->passed_on();
  {
    absl::MutexLock lock(&mutex_);
    reading_since_ns_ = INT64_MAX;
    if (ending_) return;
    if (target_ != nullptr) asks_others = target_->asks_others();
  }
  const std::shared_ptr<ImportStream> self = self_;  // Until the task is done, even if the call ends before.
  WorkPool* const pool = asks_others ? peer_pool_ : pool_;
  const bool posted = pool->Post([self, ok] { ok ? self->Feed() : self->Finish(); });
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
absl::Status ImportStream::Allowed(const std::string& name) const {
  if (options_.grant == nullptr) return absl::OkStatus();
  return name.empty() ? options_.grant->CheckAll(Role::kWrite) : options_.grant->Check(Role::kWrite, name);
}

absl::Status ImportStream::TakeChunk() {
  const auto bytes = static_cast<int64_t>(request_.chunk().size());
  if (bytes > options_.chunk_bytes_max) {
    engine_->stores().counters->counter("bellwether_query_limit_refused_total", {{"limit", "chunk"}})->Add();
    return absl::InvalidArgumentError(absl::StrCat("chunk: ", bytes, " bytes: at most ", options_.chunk_bytes_max));
  }
  std::shared_ptr<ImportTarget> target = Target();
  if (target == nullptr) {
    // The run's own name is checked where it is recorded.
    if (request_.as_name().size() > engine_->options().name_bytes_max) {
      return absl::InvalidArgumentError(
          absl::StrCat("as_name: ", request_.as_name().size(), " bytes: at most ", engine_->options().name_bytes_max));
    }
    const std::string& name = request_.as_name();
    if (const absl::Status admitted = Allowed(name); !admitted.ok()) {
      options_.grant->Note("ImportRun", name, admitted, true);
      return admitted;
    }
    target = OpenImport(*engine_, options_.grant, name, request_.notify());
    absl::MutexLock lock(&mutex_);
    name_ = name;
    target_ = target;
    if (ending_) return absl::CancelledError("the call has ended");
  }
  return target->Feed(request_.chunk());
}

std::shared_ptr<ImportTarget> ImportStream::Target() {
  absl::MutexLock lock(&mutex_);
  return target_;
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
  if (status_.ok()) deadline_.Set(options_.answer_ms_max);
  ServerReadReactor::Finish(status_);
}

absl::StatusOr<v1::ImportRunResponse> ImportStream::Complete() {
  const std::shared_ptr<ImportTarget> target = Target();
  if (target == nullptr) return absl::InvalidArgumentError("chunk: the stream ended before the first one");
  absl::StatusOr<v1::ImportRunResponse> finished = target->Finish();
  std::string name;
  {
    absl::MutexLock lock(&mutex_);
    name = name_.value_or("");
  }
  if (options_.grant != nullptr) options_.grant->Note("ImportRun", name, finished.status(), true);
  return finished;
}

void ImportStream::OnCancel() { End({grpc::StatusCode::CANCELLED, "the caller went away"}); }

void ImportStream::OnDone() {
  deadline_.Done();
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
