// worker_pool.h: the threads that serve requests.
//
// A request has a thread until its answer is out, however long its reader takes.
// Threads are started when they are needed and kept, threads_max at most; what
// comes beyond waits in a queue of queue_max.

#ifndef BELLWETHER_SERVER_NET_WORKER_POOL_H_
#define BELLWETHER_SERVER_NET_WORKER_POOL_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace bellwether::server {

// Thread-safe.
class WorkerPool {
 public:
  WorkerPool(size_t threads_max, size_t queue_max) : threads_max_(threads_max), queue_max_(queue_max) {}

  // False: the queue is full, or Shutdown() was called; never waits.
  bool Enqueue(std::function<void()> task);
  // Runs what is queued, then ends.
  void Shutdown();

  size_t threads() const;

 private:
  void Work();

  const size_t threads_max_;
  const size_t queue_max_;
  mutable absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_WORKER_POOL_H_
