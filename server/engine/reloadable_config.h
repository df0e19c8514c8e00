// reloadable_config.h: the newest content of a file that is read again while the server
// runs.
//
// A run's rules and policy are part of its state.  Only records of its log change them, so
// that recovery decides as before.  The shards compare them with the content here.
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_
#define BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace bellwether::server {

// Pointer: a shared pointer to a constant that has its `text`.
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

 protected:
  // What a text stands for that was in force once; "": built_in().  Errors are those of `parse`.
  absl::StatusOr<Pointer> FindText(std::string_view text,
                                   absl::FunctionRef<absl::StatusOr<Pointer>(std::string_view)> parse) {
    if (text.empty() || text == built_in_->text) return built_in_;
    absl::MutexLock lock(&mutex_);
    if (text == current_->text) return current_;
    const auto found =
        std::find_if(known_.begin(), known_.end(), [&](const Pointer& each) { return each->text == text; });
    if (found != known_.end()) return *found;
    absl::StatusOr<Pointer> parsed = parse(text);
    if (!parsed.ok()) return parsed;
    if (known_.size() == kKnownMax) known_.erase(known_.begin());
    known_.push_back(*parsed);
    return parsed;
  }

 private:
  static constexpr size_t kKnownMax = 8;

  const Pointer built_in_;
  mutable absl::Mutex mutex_;
  Pointer current_ ABSL_GUARDED_BY(mutex_);
  // Parsed lately: after a restart many runs ask for the same.
  std::vector<Pointer> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RELOADABLE_CONFIG_H_
