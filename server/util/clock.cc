#include "server/util/clock.h"

namespace bellwether::server {
namespace {

class SystemClock final : public Clock {
 public:
  int64_t UnixNanos() const override {
    return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  }
  int64_t MonotonicNanos() const override {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

}  // namespace

Clock* Clock::System() {
  static SystemClock clock;
  return &clock;
}

}  // namespace bellwether::server
