// call_deadline.h: ends a call of gRPC's whose caller does not take its answer.
//
// What was written waits for the caller's window, for as long as the caller likes:
// meanwhile it lies in memory, and its place is taken.

#ifndef BELLWETHER_SERVER_QUERY_CALL_DEADLINE_H_
#define BELLWETHER_SERVER_QUERY_CALL_DEADLINE_H_

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace bellwether::server {

// Set() comes before the call's Finish(), and Done() from its OnDone(): so never both
// at once.
class CallDeadline {
 public:
  // `context` must be there until Done().
  explicit CallDeadline(grpc::CallbackServerContext* context) : call_(std::make_shared<Call>()) {
    absl::MutexLock lock(&call_->mutex);
    call_->context = context;
  }
  CallDeadline(const CallDeadline&) = delete;
  CallDeadline& operator=(const CallDeadline&) = delete;

  // Cancels the call in `ms`, unless Done() comes before.  Once.
  void Set(int64_t ms) {
    alarm_ = std::make_unique<grpc::Alarm>();
    alarm_->Set(std::chrono::system_clock::now() + std::chrono::milliseconds(ms), [call = call_](bool fired) {
      absl::MutexLock lock(&call->mutex);
      if (fired && call->context != nullptr) call->context->TryCancel();
    });
  }
  // The call is over: from OnDone().
  void Done() {
    {
      absl::MutexLock lock(&call_->mutex);
      call_->context = nullptr;
    }
    alarm_.reset();
  }

 private:
  // What the alarm knows of the call: it may come when that is gone.
  struct Call {
    absl::Mutex mutex;
    grpc::CallbackServerContext* context ABSL_GUARDED_BY(mutex) = nullptr;
  };

  const std::shared_ptr<Call> call_;
  std::unique_ptr<grpc::Alarm> alarm_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_CALL_DEADLINE_H_
