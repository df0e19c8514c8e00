// write_stream.h: a server-side stream of responses, safe to drive from any
// thread.
//
// One write is in flight at most, Finish() is called exactly once, and both
// only while gRPC still holds the call.  gRPC's own reference ends in OnDone.
// The driver of the stream keeps a shared_ptr as long as it drives.

#ifndef BELLWETHER_SERVER_QUERY_WRITE_STREAM_H_
#define BELLWETHER_SERVER_QUERY_WRITE_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/query/call_deadline.h"
#include "server/util/await_for.h"

namespace bellwether::server {

// Thread-safe.
template <typename Response>
class WriteStream : public grpc::ServerWriteReactor<Response> {
 public:
  struct Options {
    // The last write must be taken within so long after End(), else the call is
    // cancelled.
    int64_t end_ms_max = 30'000;
    // Not if it ended with OK: a reader that rests is notified all the same.
    bool waits_for_ok = false;
  };

  // `on_ready` is called when a write was taken, or the stream is ending;
  // `on_done` last of all.  Both come from gRPC's threads: be quick.
  static std::shared_ptr<WriteStream> Create(grpc::CallbackServerContext* context, const Options& options,
                                             std::function<void()> on_ready,
                                             std::function<void(const grpc::Status&)> on_done) {
    auto stream =
        std::shared_ptr<WriteStream>(new WriteStream(context, options, std::move(on_ready), std::move(on_done)));
    stream->self_ = stream;
    return stream;
  }

  // Whether Send() would be taken now.
  bool ready() const {
    absl::MutexLock lock(&mutex_);
    return !writing_ && !ending_;
  }
  // The call is ending: nothing more will be sent.
  bool ending() const {
    absl::MutexLock lock(&mutex_);
    return ending_;
  }

  // Until the stream is done.
  void Keep(std::shared_ptr<const void> resource) {
    absl::MutexLock lock(&mutex_);
    kept_ = std::move(resource);
  }

  // False, sending nothing, unless ready().
  bool Send(Response response) {
    absl::MutexLock lock(&mutex_);
    if (writing_ || ending_) return false;
    writing_ = true;
    response_ = std::move(response);
    this->StartWrite(&response_);
    return true;
  }

  // Waits until ready(): true; or until the stream ends or the timeout: false.
  bool AwaitReady(absl::Duration timeout) const {
    absl::MutexLock lock(&mutex_);
    const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !writing_ || ending_; };
    return AwaitFor(&mutex_, absl::Condition(&settled), timeout) && !ending_;
  }

  // Ends the call with `status`, after the write in flight.  The first End
  // counts; later ones do nothing.
  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    EndLocked(status);
  }

  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (ending_) {
        this->Finish(status_);
      } else if (!ok) {
        EndLocked(grpc::Status(grpc::StatusCode::CANCELLED, "the caller went away"));
      }
    }
    on_ready_();
  }

  void OnCancel() override {
    End(grpc::Status(grpc::StatusCode::CANCELLED, "the caller went away"));
    on_ready_();
  }

  void OnDone() override {
    deadline_.Done();
    grpc::Status status;
    {
      absl::MutexLock lock(&mutex_);
      ending_ = true;
      status = status_;
    }
    on_done_(status);
    const std::shared_ptr<WriteStream> last = std::move(self_);
  }

 private:
  WriteStream(grpc::CallbackServerContext* context, const Options& options, std::function<void()> on_ready,
              std::function<void(const grpc::Status&)> on_done)
      : options_(options), on_ready_(std::move(on_ready)), on_done_(std::move(on_done)), deadline_(context) {}

  void EndLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ending_) return;
    ending_ = true;
    status_ = status;
    if (!writing_) {
      this->Finish(status_);
    } else if (!status_.ok() || !options_.waits_for_ok) {
      deadline_.Set(options_.end_ms_max);
    }
  }

  const Options options_;
  const std::function<void()> on_ready_;
  const std::function<void(const grpc::Status&)> on_done_;
  std::shared_ptr<WriteStream> self_;  // gRPC's reference.
  mutable absl::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
  CallDeadline deadline_;  // Set before Finish().
  Response response_;      // Of the write in flight.
  std::shared_ptr<const void> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_WRITE_STREAM_H_
