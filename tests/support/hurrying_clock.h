// hurrying_clock.h: a clock by which whatever is done once a second, or has a deadline, is due.

#ifndef BELLWETHER_TESTS_SUPPORT_HURRYING_CLOCK_H_
#define BELLWETHER_TESTS_SUPPORT_HURRYING_CLOCK_H_

#include <atomic>
#include <cstdint>

#include "server/util/clock.h"

namespace bellwether::server {

// A second later each time that it is asked.  Thread-safe.
class HurryingClock final : public Clock {
 public:
  int64_t UnixNanos() const override { return System()->UnixNanos(); }
  int64_t MonotonicNanos() const override { return now_ += 1'000'000'000; }
  int64_t now() const { return now_; }

 private:
  mutable std::atomic<int64_t> now_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_HURRYING_CLOCK_H_
