// load_cluster: frames a second that servers make durable which run already: one
// alone, or those of a cluster, at any of which a trainer may begin.
//
//   load_cluster --servers HOST:PORT[,HOST:PORT...] [--runs 48] [--window 64] [--warm 10] [--seconds 20]
//                [--cpus 8-15]
//
// Every run has a stream, plain text, and sends as fast as acknowledgements come,
// `window` frames ahead; one that is told where its run is served goes there.  A
// frame is 32 layers x 32 heads x 4 signals, 16 KiB.  Prints one JSON object; an
// acknowledgement's time is from the write of its frame.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/load_parts.h"
#include "tests/bench/load_server.h"
#include "tests/bench/load_trainer.h"

namespace bellwether {
namespace {

struct Arguments {
  std::vector<std::string> servers;
  int runs = 48;
  uint64_t window = 64;
  double warm = 10, seconds = 20;
};

class Roaming {
 public:
  Roaming(int number, const Arguments* arguments, const EncodedFrames* frames)
      : servers_(arguments->servers), next_(number), trainer_("grow-" + std::to_string(number), number + 1, frames) {
    trainer_.Saturate(arguments->window);
  }
  // To be called every few milliseconds.
  void KeepConnected() {
    trainer_.KeepConnected([this] {
      std::string address = trainer_.TakeMoved();
      if (address.empty()) address = servers_[static_cast<size_t>(next_++) % servers_.size()];
      grpc::ChannelArguments own;
      own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A connection of its own, as trainers have.
      return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), own);
    });
  }
  LoadTrainer& trainer() { return trainer_; }

 private:
  const std::vector<std::string>& servers_;
  int next_;
  LoadTrainer trainer_;
};

int Run(const Arguments& arguments) {
  const EncodedFrames frames;
  std::vector<std::unique_ptr<Roaming>> fleet;
  for (int i = 0; i < arguments.runs; ++i) fleet.push_back(std::make_unique<Roaming>(i, &arguments, &frames));
  const auto go_on = [&fleet](double seconds) {
    for (const double end = BenchNow() + seconds; BenchNow() < end;) {
      for (const auto& each : fleet) each->KeepConnected();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  const auto acked = [&fleet] {
    uint64_t sum = 0;
    for (const auto& each : fleet) sum += each->trainer().acked();
    return sum;
  };
  const auto ended = [&fleet] {
    uint64_t sum = 0;
    for (const auto& each : fleet) sum += each->trainer().refused();
    return sum;
  };
  go_on(arguments.warm);
  for (const auto& each : fleet) {
    if (each->trainer().welcomed()) continue;
    std::fprintf(stderr, "a run is not welcome after %.0f s: %s\n", arguments.warm, each->trainer().error().c_str());
    return 1;
  }
  for (const auto& each : fleet) (void)each->trainer().TakeAcked();
  // Streams ended before, too, while servers shared the partitions out.
  const uint64_t before = acked(), ended_before = ended();
  const double begin = BenchNow();
  go_on(arguments.seconds);
  const double rate = static_cast<double>(acked() - before) / (BenchNow() - begin);
  const uint64_t ended_since = ended() - ended_before;
  std::vector<double> seconds;
  for (const auto& each : fleet) {
    for (const LoadTrainer::Acked& one : each->trainer().TakeAcked()) seconds.push_back(one.at - one.due);
  }
  if (ended_since > 0) {
    for (const auto& each : fleet) {
      if (const std::string why = each->trainer().error(); !why.empty())
        std::fprintf(stderr, "ended: %s\n", why.c_str());
    }
  }
  std::printf(
      "{\"bench\": \"load_cluster\", \"servers\": %zu, \"runs\": %d, \"window\": %lu, \"frames_per_second\": %.0f, "
      "\"ack_ms_p50\": %.2f, \"ack_ms_p99\": %.2f, \"streams_ended\": %lu}\n",
      arguments.servers.size(), arguments.runs, static_cast<unsigned long>(arguments.window), rate,
      PercentileMs(seconds, 0.5), PercentileMs(seconds, 0.99), static_cast<unsigned long>(ended_since));
  return 0;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--servers") {
      for (size_t at = 0, end = 0; end != std::string::npos; at = end + 1) {
        end = value.find(',', at);
        arguments.servers.push_back(value.substr(at, end == std::string::npos ? end : end - at));
      }
    } else if (name == "--runs") {
      arguments.runs = std::atoi(value.c_str());
    } else if (name == "--window") {
      arguments.window = static_cast<uint64_t>(std::atoi(value.c_str()));
    } else if (name == "--warm") {
      arguments.warm = std::atof(value.c_str());
    } else if (name == "--seconds") {
      arguments.seconds = std::atof(value.c_str());
    } else if (name == "--cpus") {
      PinToCpus(ParseCpus(value));
    } else {
      arguments.servers.clear();
      break;
    }
  }
  if (arguments.servers.empty() || argc % 2 == 0 || arguments.runs < 1 || arguments.window < 1) {
    std::fprintf(stderr,
                 "usage: load_cluster --servers HOST:PORT[,HOST:PORT...] [--runs 48] [--window 64] [--warm 10] "
                 "[--seconds 20] [--cpus 8-15]\n");
    return 2;
  }
  return Run(arguments);
}

}  // namespace
}  // namespace bellwether

int main(int argc, char** argv) { return bellwether::Main(argc, argv); }
