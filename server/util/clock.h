// clock.h: time, so that tests can hold it still.

#ifndef BELLWETHER_SERVER_UTIL_CLOCK_H_
#define BELLWETHER_SERVER_UTIL_CLOCK_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace bellwether::server {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t UnixNanos() const = 0;  // Wall clock; may jump.
  int64_t UnixMillis() const { return UnixNanos() / 1'000'000; }
  virtual int64_t MonotonicNanos() const = 0;  // For intervals and deadlines.

  static Clock* System();
};

// Of the machine, where no test holds time still.
inline int64_t MonotonicNow() { return Clock::System()->MonotonicNanos(); }

class FakeClock final : public Clock {
 public:
  int64_t UnixNanos() const override { return now_.load(); }
  int64_t MonotonicNanos() const override { return now_.load(); }
  void Advance(int64_t nanos) { now_ += nanos; }

 private:
  std::atomic<int64_t> now_{1'700'000'000'000'000'000};
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_CLOCK_H_
