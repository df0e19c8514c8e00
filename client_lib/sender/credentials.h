// credentials.h: how the sender reaches and convinces a server.
//
// Files are read anew for each connection, so that a rotated certificate or
// token is used from the next one on.  A token goes only over TLS or within
// this machine.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_CREDENTIALS_H_
#define BELLWETHER_CLIENT_LIB_SENDER_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <string_view>

#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

// True for unix sockets and loopback addresses.
bool IsLocalServer(std::string_view address);

// The arguments of RELIABILITY's table: keepalive 20 s / 8 s, no BDP probe, a
// connection of its own.  Local servers are never reached through a proxy.
grpc::ChannelArguments ClientChannelArguments(std::string_view address);

struct Connection {
  std::shared_ptr<grpc::Channel> channel;
  std::string token;    // Empty = none.
  std::string warning;  // Something a person should change; empty = nothing.
  std::string error;    // Not empty: `channel` is null and this says why.
};

// Reads the files and makes a channel.  Does not connect yet.
Connection OpenConnection(const SenderConfig& config, const std::string& address);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_CREDENTIALS_H_
