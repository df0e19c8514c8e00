// backoff.h: how long to wait before the next try.
//
// Full jitter: uniform in [0, min(30 s, 0.25 s * 2^n)] after n failures in a
// row, so that thousands of ranks do not come back at once.  Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SRC_BACKOFF_H_
#define BELLWETHER_CLIENT_LIB_SRC_BACKOFF_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace bellwether::client {

class Backoff {
 public:
  static constexpr std::chrono::milliseconds kFirst{250};
  static constexpr std::chrono::milliseconds kMax{30'000};

  explicit Backoff(uint64_t seed) : random_(seed) {}

  // The wait after one more failure.
  std::chrono::milliseconds Next() {
    const auto bound = ceiling_;
    ceiling_ = std::min(kMax, ceiling_ * 2);
    return std::chrono::milliseconds(static_cast<int64_t>(Random() % (static_cast<uint64_t>(bound.count()) + 1)));
  }
  // Upper bound of what Next() will return.
  std::chrono::milliseconds ceiling() const { return ceiling_; }
  void Reset() { ceiling_ = kFirst; }

 private:
  // splitmix64: any seed will do, even 0.
  uint64_t Random() {
    uint64_t z = random_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  uint64_t random_;
  std::chrono::milliseconds ceiling_ = kFirst;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_BACKOFF_H_
