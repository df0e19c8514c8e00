// spawn.h: starts bellwether-sender without leaving traces in the trainer.
//
// The sender is spawned in a session of its own, so that Ctrl-C in the
// trainer's terminal does not reach it.  No signal is blocked or handled.
// stdin and stdout are /dev/null, stderr is the trainer's, and descriptor 3 is
// the shared memory.  It has no other descriptor: an inherited pipe would keep
// its reader waiting.  Of the environment it gets everything but LD_*, which is
// meant for the trainer.
//
// It forks once more and the first process ends at once, so that no child stays
// that a trainer's wait() could stumble over.

#ifndef BELLWETHER_CLIENT_LIB_SRC_SPAWN_H_
#define BELLWETHER_CLIENT_LIB_SRC_SPAWN_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace bellwether::client {

inline constexpr int kSenderMemoryFd = 3;

// Where bellwether-sender may be, best first: `given` alone if it is not empty;
// else beside this library, in ../bin and ../../bin from there, and in $PATH.
std::vector<std::string> SenderCandidates(const std::string& given);

// First candidate that is an executable file; empty if none is.
std::string FindSender(const std::vector<std::string>& candidates);

// Starts `path` on the shared memory `fd` and waits for the short-lived first
// process.  Returns 0, an errno, or -1 with `*wait_status` (of waitpid) if the
// first process did not end well.
int SpawnSender(const std::string& path, int fd, int* wait_status);

// A descriptor that polls readable when `pid` ends; -1 if the kernel has none.
int OpenPidFd(pid_t pid);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_SPAWN_H_
