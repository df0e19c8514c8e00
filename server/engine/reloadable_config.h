// reloadable_config.h: the newest content of a file that is read again while the server
// runs.
//
// A run's rules and policy are part of its state.  Only records of its log change them, so
// that recovery decides as before.  The shards compare them with the content here.
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_
#define BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_

#include <utility>

#include "absl/synchronization/mutex.h"

namespace bellwether::server {

// Pointer: a shared pointer to a constant.
template <class Pointer>
class ReloadableConfig {
 public:
  // `built_in` holds without a file; never null.
  explicit ReloadableConfig(Pointer built_in) : built_in_(std::move(built_in)), current_(built_in_) {}

  const Pointer& built_in() const { return built_in_; }
  Pointer current() const {
    absl::MutexLock lock(&mutex_);
    return current_;
  }
  // nullptr: back to built_in().
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
