// machine_memory.h: how much memory this process may take.

#ifndef BELLWETHER_SERVER_UTIL_MACHINE_MEMORY_H_
#define BELLWETHER_SERVER_UTIL_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>

namespace bellwether::server {

int64_t MachineMemoryBytes();
// The smallest limit of the control groups (versions 1 and 2) that the process is in, if that is
// less than the machine's.  `root` is put before /proc and /sys.
int64_t MemoryBytesWithinGroups(int64_t machine_bytes, const std::string& root = "");

// Resident memory of this process; 0 = not known.
int64_t ResidentBytes();
// Gives the system what this process has freed.  The C library keeps it where something that
// still lives lies behind it.  Takes some 0.2 s a GB; threads that allocate wait for a part of it.
void ReturnFreedMemory();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_MACHINE_MEMORY_H_
