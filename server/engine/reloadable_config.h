// reloadable_config.h: what the server's file says now, for whoever is told by a record.
//
// Rules and policies of a run are part of its state and change by records of
// its log only, so that recovery decides what was decided; this is what the
// shards compare them with.  Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_
#define BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_

#include <utility>

#include "absl/synchronization/mutex.h"

namespace bellwether::server {

// Pointer: shared, to something that never changes.
template <class Pointer>
class ReloadableConfig {
 public:
  // `built_in`: without a file.  Never null.
  explicit ReloadableConfig(Pointer built_in) : built_in_(std::move(built_in)), current_(built_in_) {}

  const Pointer& built_in() const { return built_in_; }
  Pointer current() const {
    absl::MutexLock lock(&mutex_);
    return current_;
  }
  // nullptr: what is built in.
  void Set(Pointer next) {
    absl::MutexLock lock(&mutex_);
    current_ = next == nullptr ? built_in_ : std::move(next);
  }

 private:
  const Pointer built_in_;
  mutable absl::Mutex mutex_;
  Pointer current_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_
