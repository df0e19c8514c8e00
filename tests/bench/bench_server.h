// bench_server.h: a real bellwetherd on core 0, with a folder of its own.
//
// Not thread-safe.

#ifndef BELLWETHER_TESTS_BENCH_BENCH_SERVER_H_
#define BELLWETHER_TESTS_BENCH_BENCH_SERVER_H_

#include <sys/types.h>

#include <filesystem>
#include <string>

namespace bellwether {

class BenchServer {
 public:
  // Returns when it serves; exits the program if it does not start.
  explicit BenchServer(const std::string& binary);
  ~BenchServer();  // Kills it if it still runs, removes the folder.
  BenchServer(const BenchServer&) = delete;
  BenchServer& operator=(const BenchServer&) = delete;

  // Ends it in order and waits.
  void Stop();
  // Once more, with the same data.  REQUIRES: stopped.
  void Start();
  double CpuSeconds() const;  // REQUIRES: not stopped.
  const std::string& address() const { return address_; }
  std::filesystem::path data() const { return folder_ / "data"; }

 private:
  const std::string binary_;
  std::filesystem::path folder_;
  std::string address_;
  pid_t pid_ = 0;
};

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_BENCH_BENCH_SERVER_H_
