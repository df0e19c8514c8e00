// follow.h: a stream of a server, over all its connections.
//
// A server closes connections that have grown old and is started anew at times; who
// follows something there need not know.  gRPC retries a call until its first message
// has come, and no further: behind that the caller alone knows where to go on.

#ifndef BELLWETHER_CLI_FOLLOW_H_
#define BELLWETHER_CLI_FOLLOW_H_

#include <grpcpp/grpcpp.h>

#include <functional>

#include "cli/connect.h"
#include "cli/exit_code.h"

namespace bellwether::cli {

// How one call ended.
struct StreamEnd {
  grpc::Status status;
  bool enough = false;  // No more is wanted, whatever the status.
  bool again = false;   // The server said so: the next call at once.
};

// Makes the call with `context` and reads it to its end; `heard` is to be called for
// each message.
using ReadStream =
    std::function<StreamEnd(Connection* connection, grpc::ClientContext* context, const std::function<void()>& heard)>;

// Calls `read`, and again with a new connection for as long as the server cannot be
// reached, with Backoff between.  Ends with OK, Ctrl-C and any other status, and where a
// server of which nothing was ever heard cannot be reached.  It is looked up anew each
// time, as are token and certificates: a private server comes back with others.
//
// The first try after an end is made without a word; where that fails, too, the outage
// is told on stderr, and its end.
ExitCode Follow(const ConnectOptions& options, const ReadStream& read);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_FOLLOW_H_
