#include "server/util/await_for.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace bellwether::server {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr auto kHeldRetry = std::chrono::milliseconds(1);
constexpr absl::Duration kLongest = absl::Hours(24 * 365);

struct Waiter;
using Waiters = std::multimap<SteadyClock::time_point, Waiter*>;

struct Waiter {
  bool Settled() const { return expired || condition->Eval(); }

  absl::Mutex* const mutex;
  const absl::Condition* const condition;
  bool expired = false;  // Guarded by *mutex.
  // The timer's own.
  enum { kWaits, kIsTold, kGone } state = kWaits;
  Waiters::iterator place;
};

// Tells waiters that their time is over.  Of the standard library, since its
// waits for a time of the steady clock are by the monotonic clock.
class TimerThread {
 public:
  // Never destroyed: its thread ends with the process.
  static TimerThread* Get() {
    static TimerThread* const timer = new TimerThread;
    return timer;
  }

  void Add(SteadyClock::time_point at, Waiter* waiter) {
    const std::lock_guard lock(mutex_);
    waiter->place = waiting_.emplace(at, waiter);
    if (waiter->place == waiting_.begin()) changed_.notify_one();
  }

  // False: the waiter is being told, AwaitRemoved() it without its mutex.
  bool TryRemove(Waiter* waiter) {
    const std::lock_guard lock(mutex_);
    if (waiter->state == Waiter::kWaits) waiting_.erase(waiter->place);
    return waiter->state != Waiter::kIsTold;
  }

  void AwaitRemoved(Waiter* waiter) {
    std::unique_lock lock(mutex_);
    told_.wait(lock, [waiter] { return waiter->state != Waiter::kIsTold; });
    if (waiter->state == Waiter::kWaits) waiting_.erase(waiter->place);
  }

 private:
  TimerThread() {
    std::thread([this] { Ring(); }).detach();
  }

  void Ring() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (waiting_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const auto [at, waiter] = *waiting_.begin();
      if (SteadyClock::now() < at) {
        changed_.wait_until(lock, at);
        continue;
      }
      waiting_.erase(waiter->place);
      waiter->state = Waiter::kIsTold;
      lock.unlock();
      const bool was_free = waiter->mutex->TryLock();
      if (was_free) {
        waiter->expired = true;
        waiter->mutex->Unlock();
      }
      lock.lock();
      waiter->state = was_free ? Waiter::kGone : Waiter::kWaits;
      // Whoever holds it must not make all others wait as well.
      if (!was_free) waiter->place = waiting_.emplace(SteadyClock::now() + kHeldRetry, waiter);
      told_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;  // What is first to be told.
  std::condition_variable told_;
  Waiters waiting_;
};

}  // namespace

bool AwaitFor(absl::Mutex* mutex, const absl::Condition& condition, absl::Duration timeout) {
  if (condition.Eval()) return true;
  if (timeout <= absl::ZeroDuration()) return false;
  Waiter waiter{.mutex = mutex, .condition = &condition, .place = {}};
  TimerThread* const timer = TimerThread::Get();
  timer->Add(SteadyClock::now() + absl::ToChronoNanoseconds(std::min(timeout, kLongest)), &waiter);
  mutex->Await(absl::Condition(&waiter, &Waiter::Settled));
  if (!timer->TryRemove(&waiter)) {
    mutex->Unlock();
    timer->AwaitRemoved(&waiter);
    mutex->Lock();
  }
  return condition.Eval();
}

}  // namespace bellwether::server
