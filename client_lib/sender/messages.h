// messages.h: Hello and Bye from the trainer's options.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_MESSAGES_H_
#define BELLWETHER_CLIENT_LIB_SENDER_MESSAGES_H_

#include <cstdint>
#include <string>

#include "bellwether/v1/ingest.pb.h"
#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

inline constexpr uint32_t kProtocol = 1;

v1::ClientMessage MakeHello(const SenderConfig& config, uint64_t first_unacked_seq, uint64_t dropped_total);
v1::ClientMessage MakeBye(v1::ByeReason reason, uint64_t last_seq, const std::string& detail);
v1::ClientMessage MakeHeartbeat(int64_t time_unix_ns, uint64_t dropped_total);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_MESSAGES_H_
