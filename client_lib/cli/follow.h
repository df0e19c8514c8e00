// follow.h: a stream of a server, over all its connections.
//
// A server closes connections that have grown old and is started anew at times.
// A caller of Follow() does not notice.  gRPC retries a call until its first
// message has come, and no further: after that the caller alone knows where to
// go on.

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
  bool again = false;   // The server asked for it: the next call at once.
};

// Makes the call with `context` and reads it to its end; `heard` is to be called for
// each message.
using ReadStream =
    std::function<StreamEnd(Connection* connection, grpc::ClientContext* context, const std::function<void()>& heard)>;

// Calls `read`, and again with a new connection for as long as the server
// cannot be reached, with Backoff between.  Ends with OK, Ctrl-C and any other
// status, or if a server that never answered cannot be reached.  The server is
// looked up anew each time, as are token and certificates: a private server
// comes back with others.
//
// The first try after an end prints nothing.  If that fails, too, the outage
// and its end are printed on stderr.
ExitCode Follow(const ConnectOptions& options, const ReadStream& read);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_FOLLOW_H_
