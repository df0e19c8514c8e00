// load_tensors: runs that tell of ten thousand named tensors, beside small ones, at one
// real server.
//
//   load_tensors --server PATH_OF_BELLWETHERD [--big 100] [--small 900] [--tensors 10000]
//                [--values moving|client] [--warm 300] [--seconds 120] [--big-period 4]
//                [--small-period 5] [--server-cpus 0] [--client-cpus 1] [--folder DIR]
//                [--config 'YAML']
//
// A frame of a big run is of 32 x 32 heads x 4 signals, and of 8 signals of each tensor.
// Values "moving" are of 8 signals each of which moves in every sample, by a log-normal
// noise on a level that drifts; "client" are those that a client sends of parameters,
// where many are the same all the time.  A small run's frame has the heads alone.
//
// Phases: `warm` frames of each run as fast as they are acknowledged; then, for `seconds`,
// a frame each period, while queries and scrapes are made and a fifth of the small runs
// turns NaN; then SIGKILL, and how long until it serves and has applied its log.  Prints one
// JSON object.

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bellwether/v1/query.grpc.pb.h"
#include "tests/bench/disk_parts.h"
#include "tests/bench/load_fleet.h"

namespace bellwether {
namespace {

struct Arguments {
  LoadServer::Options server = {.guard = Guard::kLoopback};
  int big = 100, small = 900, tensors = 10'000;
  std::string values = "moving";
  uint64_t warm = 300;
  double seconds = 120, big_period = 4, small_period = 5;
};

// How a signal of a tensor goes from sample to sample: its level drifts, and each sample
// is off it by so much, both as natural logarithms.  0, 0 = the same in all samples.
struct Motion {
  v1::Signal signal;
  double drift, noise;
  float constant = 0;    // If it does not move.
  bool in_turn = false;  // Each tensor in every 25th sample.
  bool of_few = false;   // One tensor in fifty moves, as the rows of an embedding do.
};

std::vector<Motion> MotionsOf(const std::string& values) {
  if (values == "moving") {
    return {{v1::SIGNAL_TENSOR_GRAD_SUMSQ, 4e-3, 0.1},        {v1::SIGNAL_TENSOR_GRAD_MAX, 2e-3, 0.1},
            {v1::SIGNAL_TENSOR_WEIGHT_SUMSQ, 1e-4, 0},        {v1::SIGNAL_TENSOR_CHANGE_SUMSQ, 4e-3, 0.03},
            {v1::SIGNAL_TENSOR_CHANGE_WEIGHT_SUMSQ, 1e-4, 0}, {v1::SIGNAL_TENSOR_LAG_SUM, 2e-3, 0.1},
            {v1::SIGNAL_TENSOR_MOMENTUM_DOT, 4e-3, 0.1},      {v1::SIGNAL_TENSOR_MOMENTUM_NORMS, 4e-3, 0.05}};
  }
  return {{v1::SIGNAL_TENSOR_ELEMENTS, 0, 0, 16'777'216},
          {v1::SIGNAL_TENSOR_GRAD_SUMSQ, 4e-3, 0.1},
          {v1::SIGNAL_TENSOR_GRAD_MAX, 2e-3, 0.1},
          {v1::SIGNAL_TENSOR_GRAD_NONFINITE, 0, 0, 0},
          {.signal = v1::SIGNAL_TENSOR_GRAD_ZEROS, .drift = 0, .noise = 0.1, .of_few = true},
          {v1::SIGNAL_TENSOR_MOVED, 0, 0, 1},
          {v1::SIGNAL_TENSOR_WEIGHT_SUMSQ, 1e-4, 0},
          {.signal = v1::SIGNAL_TENSOR_LAG_SUM, .drift = 2e-3, .noise = 0.1, .in_turn = true}};
}

v1::ClientMessage NamesOf(int tensors) {
  v1::ClientMessage message;
  v1::Names* const names = message.mutable_names();
  names->set_granularity(v1::GRANULARITY_TENSOR);
  for (int i = 0; i < tensors; ++i) {
    names->add_names("model.layers." + std::to_string(i / 300) + ".mlp.experts." + std::to_string(i % 300 / 3) +
                     (i % 3 == 0   ? ".gate_proj.weight"
                      : i % 3 == 1 ? ".up_proj.weight"
                                   : ".down_proj.weight"));
  }
  return message;
}

// The frames of MakeBenchFrames, and the tensors behind their heads.
std::vector<v1::ClientMessage> MakeTensorFrames(int tensors, const std::vector<Motion>& motions) {
  constexpr size_t kTurns = 25;
  std::vector<v1::ClientMessage> frames = MakeBenchFrames();
  const auto count = static_cast<size_t>(tensors);
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  for (const Motion& motion : motions) {
    std::vector<double> level(count);
    for (double& each : level) each = -4 + 2 * normal(random);
    for (size_t step = 0; step < frames.size(); ++step) {
      const size_t begin = motion.in_turn ? count * (step % kTurns) / kTurns : 0;
      const size_t end = motion.in_turn ? count * (step % kTurns + 1) / kTurns : count;
      v1::Block* const block = frames[step].mutable_frame()->add_blocks();
      block->set_signal(motion.signal);
      block->set_layer_begin(static_cast<uint32_t>(begin));
      block->set_layer_count(static_cast<uint32_t>(end - begin));
      block->set_head_count(1);
      for (size_t i = begin; i < end; ++i) {
        level[i] += motion.drift * normal(random);
        const bool moves = (motion.drift > 0 || motion.noise > 0) && (!motion.of_few || i % 50 == 0);
        block->add_values(moves ? static_cast<float>(std::exp(level[i] + motion.noise * normal(random)))
                                : motion.constant);
      }
    }
  }
  return frames;
}

// One number of a page of metrics; the sum where there are several series of the name.
double Metric(const std::string& page, const std::string& name) {
  double sum = 0;
  for (size_t at = 0; (at = page.find("\n" + name, at)) != std::string::npos; ++at) {
    const size_t after = at + 1 + name.size();
    if (page[after] != ' ' && page[after] != '{') continue;
    sum += std::atof(page.c_str() + page.find(' ', page[after] == '{' ? page.find('}', after) : after));
  }
  return sum;
}

std::string Latencies(const std::string& name, const std::vector<double>& seconds) {
  char text[192];
  std::snprintf(text, sizeof(text), "\"%s\": {\"count\": %zu, \"ms_p50\": %.2f, \"ms_p99\": %.2f, \"ms_max\": %.2f}",
                name.c_str(), seconds.size(), PercentileMs(seconds, 0.5), PercentileMs(seconds, 0.99),
                PercentileMs(seconds, 1));
  return text;
}

// Asks what a page and a person ask of a big run, in turn, until it is destroyed.
class Readers {
 public:
  Readers(const LoadServer* server, std::string run) : server_(*server), run_(std::move(run)) {
    thread_ = std::thread([this] { Ask(); });
  }
  ~Readers() { Stop(); }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  // REQUIRES: Stop().
  std::string ToJson() const {
    std::string text;
    for (const auto& [name, seconds] : seconds_) text += (text.empty() ? "" : ", ") + Latencies(name, seconds);
    return text + ", \"scrape_bytes\": " + std::to_string(scrape_bytes_) + ", \"failed\": " + std::to_string(failed_);
  }

 private:
  template <typename Call>
  void Time(const std::string& name, const Call& call) {
    const double begin = BenchNow();
    if (!call()) ++failed_;
    seconds_[name].push_back(BenchNow() - begin);
  }

  void Ask() {
    grpc::ChannelArguments room;
    const auto stub = v1::Query::NewStub(server_.Connect(""));
    const auto matrix = [&](const std::string& signal) {
      v1::GetMatrixRequest request;
      request.set_run(run_);
      request.set_signal(signal);
      request.set_step(-1);
      v1::GetMatrixResponse response;
      grpc::ClientContext context;
      return stub->GetMatrix(&context, request, &response).ok() && response.values_size() > 0;
    };
    for (int turn = 0; !stop_; ++turn) {
      Time("map_of_tensors", [&] { return matrix("tensor_grad_max"); });
      Time("map_of_heads", [&] { return matrix("wq_sigma"); });
      Time("tensor_top", [&] {
        v1::TopHeadsRequest request;
        request.set_run(run_);
        request.set_signal("tensor_grad_max");
        request.set_limit(10);
        request.set_step(-1);
        v1::TopHeadsResponse response;
        grpc::ClientContext context;
        return stub->TopHeads(&context, request, &response).ok() && response.heads_size() == 10;
      });
      Time("series_of_a_tensor", [&] {
        v1::GetSeriesRequest request;
        request.set_run(run_);
        request.set_attempt(-1);
        auto* const series = request.add_series();
        series->set_signal("tensor_grad_sumsq");
        series->set_layer(static_cast<uint32_t>(turn * 997 % 10));
        v1::GetSeriesResponse response;
        grpc::ClientContext context;
        return stub->GetSeries(&context, request, &response).ok() && response.series_size() == 1 &&
               response.series(0).step_size() > 0;
      });
      if (turn % 5 == 0) Time("scrape", [&] { return (scrape_bytes_ = server_.HttpGet("/metrics").size()) > 0; });
      for (int i = 0; i < 10 && !stop_; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

  const LoadServer& server_;
  const std::string run_;
  std::atomic<bool> stop_ = false;
  std::map<std::string, std::vector<double>> seconds_;
  size_t scrape_bytes_ = 0, failed_ = 0;
  std::thread thread_;
};

// The server's resident memory beside what it says of it.
std::string Memory(const std::string& name, const LoadServer& server) {
  constexpr double kOwnMib = 576;  // As limits.memory_max counts it where nobody asks: the cache and 512 MiB.
  const double runs = Metric(server.HttpGet("/metrics"), "bellwether_runs_memory_bytes") / (1 << 20);
  char text[192];
  std::snprintf(text, sizeof(text),
                "\"%s\": {\"rss_mib\": %.0f, \"rss_mib_max\": %.0f, \"runs_mib_said\": %.0f, \"all_mib_said\": %.0f}",
                name.c_str(), server.ResidentMib(), server.ResidentMaxMib(), runs, runs + kOwnMib);
  return text;
}

// Waits until the server has nothing left to do but to save what goes on.
double Settle(const LoadServer& server, double cores, int seconds_max) {
  const double begin = BenchNow();
  for (int quiet = 0; quiet < 3 && BenchNow() < begin + seconds_max;) {
    const double before = server.CpuSeconds();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    quiet = server.CpuSeconds() - before < cores ? quiet + 1 : 0;
  }
  return BenchNow() - begin;
}

constexpr uint64_t kKnown = 8;      // Frames behind which a server counts a run for what it sends.
constexpr uint64_t kWarmPart = 32;  // Frames of a run at a time, so that the others go on, too.

// Runs begin some at a time: until a run is known it counts for more than it sends.
bool Begin(int runs, LoadFleet* fleet) {
  constexpr int kAtOnce = 100;
  for (int begun = 0; begun < runs; begun += kAtOnce) {
    const int count = std::min(kAtOnce, runs - begun);
    fleet->Add(count);
    fleet->Offer(begun, kKnown);
    if (!fleet->Drain(300)) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // Until it is published.
  }
  return true;
}

void Show(const std::string& part) {
  std::printf(", %s", part.c_str());
  std::fflush(stdout);
}

int Run(const Arguments& arguments) {
  const std::vector<Motion> motions = MotionsOf(arguments.values);
  const EncodedFrames small_frames;
  const EncodedFrames big_frames({NamesOf(arguments.tensors)}, MakeTensorFrames(arguments.tensors, motions));
  LoadServer server(arguments.server);
  const std::vector<double> syncs = MeasureSyncs(server.data(), 0);
  std::printf(
      "{\"bench\": \"load_tensors\", \"big\": %d, \"small\": %d, \"tensors\": %d, \"values\": \"%s\", "
      "\"fdatasync_ms_p50\": %.2f, \"fdatasync_ms_p99\": %.2f",
      arguments.big, arguments.small, arguments.tensors, arguments.values.c_str(), PercentileMs(syncs, 0.5),
      PercentileMs(syncs, 0.99));
  std::fflush(stdout);
  const AlertWatch watch(server.Connect(""));
  const double warm_begin = BenchNow(), cpu_begin = server.CpuSeconds();
  LoadFleet big(&server, &big_frames, "", "big", 0), small(&server, &small_frames, "", "small", 0);
  if (!Begin(arguments.big, &big) || !Begin(arguments.small, &small)) return 1;
  for (uint64_t sent = kKnown; sent < arguments.warm; sent += kWarmPart) {
    for (LoadFleet* const fleet : {&big, &small}) {
      fleet->Backlog(std::min(kWarmPart, arguments.warm - sent));
      if (!fleet->Drain(900)) return 1;
    }
  }
  const double warm = BenchNow() - warm_begin;
  char text[512];
  std::snprintf(text, sizeof(text), "\"warm_seconds\": %.1f, \"warm_cpu_seconds\": %.1f, \"settled_seconds\": %.0f",
                warm, server.CpuSeconds() - cpu_begin, Settle(server, 0.3, 120));
  Show(text);
  Show(Memory("warm", server));
  (void)big.TakeLatencies();
  (void)small.TakeLatencies();

  const double paced_begin = BenchNow(), paced_cpu = server.CpuSeconds(), written = server.WrittenMib();
  Readers readers(&server, "big-0");
  std::thread beside([&] { big.Pace(arguments.big / arguments.big_period, arguments.seconds); });
  small.Pace(arguments.small / arguments.small_period, arguments.seconds, arguments.small / 5);
  beside.join();
  readers.Stop();
  const double passed = BenchNow() - paced_begin;
  std::snprintf(text, sizeof(text),
                "\"paced_seconds\": %.0f, \"server_cpu_cores\": %.2f, \"written_mib_per_second\": %.1f", passed,
                (server.CpuSeconds() - paced_cpu) / passed, (server.WrittenMib() - written) / passed);
  Show(text);
  const bool drained = big.Drain(60) && small.Drain(60);
  Show(Latencies("ack_big", big.TakeLatencies()));
  Show(Latencies("ack_small", small.TakeLatencies()));
  size_t alerts_sent = 0;
  const std::vector<double> alerts = small.AlertLatencies(watch, paced_begin, BenchNow(), &alerts_sent);
  Show("\"alerts_sent\": " + std::to_string(alerts_sent) + ", " + Latencies("alert", alerts));
  Show(readers.ToJson());
  Show(Memory("paced", server));
  Settle(server, 0.3, 60);
  const size_t frames = big_frames.first.empty() ? 0 : big.acked() - static_cast<uint64_t>(arguments.big);
  size_t values_each = kBenchValues;
  for (const Motion& motion : motions)
    values_each += static_cast<size_t>(arguments.tensors) / (motion.in_turn ? 25 : 1);
  const double values = static_cast<double>(frames) * static_cast<double>(values_each) +
                        static_cast<double>(small.acked()) * kBenchValues;
  std::snprintf(text, sizeof(text), "\"values\": %.4g, \"disk_live\": ", values);
  Show(text + ToJson(MeasureDisk(server.data()), values));

  const uint64_t acked = big.acked() + small.acked();
  big.Cut();
  small.Cut();
  const double ready = server.KillAndRestart();
  const double begin = BenchNow();
  double applied = 0;
  while (applied == 0 && BenchNow() < begin + 300) {
    if (Metric(server.HttpGet("/metrics"), "bellwether_wal_unapplied_frames") == 0) applied = BenchNow() - begin;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::snprintf(text, sizeof(text), "\"ready_seconds\": %.2f, \"applied_seconds\": %.2f", ready, ready + applied);
  Show(text);
  big.Backlog(1);
  small.Backlog(1);
  const double back = BenchNow();
  const bool returned = big.Drain(300) && small.Drain(300);
  std::snprintf(text, sizeof(text), "\"all_back_seconds\": %.1f, \"acked_before\": %lu, \"acked\": %lu",
                BenchNow() - back, static_cast<unsigned long>(acked),
                static_cast<unsigned long>(big.acked() + small.acked()));
  Show(text);
  Settle(server, 0.3, 120);
  Show(Memory("restarted", server));
  Show("\"disk_restarted\": " + ToJson(MeasureDisk(server.data()), values));
  Show("\"lost\": " + std::to_string(big.offered() + small.offered() - big.acked() - small.acked()) +
       ", \"streams_ended\": " + std::to_string(big.refused() + small.refused()));
  std::printf("}\n");
  return drained && returned && alerts.size() == alerts_sent ? 0 : 1;
}

int Usage() {
  std::fprintf(stderr,
               "usage: load_tensors --server PATH_OF_BELLWETHERD [--big 100] [--small 900] [--tensors 10000] [--values "
               "moving|client] [--warm 300] [--seconds 120] [--big-period 4] [--small-period 5] [--server-cpus 0] "
               "[--client-cpus 1] [--folder DIR] [--config YAML]\n");
  return 2;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  if (argc % 2 == 0) return Usage();
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--server") {
      arguments.server.binary = value;
    } else if (flag == "--server-cpus") {
      arguments.server.cpus = ParseCpus(value);
    } else if (flag == "--client-cpus") {
      PinToCpus(ParseCpus(value));
    } else if (flag == "--folder") {
      arguments.server.folder = value;
    } else if (flag == "--config") {
      arguments.server.config = value;
    } else if (flag == "--values" && (value == "moving" || value == "client")) {
      arguments.values = value;
    } else if (flag == "--big") {
      arguments.big = std::atoi(value.c_str());
    } else if (flag == "--small") {
      arguments.small = std::atoi(value.c_str());
    } else if (flag == "--tensors") {
      arguments.tensors = std::atoi(value.c_str());
    } else if (flag == "--warm") {
      arguments.warm = static_cast<uint64_t>(std::atoi(value.c_str()));
    } else if (flag == "--seconds") {
      arguments.seconds = std::atof(value.c_str());
    } else if (flag == "--big-period") {
      arguments.big_period = std::atof(value.c_str());
    } else if (flag == "--small-period") {
      arguments.small_period = std::atof(value.c_str());
    } else {
      return Usage();
    }
  }
  if (arguments.server.binary.empty() || arguments.big < 1 || arguments.small < 1 || arguments.tensors < 1) {
    return Usage();
  }
  return Run(arguments);
}

}  // namespace
}  // namespace bellwether

int main(int argc, char** argv) { return bellwether::Main(argc, argv); }
