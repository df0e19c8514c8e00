// private_server.h: a user's own bellwetherd, which a training script starts and which ends when idle.
//
// client_lib/python/bellwether/_server/private_server.py is where it comes from; both start it
// alike, and each finds what the other has started.

#ifndef BELLWETHER_CLI_PRIVATE_SERVER_H_
#define BELLWETHER_CLI_PRIVATE_SERVER_H_

#include <string>

namespace bellwether::cli {

struct PrivateServer {
  std::string grpc;  // Empty: there is none, or its process is gone.
  std::string page;  // "http://127.0.0.1:43210", without the token.
  std::string token;
  std::string data;  // Its folder.
};

// The one that runs on this machine.
PrivateServer FindPrivateServer();
// The same, started over its data if it does not run.  Empty `grpc` with `*why` set if that fails.
PrivateServer JoinOrStartPrivateServer(std::string* why);
// Where gRPC is of the private server whose page is at this host:port; empty = not its.
std::string PrivateGrpcOf(const std::string& page);
// Which folder has the runs of the private server, and that `command` starts it over them; empty if
// it has none.
std::string EarlierRuns(const std::string& command);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_PRIVATE_SERVER_H_
