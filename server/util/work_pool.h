// work_pool.h: a few threads and a bounded queue, so that gRPC's own threads
// never wait for a disk, nor a shard for a database.

#ifndef BELLWETHER_SERVER_UTIL_WORK_POOL_H_
#define BELLWETHER_SERVER_UTIL_WORK_POOL_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace bellwether::server {

// Thread-safe.
class WorkPool {
 public:
  WorkPool(int threads, size_t queue_max);
  ~WorkPool();  // As Stop().
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // False: queue_max tasks wait already, or Stop() was called; the task will
  // not run.  Else it runs, once, even if Stop() comes first.
  bool Post(std::function<void()> task);
  // Runs what is queued and joins.
  void Stop();

 private:
  void Run();

  const size_t queue_max_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_WORK_POOL_H_
