// stream_pump.h: the one thread that moves the open streams forward.
//
// A stream that can go on wakes it; every tick it looks at all of them, for
// what depends on time.  Reading the store for a stream happens here, on no
// thread of gRPC's and on none that posts.

#ifndef BELLWETHER_SERVER_QUERY_STREAM_PUMP_H_
#define BELLWETHER_SERVER_QUERY_STREAM_PUMP_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/util/clock.h"

namespace bellwether::server {

// One open stream.
class StreamHandler {
 public:
  virtual ~StreamHandler() = default;
  // Sends what can be sent; false: the stream has ended, forget it.  Called by
  // the thread of StreamPump only.
  virtual bool Pump(int64_t now_monotonic_ns) = 0;
  // Ends the stream unless it has ended.  Any thread; returns at once.
  virtual void End(const grpc::Status& status) = 0;
};

// Thread-safe.
class StreamPump {
 public:
  explicit StreamPump(Clock* clock);
  ~StreamPump();  // Stop(), then joins.
  StreamPump(const StreamPump&) = delete;
  StreamPump& operator=(const StreamPump&) = delete;

  // Ends the stream at once if Stop() was called.
  void Add(std::shared_ptr<StreamHandler> handler);
  void Wake();
  // Ends every stream, present and to come, with UNAVAILABLE.
  void Stop();

 private:
  static constexpr int64_t kTickMs = 50;
  void Run();

  Clock* const clock_;
  absl::Mutex mutex_;
  bool awake_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<StreamHandler>> handlers_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

grpc::Status GoingDown();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_STREAM_PUMP_H_
