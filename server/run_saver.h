// run_saver.h: threads that wait until saves of runs are with the other servers.
//
// A shard has hundreds of runs, whose messages must not wait for one run's save in a
// database that does not answer: it hands the waiting to these, and goes on.  How many
// saves are under way is the shards' to limit (Shard::kSavesMax each).
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_RUN_SAVER_H_
#define BELLWETHER_SERVER_RUN_SAVER_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace bellwether::server {

class RunSaver {
 public:
  explicit RunSaver(int threads);
  ~RunSaver();  // Does what it was given before.
  RunSaver(const RunSaver&) = delete;
  RunSaver& operator=(const RunSaver&) = delete;

  // Calls it from one of the threads.
  void Do(std::function<void()> wait);

 private:
  void Work();

  absl::Mutex mutex_;
  std::deque<std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_RUN_SAVER_H_
