// wal_bench: what the write-ahead log has the disk write, and how long its fdatasyncs take.
//
//   wal_bench DIRECTORY [--seconds N] [--rate RECORDS_A_SECOND] [--bytes OF_A_RECORD]
//             [--keep MIB] [--turns N]
//
// Appends at a steady rate and every two seconds gives up all but the newest --keep MiB,
// for --seconds a turn, each turn in a new log.  A turn's
// figures begin once the log has been made shorter for the second time.
// Prints one JSON object a turn: bytes that were appended, what the kernel accounts this
// process for (/proc/self/io) and what the disk was given by everybody (/proc/diskstats,
// of the directory's device), fdatasync and append to durable in ms.

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/store/wal.h"

namespace bellwether::server {
namespace {

using Seconds = std::chrono::duration<double>;
using SteadyClock = std::chrono::steady_clock;

struct Arguments {
  std::string directory;
  double seconds = 60, rate = 1000;
  int64_t bytes = 16 << 10, keep_mib = 256, turns = 2;
};

int64_t ProcessBytes() {
  std::ifstream file("/proc/self/io");
  for (std::string word; file >> word;) {
    int64_t value = 0;
    file >> value;
    if (word == "write_bytes:") return value;
  }
  return 0;
}

int64_t DeviceBytes(const std::string& directory) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) return 0;
  std::ifstream file("/proc/diskstats");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    unsigned major_number = 0, minor_number = 0;
    std::string name;
    int64_t reads, reads_merged, read_sectors, read_ms, writes, writes_merged, sectors;
    words >> major_number >> minor_number >> name >> reads >> reads_merged >> read_sectors >> read_ms >> writes >>
        writes_merged >> sectors;
    if (words && major_number == major(info.st_dev) && minor_number == minor(info.st_dev)) return sectors * 512;
  }
  return 0;
}

double Quantile(std::vector<double>* sorted, double q) {
  if (sorted->empty()) return 0;
  std::sort(sorted->begin(), sorted->end());
  return (*sorted)[static_cast<size_t>(q * static_cast<double>(sorted->size() - 1))] * 1e3;
}

void Print(const char* name, std::vector<double> seconds) {
  std::printf(", \"%s\": {\"p50\": %.3f, \"p99\": %.3f, \"p999\": %.3f}", name, Quantile(&seconds, 0.5),
              Quantile(&seconds, 0.99), Quantile(&seconds, 0.999));
}

void Turn(const Arguments& arguments) {
  Wal::Options options;
  options.directory = arguments.directory + "/wal_bench";
  std::filesystem::remove_all(options.directory);
  std::mutex mutex;
  std::deque<std::pair<Lsn, SteadyClock::time_point>> waiting;
  std::vector<double> acks;
  auto opened = Wal::Open(options, [&](Lsn durable) {
    const auto now = SteadyClock::now();
    std::lock_guard lock(mutex);
    for (; !waiting.empty() && waiting.front().first <= durable; waiting.pop_front()) {
      acks.push_back(Seconds(now - waiting.front().second).count());
    }
  });
  if (!opened.ok()) {
    std::fprintf(stderr, "%s\n", std::string(opened.status().message()).c_str());
    std::exit(1);
  }
  Wal& wal = **opened;
  std::mt19937_64 random(1);
  WalRecord record;
  record.kind = WalKind::kMessage;
  while (static_cast<int64_t>(record.payload.size()) < arguments.bytes) record.payload += static_cast<char>(random());

  // As in the server, beside whoever appends.
  std::atomic<int> shortened = 0;
  std::atomic<bool> stop = false;
  std::thread shortener([&] {
    while (!stop) {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      const Lsn keep = wal.TailBegin(arguments.keep_mib << 20);
      if (keep > 0 && wal.Truncate(keep).ok()) ++shortened;
    }
  });

  const auto begin = SteadyClock::now();
  auto measured_from = begin;
  int64_t appended = 0, process = 0, device = 0;
  bool measures = false;
  for (int64_t sent = 0;; ++sent) {
    const auto due =
        begin + std::chrono::duration_cast<SteadyClock::duration>(Seconds(static_cast<double>(sent) / arguments.rate));
    std::this_thread::sleep_until(due);
    const auto now = SteadyClock::now();
    if (measures && Seconds(now - measured_from).count() >= arguments.seconds) break;
    if (!measures && shortened >= 2) {
      measures = true;
      std::vector<double> before;
      wal.TakeSyncSeconds(&before);
      std::lock_guard lock(mutex);
      acks.clear();
      appended = 0;
      measured_from = now;
      process = ProcessBytes();
      device = DeviceBytes(arguments.directory);
    }
    std::lock_guard lock(mutex);  // Its LSN is in the list before it is durable.
    const auto lsn = wal.Append(WalRecord(record));
    if (!lsn.ok()) continue;
    waiting.emplace_back(*lsn, due);
    appended += arguments.bytes;
  }
  (void)wal.Sync(wal.last_lsn());
  stop = true;
  shortener.join();
  std::vector<double> syncs;
  wal.TakeSyncSeconds(&syncs);
  process = ProcessBytes() - process;
  device = DeviceBytes(arguments.directory) - device;
  const auto log_bytes = static_cast<double>(appended);
  std::printf(
      "{\"bench\": \"wal\", \"log_mib\": %.0f, \"process_per_log_byte\": %.2f, "
      "\"disk_per_log_byte\": %.2f, \"syncs\": %zu",
      log_bytes / (1 << 20), static_cast<double>(process) / log_bytes, static_cast<double>(device) / log_bytes,
      syncs.size());
  Print("fdatasync_ms", syncs);
  {
    std::lock_guard lock(mutex);
    Print("durable_ms", acks);
  }
  std::printf("}\n");
  std::fflush(stdout);
  (void)wal.Close();
  std::filesystem::remove_all(options.directory);
}

}  // namespace
}  // namespace bellwether::server

int main(int argc, char** argv) {
  bellwether::server::Arguments arguments;
  if (argc > 1) arguments.directory = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--seconds") arguments.seconds = std::atof(argv[i + 1]);
    if (flag == "--rate") arguments.rate = std::atof(argv[i + 1]);
    if (flag == "--bytes") arguments.bytes = std::atol(argv[i + 1]);
    if (flag == "--keep") arguments.keep_mib = std::atol(argv[i + 1]);
    if (flag == "--turns") arguments.turns = std::atol(argv[i + 1]);
  }
  if (arguments.directory.empty()) {
    std::fprintf(stderr,
                 "usage: wal_bench DIRECTORY [--seconds N] [--rate RECORDS_A_SECOND] [--bytes OF_A_RECORD]\n"
                 "                 [--keep MIB] [--turns N]\n");
    return 2;
  }
  for (int64_t turn = 0; turn < arguments.turns; ++turn) bellwether::server::Turn(arguments);
  return 0;
}
