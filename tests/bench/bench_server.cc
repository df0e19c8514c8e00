#include "tests/bench/bench_server.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/bench/load_parts.h"

namespace bellwether {

BenchServer::BenchServer(const std::string& binary) : binary_(binary) {
  folder_ = std::filesystem::temp_directory_path() / ("bellwether-bench-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder_);
  address_ = "unix:" + (folder_ / "grpc.sock").string();
  Start();
}

void BenchServer::Start() {
  const std::string ready = folder_ / "ready.json";
  std::filesystem::remove(ready);
  pid_ = fork();
  if (pid_ == 0) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(0, &cores);
    sched_setaffinity(0, sizeof(cores), &cores);
    execl(binary_.c_str(), binary_.c_str(), ("--storage.path=" + data().string()).c_str(),
          ("--grpc.listen-address=" + address_).c_str(), "--web.listen-address=127.0.0.1:0",
          ("--ready.file=" + ready).c_str(), "--log.level=warn", nullptr);
    _exit(127);
  }
  while (!std::filesystem::exists(ready)) {
    if (waitpid(pid_, nullptr, WNOHANG) != 0) {
      std::fprintf(stderr, "%s did not start\n", binary_.c_str());
      std::exit(1);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

BenchServer::~BenchServer() {
  if (pid_ != 0) kill(pid_, SIGKILL);
  if (pid_ != 0) waitpid(pid_, nullptr, 0);
  std::filesystem::remove_all(folder_);
}

void BenchServer::Stop() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

double BenchServer::CpuSeconds() const { return CpuSecondsOf(pid_); }

}  // namespace bellwether
