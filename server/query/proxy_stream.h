// proxy_stream.h: a stream that another server of the cluster answers.
//
// One message is on its way at most: the next is asked for once the caller has
// taken the last one, so that a slow caller holds up the owner's stream, not memory.

#ifndef BELLWETHER_SERVER_QUERY_PROXY_STREAM_H_
#define BELLWETHER_SERVER_QUERY_PROXY_STREAM_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/query/ports/peers.h"
#include "server/query/query_engine.h"
#include "server/query/still_allowed.h"
#include "server/query/stream_pump.h"
#include "server/query/write_stream.h"
#include "server/util/grpc_status.h"

namespace bellwether::server {

template <typename Response>
class ProxyStream final : public StreamHandler {
 public:
  using Stream = WriteStream<Response>;
  // `wake` is called when Pump() has something to do; it may come after the stream
  // has ended.
  static std::shared_ptr<ProxyStream> Start(Peers* peers, const std::string& server, const char* method,
                                            const std::string& request, GrantPtr grant, std::shared_ptr<Stream> stream,
                                            std::function<void()> wake) {
    const std::string seal = grant->PassOn(method);
    auto proxy = std::make_shared<ProxyStream>(method, std::move(stream), std::move(grant));
    auto source = peers->Stream(
        server, method, request, seal,
        [proxy, wake](std::string bytes) {
          {
            absl::MutexLock lock(&proxy->mutex_);
            proxy->message_ = std::move(bytes);
          }
          wake();
        },
        [proxy, wake](const absl::Status& status) {
          {
            absl::MutexLock lock(&proxy->mutex_);
            proxy->end_ = status;
          }
          wake();
        });
    {
      absl::MutexLock lock(&proxy->mutex_);
      proxy->source_ = std::move(source);
    }
    return proxy;
  }
  ProxyStream(const char* method, std::shared_ptr<Stream> stream, GrantPtr grant)
      : method_(method), stream_(std::move(stream)), grant_(std::move(grant)) {}

  bool Pump(int64_t) override {
    // The owner checks the right to the run.  Only this server knows the
    // caller's identity.
    (void)StillAllowed(grant_.get(), method_, "", stream_.get());
    std::shared_ptr<PeerStream> source;
    {
      absl::MutexLock lock(&mutex_);
      source = source_;
      if (message_.has_value() && stream_->ready()) {
        Response response;
        const bool read = response.ParseFromString(*message_);
        message_.reset();
        asked_ = false;
        if (read) {
          stream_->Send(std::move(response));
        } else {
          stream_->End({grpc::StatusCode::INTERNAL, "another server's answer cannot be read"});
        }
      }
      if (!message_.has_value() && end_.has_value()) stream_->End(ToGrpc(*end_));
      if (source != nullptr && !asked_ && !end_.has_value() && stream_->ready()) {
        asked_ = true;
        source->Next();
      }
    }
    if (!stream_->ending()) return true;
    if (source != nullptr) source->Cancel();
    return false;
  }
  void End(const grpc::Status& status) override {
    stream_->End(status);
    std::shared_ptr<PeerStream> source;
    {
      absl::MutexLock lock(&mutex_);
      source = source_;
    }
    if (source != nullptr) source->Cancel();
  }

 private:
  const char* const method_;
  const std::shared_ptr<Stream> stream_;
  const GrantPtr grant_;
  absl::Mutex mutex_;
  std::shared_ptr<PeerStream> source_ ABSL_GUARDED_BY(mutex_);
  std::optional<std::string> message_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool asked_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_PROXY_STREAM_H_
