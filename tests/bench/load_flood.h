// load_flood.h: clients without rights, which never send a valid message.
//
// Thread-safe.

#ifndef BELLWETHER_TESTS_BENCH_LOAD_FLOOD_H_
#define BELLWETHER_TESTS_BENCH_LOAD_FLOOD_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace bellwether {

class LoadFlood {
 public:
  enum class Kind {
    kConnections,  // Opened and closed as fast as it goes.
    kStalls,       // Opened, a part of a ClientHello, then silence; 1,000 at any time.
  };

  // Starts at once, from 127.0.0.2 to .9.  REQUIRES: `address` is on loopback.
  LoadFlood(const std::string& address, Kind kind);
  ~LoadFlood();  // Ends it and closes what is open.
  LoadFlood(const LoadFlood&) = delete;
  LoadFlood& operator=(const LoadFlood&) = delete;

  uint64_t opened() const { return opened_; }

 private:
  void Run(int number);
  // A connected descriptor, or -1.
  int Open(int number, uint32_t source) const;

  const std::string host_;
  const int port_;
  const Kind kind_;
  std::atomic<bool> ended_{false};
  std::atomic<uint64_t> opened_{0};
  std::vector<std::thread> threads_;
};

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_BENCH_LOAD_FLOOD_H_
