// guard_bench: what keeping strangers out costs: the same load without TLS, with
// client certificates, and with tokens besides.
//
//   guard_bench --server PATH_OF_BELLWETHERD [--rounds 5] [--seconds 5] [--runs 20] [--rate 1000]
//               [--server-cpus 0] [--client-cpus 1] [--folder DIR]
//
// A real bellwetherd a guard (tests/bench/load_server.h), with WAL, store and
// detectors, all at once, of which one has work at a time.  Rounds take them in
// turn, each beginning with another: at `rate` frames a second for `seconds`, and
// then as fast as acknowledgements come.  A frame is 32 layers x 32 heads x 4
// signals, 16 KiB; latencies are counted from when it was due.
//
// Prints a table to stderr and one JSON object to stdout: by guard the medians of
// the rounds, and of what they are to the first guard in the same round, with the
// least and the most.  Processor time is trustworthy on a busy machine, too; rates
// and latencies are not.

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/load_fleet.h"

namespace bellwether {
namespace {

struct Arguments {
  LoadServer::Options server;
  int rounds = 5;
  double seconds = 5;
  int runs = 20;
  double rate = 1000;
};

constexpr struct {
  Guard guard;
  const char* name;
} kGuards[] = {{Guard::kUnixSocket, "unix"},
               {Guard::kLoopback, "loopback"},
               {Guard::kCertificates, "certificates"},
               {Guard::kTokens, "certificates+tokens"}};

// What is measured in a round; processor time in seconds per 1,000 frames.
constexpr const char* kFigures[] = {
    "most_frames_per_second", "server_cpu_at_most", "client_cpu_at_most", "ack_ms_p50", "ack_ms_p99",
    "server_cpu_at_rate",     "client_cpu_at_rate"};
constexpr size_t kFigureCount = std::size(kFigures);
using Round = std::vector<double>;  // By kFigures.

double OwnCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Processor time between its making and its end, per 1,000 acknowledged frames.
class Cost {
 public:
  Cost(const LoadServer& server, const LoadFleet& fleet)
      : server_(server), fleet_(fleet), acked_(fleet.acked()), server_cpu_(server.CpuSeconds()) {}
  double frames() const { return static_cast<double>(fleet_.acked() - acked_); }
  double server() const { return (server_.CpuSeconds() - server_cpu_) / frames() * 1e3; }
  double client() const { return (OwnCpuSeconds() - own_cpu_) / frames() * 1e3; }

 private:
  const LoadServer& server_;
  const LoadFleet& fleet_;
  const uint64_t acked_;
  const double server_cpu_;
  const double own_cpu_ = OwnCpuSeconds();
};

struct Guarded {
  const char* name;
  std::unique_ptr<LoadServer> server;
  std::unique_ptr<LoadFleet> fleet;
  std::vector<Round> rounds;
};

[[noreturn]] void Die(const Guarded& guarded) {
  std::fprintf(stderr, "%s: not all was acknowledged: %s\n", guarded.name, guarded.fleet->error().c_str());
  std::exit(1);
}

Round Measure(const Arguments& arguments, const Guarded& guarded) {
  LoadFleet& fleet = *guarded.fleet;
  std::this_thread::sleep_for(std::chrono::seconds(1));  // What the one before left to its database.
  (void)fleet.TakeLatencies();
  Round round(kFigureCount);
  {
    const Cost cost(*guarded.server, fleet);
    fleet.Pace(arguments.rate, arguments.seconds);
    if (!fleet.Drain(60)) Die(guarded);
    const std::vector<double> acks = fleet.TakeLatencies();
    round[3] = PercentileMs(acks, 0.5);
    round[4] = PercentileMs(acks, 0.99);
    round[5] = cost.server();
    round[6] = cost.client();
  }
  const Cost cost(*guarded.server, fleet);
  const double begin = BenchNow();
  fleet.Saturate(64);
  std::this_thread::sleep_for(std::chrono::duration<double>(arguments.seconds));
  round[0] = cost.frames() / (BenchNow() - begin);
  fleet.Saturate(0);
  if (!fleet.Drain(60)) Die(guarded);
  round[1] = cost.server();
  round[2] = cost.client();
  return round;
}

struct Spread {
  double median, least, most;
};

Spread SpreadOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back()};
}

Spread FigureOf(const Guarded& guarded, size_t figure) {
  std::vector<double> values;
  for (const Round& round : guarded.rounds) values.push_back(round[figure]);
  return SpreadOf(std::move(values));
}

// Against the first guard, round by round.
Spread RatioOf(const Guarded& guarded, const Guarded& first, size_t figure) {
  std::vector<double> ratios;
  for (size_t i = 0; i < guarded.rounds.size(); ++i) {
    ratios.push_back(guarded.rounds[i][figure] / first.rounds[i][figure]);
  }
  return SpreadOf(std::move(ratios));
}

void Print(const Arguments& arguments, const std::vector<Guarded>& all) {
  std::fprintf(stderr, "%-24s", "");
  for (const Guarded& guarded : all) std::fprintf(stderr, " %26s", guarded.name);
  std::fprintf(stderr, "\n");
  for (size_t figure = 0; figure < kFigureCount; ++figure) {
    std::fprintf(stderr, "%-24s", kFigures[figure]);
    for (const Guarded& guarded : all) {
      const Spread ratio = RatioOf(guarded, all[0], figure);
      char cell[64];
      std::snprintf(cell, sizeof(cell), "%.4g x%.2f (%.2f..%.2f)", FigureOf(guarded, figure).median, ratio.median,
                    ratio.least, ratio.most);
      std::fprintf(stderr, " %26s", cell);
    }
    std::fprintf(stderr, "\n");
  }
  std::printf("{\"bench\": \"guards\", \"rounds\": %d, \"seconds\": %.0f, \"runs\": %d, \"rate\": %.0f",
              arguments.rounds, arguments.seconds, arguments.runs, arguments.rate);
  for (const Guarded& guarded : all) {
    std::printf(", \"%s\": {", guarded.name);
    for (size_t figure = 0; figure < kFigureCount; ++figure) {
      const Spread value = FigureOf(guarded, figure), ratio = RatioOf(guarded, all[0], figure);
      std::printf("%s\"%s\": {\"median\": %.4g, \"ratio\": [%.3f, %.3f, %.3f]}", figure == 0 ? "" : ", ",
                  kFigures[figure], value.median, ratio.least, ratio.median, ratio.most);
    }
    std::printf("}");
  }
  std::printf("}\n");
}

int Usage() {
  std::fprintf(stderr,
               "usage: guard_bench --server PATH_OF_BELLWETHERD [--rounds 5] [--seconds 5] [--runs 20] [--rate 1000] "
               "[--server-cpus 0] [--client-cpus 1] [--folder DIR]\n");
  return 2;
}

int Run(const Arguments& arguments) {
  if (arguments.server.binary.empty() || arguments.rounds < 1 || arguments.runs < 1) return Usage();
  const EncodedFrames frames;
  std::vector<Guarded> all;
  for (const auto& [guard, name] : kGuards) {
    LoadServer::Options options = arguments.server;
    options.guard = guard;
    Guarded& guarded = all.emplace_back();
    guarded.name = name;
    guarded.server = std::make_unique<LoadServer>(options);
    guarded.fleet = std::make_unique<LoadFleet>(guarded.server.get(), &frames, "quiet", "guarded", arguments.runs);
    // Batch means and raw steps of all series are there behind 300 steps.
    guarded.fleet->Backlog(300);
    if (!guarded.fleet->Drain(300)) Die(guarded);
  }
  for (int round = 0; round < arguments.rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      Guarded& guarded = all[(i + static_cast<size_t>(round)) % all.size()];
      guarded.rounds.push_back(Measure(arguments, guarded));
    }
  }
  Print(arguments, all);
  return 0;
}

}  // namespace

int GuardBench(int argc, char** argv) {
  Arguments arguments;
  if (argc % 2 == 0) return Usage();
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--server") {
      arguments.server.binary = value;
    } else if (flag == "--rounds") {
      arguments.rounds = std::atoi(value.c_str());
    } else if (flag == "--seconds") {
      arguments.seconds = std::atof(value.c_str());
    } else if (flag == "--runs") {
      arguments.runs = std::atoi(value.c_str());
    } else if (flag == "--rate") {
      arguments.rate = std::atof(value.c_str());
    } else if (flag == "--server-cpus") {
      arguments.server.cpus = ParseCpus(value);
    } else if (flag == "--client-cpus") {
      PinToCpus(ParseCpus(value));
    } else if (flag == "--folder") {
      arguments.server.folder = value;
    } else {
      return Usage();
    }
  }
  return Run(arguments);
}

}  // namespace bellwether

int main(int argc, char** argv) { return bellwether::GuardBench(argc, argv); }
