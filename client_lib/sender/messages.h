// messages.h: Hello and Bye from the trainer's options.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_MESSAGES_H_
#define BELLWETHER_CLIENT_LIB_SENDER_MESSAGES_H_

#include <cstdint>
#include <string>

#include "bellwether/v1/ingest.pb.h"
#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

inline constexpr uint32_t kProtocol = 1;

// What this client has lost since it started.
struct LossTotals {
  uint64_t dropped = 0;   // Frames.
  uint64_t stripped = 0;  // Frames that were sent without their heads.
};

// As if nothing were held or lost yet.
v1::ClientMessage MakeHello(const SenderConfig& config);
v1::ClientMessage MakeBye(v1::ByeReason reason, uint64_t last_seq, const std::string& detail);
v1::ClientMessage MakeHeartbeat(int64_t time_unix_ns, const LossTotals& losses);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_MESSAGES_H_
