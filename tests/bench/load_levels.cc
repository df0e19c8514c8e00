// load_levels: the load levels that the server must bear, over TLS with client
// certificates, WAL fsync, store and detectors on.
//
//   load_levels --server PATH_OF_BELLWETHERD --level LEVEL [--server-cpus 0,1] [--client-cpus 2-15]
//               [--folder DIR] [--seconds S] [--runs R] [--rates 1000,2000,...] [--config 'YAML']
//
// Starts a real bellwetherd on processors of its own, with certificates and two
// tenants, and trainers of a run each in this process, on the others.  A frame
// is 32 layers x 32 heads x 4 signals, 16 KiB.  Latencies are counted from when
// a frame was due.  Prints one JSON object a level; LEVEL is one of
//
//   l3     1,000 runs, a frame a second each, for S = 60 s behind 300 frames that
//          fill every window; a fifth of the runs turns NaN once, which must be
//          told: durable ack, alert, resident memory, processor time, losses
//   l4     100 runs at each of the rates for S = 10 s, until one is not borne
//          (1 % or more behind, or an ack p99 above 100 ms); then as fast as
//          acknowledgements come
//   l6     1,000 runs connect at once with 600 frames each; 100 others go on with
//          a frame a second and alerts: time to drain, alerts before and meanwhile
//   noisy  a tenant of 50 runs, 1,000 frames/s, alone; beside one that stays
//          below its quota of 500 frames/s; beside that one when it sends all it
//          can: 3 x S = 10 s each, in turn
//   flood  50 runs, 1,000 frames/s, alone; while connections are opened and closed
//          without end; while 1,000 handshakes stall: 3 x S = 10 s each, in turn
//
// The disk's own share is measured first, in the same folder.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/load_fleet.h"
#include "tests/bench/load_flood.h"

namespace bellwether {
namespace {

struct Arguments {
  std::string level;
  LoadServer::Options server;
  double seconds = 0;  // 0 = the level's own.
  int runs = 0;
  std::vector<double> rates = {1000, 2000, 3000, 4000, 5000, 6000, 8000, 10'000, 12'000, 15'000, 20'000};
};

double SecondsOr(const Arguments& arguments, double standard) {
  return arguments.seconds > 0 ? arguments.seconds : standard;
}
int RunsOr(const Arguments& arguments, int standard) { return arguments.runs > 0 ? arguments.runs : standard; }

std::string Latencies(const std::string& name, const std::vector<double>& seconds) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "\"%s\": {\"count\": %zu, \"ms_p50\": %.2f, \"ms_p99\": %.2f, \"ms_p999\": %.2f, \"ms_max\": %.2f}",
                name.c_str(), seconds.size(), PercentileMs(seconds, 0.5), PercentileMs(seconds, 0.99),
                PercentileMs(seconds, 0.999), PercentileMs(seconds, 1));
  return text;
}

// Waits until the server has nothing left to do, what its database merges included,
// so that one phase's rest is not the next one's load.
void Settle(const LoadServer& server) {
  constexpr double kIdleCores = 0.2;               // Runs are saved all the time.
  constexpr int kQuietMin = 3, kSecondsMax = 120;  // Seconds.
  for (int quiet = 0, waited = 0; quiet < kQuietMin && waited < kSecondsMax; ++waited) {
    const double before = server.CpuSeconds();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    quiet = server.CpuSeconds() - before < kIdleCores ? quiet + 1 : 0;
  }
}

void PrintHead(const Arguments& arguments, const LoadServer& server) {
  const std::vector<double> syncs = MeasureSyncs(server.data(), 0);
  std::printf(
      "{\"bench\": \"load\", \"level\": \"%s\", \"server_cpus\": %zu, \"fdatasync_ms_p50\": %.2f, "
      "\"fdatasync_ms_p99\": %.2f, ",
      arguments.level.c_str(), arguments.server.cpus.size(), PercentileMs(syncs, 0.5), PercentileMs(syncs, 0.99));
  std::fflush(stdout);
}

int RunL3(const Arguments& arguments, const LoadServer& server, const EncodedFrames& frames) {
  const int runs = RunsOr(arguments, 1000);
  const double seconds = SecondsOr(arguments, 60);
  const AlertWatch watch(server.Connect("quiet"));
  LoadFleet fleet(&server, &frames, "quiet", "l3", runs);
  // Batch means and raw steps of all series are there behind 300 steps.
  fleet.Backlog(300);
  const double warm_begin = BenchNow();
  if (!fleet.Drain(900)) return 1;
  const double warm = BenchNow() - warm_begin;
  const double warm_mib = server.ResidentMib();
  Settle(server);
  (void)fleet.TakeLatencies();
  const double begin = BenchNow(), cpu_begin = server.CpuSeconds(), written_begin = server.WrittenMib();
  fleet.Pace(runs, seconds, runs / 5);
  const double passed = BenchNow() - begin;
  const double cpu = (server.CpuSeconds() - cpu_begin) / passed;
  const double written = (server.WrittenMib() - written_begin) / passed;
  const bool drained = fleet.Drain(30);
  const std::vector<double> acks = fleet.TakeLatencies();
  size_t sent = 0;
  const std::vector<double> alerts = fleet.AlertLatencies(watch, begin, BenchNow(), &sent);
  std::printf(
      "\"runs\": %d, \"frames_per_second\": %d, \"seconds\": %.0f, \"warm_seconds\": %.1f, %s, "
      "\"alerts_sent\": %zu, %s, \"server_cpu_cores\": %.2f, \"written_mib_per_second\": %.1f, \"rss_mib_warm\": %.0f, "
      "\"rss_mib\": %.0f, "
      "\"rss_mib_max\": %.0f, \"data_mib\": %.0f, \"lost\": %lu, \"streams_ended\": %lu}\n",
      runs, runs, seconds, warm, Latencies("ack", acks).c_str(), sent, Latencies("alert", alerts).c_str(), cpu, written,
      warm_mib, server.ResidentMib(), server.ResidentMaxMib(), server.DataMib(),
      static_cast<unsigned long>(fleet.offered() - fleet.acked()), static_cast<unsigned long>(fleet.refused()));
  return drained && alerts.size() == sent ? 0 : 1;
}

int RunL4(const Arguments& arguments, const LoadServer& server, const EncodedFrames& frames) {
  constexpr double kBehindMax = 0.01, kAckMsMax = 100;
  const double seconds = SecondsOr(arguments, 10);
  LoadFleet fleet(&server, &frames, "quiet", "l4", RunsOr(arguments, 100));
  fleet.Backlog(300);
  if (!fleet.Drain(300)) return 1;
  std::printf("\"seconds\": %.0f, \"rates\": [", seconds);
  double knee = 0;
  for (size_t i = 0; i < arguments.rates.size(); ++i) {
    const double rate = arguments.rates[i];
    Settle(server);
    (void)fleet.TakeLatencies();
    const uint64_t acked_before = fleet.acked(), offered_before = fleet.offered();
    const double begin = BenchNow(), cpu_begin = server.CpuSeconds();
    fleet.Pace(rate, seconds);
    const double took = BenchNow() - begin, cpu = (server.CpuSeconds() - cpu_begin) / took;
    const double behind =
        1 - static_cast<double>(fleet.acked() - acked_before) / static_cast<double>(fleet.offered() - offered_before);
    if (!fleet.Drain(300)) return 1;
    const std::vector<double> acks = fleet.TakeLatencies();
    const double ack_ms = PercentileMs(acks, 0.99);
    const bool borne = behind <= kBehindMax && ack_ms <= kAckMsMax && took < seconds * 1.02;
    if (borne) knee = rate;
    std::printf(
        "%s{\"frames_per_second\": %.0f, \"borne\": %s, \"behind\": %.4f, \"client_seconds\": %.2f, "
        "\"server_cpu_cores\": %.2f, %s}",
        i == 0 ? "" : ", ", rate, borne ? "true" : "false", behind, took, cpu, Latencies("ack", acks).c_str());
    std::fflush(stdout);
    if (!borne) break;
  }
  Settle(server);
  (void)fleet.TakeLatencies();
  const uint64_t acked_before = fleet.acked();
  const double begin = BenchNow(), cpu_begin = server.CpuSeconds();
  fleet.Saturate(64);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double took = BenchNow() - begin, cpu = (server.CpuSeconds() - cpu_begin) / took;
  const double most = static_cast<double>(fleet.acked() - acked_before) / took;
  fleet.Saturate(0);
  const bool drained = fleet.Drain(60);
  std::printf(
      "], \"knee_frames_per_second\": %.0f, \"most_frames_per_second\": %.0f, \"most_cpu_cores\": %.2f, "
      "\"rss_mib_max\": %.0f, \"streams_ended\": %lu}\n",
      knee, most, cpu, server.ResidentMaxMib(), static_cast<unsigned long>(fleet.refused()));
  return drained ? 0 : 1;
}

int RunL6(const Arguments& arguments, const LoadServer& server, const EncodedFrames& frames) {
  constexpr uint64_t kBacklog = 600;  // Ten minutes of a frame a second.
  constexpr int kOthers = 100;
  const int runs = RunsOr(arguments, 1000);
  const AlertWatch watch(server.Connect("quiet"));
  LoadFleet others(&server, &frames, "quiet", "others", 2 * kOthers);
  LoadFleet storm(&server, &frames, "noisy", "storm", runs);
  storm.Backlog(2);
  others.Backlog(300);
  if (!storm.Drain(60) || !others.Drain(300)) return 1;
  Settle(server);
  (void)others.TakeLatencies();
  const double quiet_begin = BenchNow();
  others.Pace(2 * kOthers, SecondsOr(arguments, 30), kOthers);
  const double quiet_end = BenchNow();
  if (!others.Drain(30)) return 1;
  const std::vector<double> quiet_acks = others.TakeLatencies();
  storm.Cut();
  storm.Backlog(kBacklog);
  (void)storm.TakeLatencies();
  const double begin = BenchNow(), cpu_begin = server.CpuSeconds();
  double welcomed = 0, took = 600, cpu = 0;  // Of `waiting`.
  bool drained = false;
  std::thread waiting([&] {
    while (BenchNow() < begin + 600 && !drained) {
      storm.KeepConnected();
      if (welcomed == 0 && storm.AllWelcomed()) welcomed = BenchNow() - begin;
      drained = storm.acked() == storm.offered();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    took = BenchNow() - begin;
    cpu = (server.CpuSeconds() - cpu_begin) / took;
  });
  // The others' alerts fall into the first half minute, when the storm is at work.
  others.Pace(2 * kOthers, SecondsOr(arguments, 30), kOthers);
  waiting.join();
  if (!others.Drain(60)) return 1;
  if (storm.refused() > 0) std::fprintf(stderr, "streams ended unasked: %s\n", storm.error().c_str());
  const std::vector<double> acks = others.TakeLatencies();
  size_t quiet_sent = 0, sent = 0;
  const std::vector<double> quiet_alerts = others.AlertLatencies(watch, quiet_begin, quiet_end, &quiet_sent);
  const std::vector<double> alerts = others.AlertLatencies(watch, quiet_end, BenchNow(), &sent);
  const double before = PercentileMs(quiet_alerts, 0.99), meanwhile = PercentileMs(alerts, 0.99);
  std::printf(
      "\"runs\": %d, \"backlog_frames\": %lu, \"drained_seconds\": %.1f, \"all_welcomed_seconds\": %.1f, "
      "\"frames_per_second\": %.0f, \"refused_streams\": %lu, \"server_cpu_cores\": %.2f, \"rss_mib_max\": %.0f, "
      "%s, %s, \"alerts_sent\": [%zu, %zu], %s, %s, \"alert_p99_ratio\": %.2f}\n",
      runs, static_cast<unsigned long>(kBacklog) * static_cast<unsigned long>(runs), took, welcomed,
      static_cast<double>(kBacklog) * runs / took, static_cast<unsigned long>(storm.refused()), cpu,
      server.ResidentMaxMib(), Latencies("ack_before", quiet_acks).c_str(), Latencies("ack_meanwhile", acks).c_str(),
      quiet_sent, sent, Latencies("alert_before", quiet_alerts).c_str(), Latencies("alert_meanwhile", alerts).c_str(),
      before > 0 ? meanwhile / before : 0);
  return drained ? 0 : 1;
}

// Phases by name, three times in turn; the fleet's acknowledgements in each.
std::map<std::string, std::vector<double>> InTurn(
    const LoadServer& server, LoadFleet* fleet, double frames_per_second, double seconds,
    const std::vector<std::pair<std::string, std::function<void(const std::function<void()>&)>>>& phases) {
  std::map<std::string, std::vector<double>> latencies;
  for (int round = 0; round < 3; ++round) {
    for (const auto& [name, around] : phases) {
      Settle(server);
      (void)fleet->TakeLatencies();
      around([&] { fleet->Pace(frames_per_second, seconds); });
      if (!fleet->Drain(60)) std::fprintf(stderr, "%s: not all was acknowledged\n", name.c_str());
      const std::vector<double> taken = fleet->TakeLatencies();
      latencies[name].insert(latencies[name].end(), taken.begin(), taken.end());
    }
  }
  return latencies;
}

double Ratio(const std::map<std::string, std::vector<double>>& latencies, const std::string& of,
             const std::string& to) {
  const double below = PercentileMs(latencies.at(to), 0.99);
  return below > 0 ? PercentileMs(latencies.at(of), 0.99) / below : 0;
}

int RunNoisy(const Arguments& arguments, const LoadServer& server, const EncodedFrames& frames) {
  const double seconds = SecondsOr(arguments, 10), quota = arguments.server.noisy_frames_per_second;
  LoadFleet quiet(&server, &frames, "quiet", "quiet", RunsOr(arguments, 50));
  LoadFleet noisy(&server, &frames, "noisy", "noisy", 20);
  quiet.Backlog(300);
  noisy.Backlog(100);
  if (!quiet.Drain(300) || !noisy.Drain(300)) return 1;
  uint64_t noisy_acked = 0;
  const auto latencies =
      InTurn(server, &quiet, 1000, seconds,
             {{"alone", [](const auto& measure) { measure(); }},
              {"allowed",
               [&](const auto& measure) {
                 std::thread beside([&] { noisy.Pace(quota * 0.9, seconds); });
                 measure();
                 beside.join();
                 (void)noisy.Drain(60);
               }},
              {"noisy", [&](const auto& measure) {
                 noisy.Saturate(512);
                 std::this_thread::sleep_for(std::chrono::seconds(2));  // What the quota lets through at once is gone.
                 const uint64_t before = noisy.acked();
                 (void)quiet.TakeLatencies();
                 measure();
                 noisy_acked += noisy.acked() - before;
                 noisy.Saturate(0);
                 (void)noisy.Drain(120);
               }}});
  std::printf(
      "\"quota_frames_per_second\": %.0f, \"noisy_frames_per_second\": %.0f, %s, %s, %s, "
      "\"p99_noisy_to_alone\": %.2f, \"p99_noisy_to_allowed\": %.2f}\n",
      quota, static_cast<double>(noisy_acked) / (3 * seconds), Latencies("alone", latencies.at("alone")).c_str(),
      Latencies("allowed", latencies.at("allowed")).c_str(), Latencies("noisy", latencies.at("noisy")).c_str(),
      Ratio(latencies, "noisy", "alone"), Ratio(latencies, "noisy", "allowed"));
  return 0;
}

int RunFlood(const Arguments& arguments, const LoadServer& server, const EncodedFrames& frames) {
  const double seconds = SecondsOr(arguments, 10);
  LoadFleet fleet(&server, &frames, "quiet", "flooded", RunsOr(arguments, 50));
  fleet.Backlog(300);
  if (!fleet.Drain(300)) return 1;
  uint64_t connections = 0, stalls = 0;
  const auto during = [&](LoadFlood::Kind kind, uint64_t* opened, const std::function<void()>& measure) {
    const LoadFlood flood(server.address(), kind);
    std::this_thread::sleep_for(std::chrono::seconds(1));
    (void)fleet.TakeLatencies();
    measure();
    *opened += flood.opened();
  };
  const auto latencies = InTurn(
      server, &fleet, 1000, seconds,
      {{"alone", [](const auto& measure) { measure(); }},
       {"connections", [&](const auto& measure) { during(LoadFlood::Kind::kConnections, &connections, measure); }},
       {"stalls", [&](const auto& measure) { during(LoadFlood::Kind::kStalls, &stalls, measure); }}});
  std::printf(
      "\"connections_per_second\": %.0f, \"stalls_opened\": %lu, %s, %s, %s, \"p99_connections_to_alone\": %.2f, "
      "\"p99_stalls_to_alone\": %.2f, \"streams_ended\": %lu}\n",
      static_cast<double>(connections) / (3 * (seconds + 1)), static_cast<unsigned long>(stalls),
      Latencies("alone", latencies.at("alone")).c_str(), Latencies("connections", latencies.at("connections")).c_str(),
      Latencies("stalls", latencies.at("stalls")).c_str(), Ratio(latencies, "connections", "alone"),
      Ratio(latencies, "stalls", "alone"), static_cast<unsigned long>(fleet.refused()));
  return 0;
}

int Usage() {
  std::fprintf(stderr,
               "usage: load_levels --server PATH_OF_BELLWETHERD --level l3|l4|l6|noisy|flood [--server-cpus 0,1] "
               "[--client-cpus 2-15] [--folder DIR] [--seconds S] [--runs R] [--rates 1000,2000] [--config YAML]\n");
  return 2;
}

}  // namespace

int Run(Arguments arguments) {
  if (arguments.level == "noisy") arguments.server.noisy_frames_per_second = 500;
  const std::map<std::string, int (*)(const Arguments&, const LoadServer&, const EncodedFrames&)> levels = {
      {"l3", RunL3}, {"l4", RunL4}, {"l6", RunL6}, {"noisy", RunNoisy}, {"flood", RunFlood}};
  const auto level = levels.find(arguments.level);
  if (level == levels.end() || arguments.server.binary.empty()) return Usage();
  const LoadServer server(arguments.server);
  PrintHead(arguments, server);
  const EncodedFrames frames;
  return level->second(arguments, server, frames);
}

}  // namespace bellwether

int main(int argc, char** argv) {
  bellwether::Arguments arguments;
  if (argc % 2 == 0) return bellwether::Usage();
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--server") {
      arguments.server.binary = value;
    } else if (flag == "--level") {
      arguments.level = value;
    } else if (flag == "--server-cpus") {
      arguments.server.cpus = bellwether::ParseCpus(value);
    } else if (flag == "--client-cpus") {
      bellwether::PinToCpus(bellwether::ParseCpus(value));
    } else if (flag == "--folder") {
      arguments.server.folder = value;
    } else if (flag == "--seconds") {
      arguments.seconds = std::atof(value.c_str());
    } else if (flag == "--runs") {
      arguments.runs = std::atoi(value.c_str());
    } else if (flag == "--rates") {
      arguments.rates.clear();
      for (const char* at = value.c_str(); at != nullptr;
           at = std::strchr(at, ',') ? std::strchr(at, ',') + 1 : nullptr) {
        arguments.rates.push_back(std::atof(at));
      }
    } else if (flag == "--config") {
      arguments.server.config = value;
    } else {
      return bellwether::Usage();
    }
  }
  return bellwether::Run(arguments);
}
