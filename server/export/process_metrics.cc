#include "server/export/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace bellwether::server {
namespace {

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Seconds since 1970 at which the machine was started; 0 if unknown.
double BootTime() {
  for (absl::string_view line : absl::StrSplit(ReadFile("/proc/stat"), '\n')) {
    double seconds;
    if (absl::ConsumePrefix(&line, "btime ") && absl::SimpleAtod(line, &seconds)) return seconds;
  }
  return 0;
}

}  // namespace

void AddProcessMetrics(FamilySet* set) {
  const auto add = [set](const char* name, double value) { set->Add(SeriesLevel::kServer, name, {}, value); };
  // Fields from the third on follow the command, which may hold anything.
  const std::string stat = ReadFile("/proc/self/stat");
  const size_t command_end = stat.rfind(')');
  if (command_end != std::string::npos) {
    const std::vector<std::string> field = absl::StrSplit(stat.substr(command_end + 1), ' ', absl::SkipEmpty());
    const auto number = [&field](size_t one_based) {
      double value = 0;
      return one_based - 3 < field.size() && absl::SimpleAtod(field[one_based - 3], &value) ? value : 0;
    };
    const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    add("process_cpu_seconds_total", (number(14) + number(15)) / ticks);
    add("process_threads", number(20));
    add("process_virtual_memory_bytes", number(23));
    add("process_resident_memory_bytes", number(24) * static_cast<double>(sysconf(_SC_PAGESIZE)));
    if (const double boot = BootTime(); boot > 0) add("process_start_time_seconds", boot + number(22) / ticks);
  }
  if (DIR* const directory = opendir("/proc/self/fd")) {
    int count = -3;  // ".", ".." and this one.
    while (readdir(directory) != nullptr) ++count;
    closedir(directory);
    add("process_open_fds", count);
  }
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) add("process_max_fds", static_cast<double>(limit.rlim_cur));
}

}  // namespace bellwether::server
