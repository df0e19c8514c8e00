// watchdog.h: keeps one bellwether-sender alive for one client.
//
// One detached thread per client that has pushed.  It starts the sender, waits
// for its end, and starts it again with backoff unless it ended for good.  It
// outlives the client: what was pushed is still sent after bw_client_destroy(),
// for at most kDrainSeconds.  All signals are blocked in it, so a trainer's
// handlers never run there.  It prints nothing and never ends the process.

#ifndef BELLWETHER_CLIENT_LIB_SRC_WATCHDOG_H_
#define BELLWETHER_CLIENT_LIB_SRC_WATCHDOG_H_

#include <chrono>
#include <memory>
#include <string>

#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

// How long a sender may go on after its trainer is closed or gone.
inline constexpr std::chrono::seconds kDrainSeconds{60};

// Starts the thread, which keeps `memory` mapped.  Returns 0 or an errno.
int StartWatchdog(std::shared_ptr<SharedMemory> memory, const std::string& sender_path);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_WATCHDOG_H_
