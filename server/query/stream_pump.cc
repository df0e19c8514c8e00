#include "server/query/stream_pump.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "server/util/await_for.h"

namespace bellwether::server {

grpc::Status GoingDown() { return {grpc::StatusCode::UNAVAILABLE, "the server is going down"}; }

StreamPump::StreamPump(Clock* clock) : clock_(clock), thread_([this] { Run(); }) {}

StreamPump::~StreamPump() {
  Stop();
  thread_.join();
}

void StreamPump::Add(std::shared_ptr<StreamHandler> handler) {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopping_) {
      handlers_.push_back(std::move(handler));
      awake_ = true;
      return;
    }
  }
  handler->End(GoingDown());
}

void StreamPump::Wake() {
  absl::MutexLock lock(&mutex_);
  awake_ = true;
}

void StreamPump::Stop() {
  std::vector<std::shared_ptr<StreamHandler>> handlers;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    handlers = handlers_;
  }
  for (const std::shared_ptr<StreamHandler>& handler : handlers) handler->End(GoingDown());
}

void StreamPump::Run() {
  for (;;) {
    std::vector<std::shared_ptr<StreamHandler>> handlers;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return awake_ || stopping_; };
      if (handlers_.empty()) {
        mutex_.Await(absl::Condition(&due));
      } else {
        AwaitFor(&mutex_, absl::Condition(&due), absl::Milliseconds(kTickMs));
      }
      awake_ = false;
      if (stopping_) {
        handlers.swap(handlers_);  // They go outside the lock.
      } else {
        handlers = handlers_;
      }
    }
    std::vector<const StreamHandler*> ended;
    const int64_t now = clock_->MonotonicNanos();
    for (const std::shared_ptr<StreamHandler>& handler : handlers) {
      if (!handler->Pump(now)) ended.push_back(handler.get());
    }
    absl::MutexLock lock(&mutex_);
    if (stopping_ && handlers_.empty()) return;
    if (!ended.empty()) {
      std::erase_if(handlers_, [&ended](const std::shared_ptr<StreamHandler>& handler) {
        return std::find(ended.begin(), ended.end(), handler.get()) != ended.end();
      });
    }
  }
}

}  // namespace bellwether::server
