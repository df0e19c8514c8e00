#include "server/util/machine_memory.h"

#include <malloc.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace bellwether::server {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// What the file says; it is missing where there is no such group, and says "max" or a number
// beyond all memory where there is no limit.
int64_t LimitIn(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  int64_t bytes = 0;
  return file >> word && absl::SimpleAtoi(word, &bytes) && bytes > 0 ? bytes : kUnlimited;
}

// Of the group and all that it is in.  A container sees its own group as the root, whatever
// /proc says it is called outside.
int64_t SmallestLimit(const std::string& mount, std::string group, const std::string& file) {
  int64_t smallest = LimitIn(mount + "/" + file);
  while (group.size() > 1) {
    smallest = std::min(smallest, LimitIn(mount + group + "/" + file));
    group.resize(group.rfind('/'));
  }
  return smallest;
}

}  // namespace

int64_t MachineMemoryBytes() {
  struct sysinfo info {};
  // Not from /proc/meminfo, which services may not see.
  return sysinfo(&info) == 0 ? static_cast<int64_t>(info.totalram) * info.mem_unit : 0;
}

int64_t MemoryBytesWithinGroups(int64_t machine_bytes, const std::string& root) {
  int64_t bytes = machine_bytes;
  std::ifstream groups(root + "/proc/self/cgroup");
  // hierarchy:controllers:group
  for (std::string line; std::getline(groups, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3 || !absl::StartsWith(fields[2], "/")) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (fields[1].empty()) {
      bytes = std::min(bytes, SmallestLimit(root + "/sys/fs/cgroup", fields[2], "memory.max"));
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      bytes = std::min(bytes, SmallestLimit(root + "/sys/fs/cgroup/memory", fields[2], "memory.limit_in_bytes"));
    }
  }
  return bytes;
}

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  return file >> pages >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

void ReturnFreedMemory() { (void)malloc_trim(0); }

}  // namespace bellwether::server
