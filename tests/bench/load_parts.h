// load_parts.h: what the benches of ingest share: frames, percentiles, the
// disk's own share, and a watch of alerts.

#ifndef BELLWETHER_TESTS_BENCH_LOAD_PARTS_H_
#define BELLWETHER_TESTS_BENCH_LOAD_PARTS_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bellwether/v1/ingest.grpc.pb.h"
#include "bellwether/v1/query.grpc.pb.h"

namespace bellwether {

// A frame of the benches: 32 layers x 32 heads x 4 signals, 16 KiB.
inline constexpr int kBenchLayers = 32, kBenchHeads = 32, kBenchValues = 4 * kBenchLayers * kBenchHeads;
inline constexpr size_t kBenchSteps = 256;  // Distinct steps of values, used in turn.

// Of a monotonic clock, in seconds.
double BenchNow();

// What a process that runs has used of all processors, in seconds.
double CpuSecondsOf(pid_t pid);

// In ms, of seconds; 0 if there are none.
double PercentileMs(std::vector<double> seconds, double share);

// kBenchSteps frames of a norm, a signed sum, a mean and a count, full float32
// mantissas, without step and seq.
std::vector<v1::ClientMessage> MakeBenchFrames();

// The Hello of run `number`, whose uuid is made of the number.
v1::ClientMessage MakeBenchHello(const std::string& run, int number);

// What the disk alone takes to make 2,000 frames durable, in seconds each; as
// fast as `frames_per_second`, at most 1,000.  Exits the program if it fails.
std::vector<double> MeasureSyncs(const std::filesystem::path& folder, double frames_per_second);

// When a watch receives each run's first alert but of silence.  Thread-safe.
class AlertWatch {
 public:
  explicit AlertWatch(const std::shared_ptr<grpc::Channel>& channel);
  ~AlertWatch();

  // BenchNow() by run; waits until an alert of `runs` has arrived, or 10 s.
  std::map<std::string, double> told_at(size_t runs) const;

 private:
  void Read();

  std::unique_ptr<v1::Query::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::WatchAlertsResponse>> stream_;
  mutable std::mutex mutex_;
  std::map<std::string, double> told_at_;
  std::thread reader_;
};

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_BENCH_LOAD_PARTS_H_
