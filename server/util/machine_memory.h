// machine_memory.h: how much memory this process may take.

#ifndef BELLWETHER_SERVER_UTIL_MACHINE_MEMORY_H_
#define BELLWETHER_SERVER_UTIL_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>

namespace bellwether::server {

// Bytes: the machine's, or the smallest limit of the control groups (versions 1 and 2) that the
// process is in, if that is less.  0 = unknown.  `root` is put before /proc and /sys.
int64_t MachineMemoryBytes(const std::string& root = "");

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_MACHINE_MEMORY_H_
