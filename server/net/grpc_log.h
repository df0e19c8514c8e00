// grpc_log.h: what gRPC has to say goes into our log, and not without end.
//
// gRPC writes a line to stderr for each connection that was reset before it was
// looked at: a stranger who opens and closes filled the log with 6,000 lines a
// second.  Here a second has one line at most, and the next one says how many
// were left out.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_NET_GRPC_LOG_H_
#define BELLWETHER_SERVER_NET_GRPC_LOG_H_

namespace bellwether::server {

// From now on; before anything of gRPC is started.
void TakeGrpcLog();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_GRPC_LOG_H_
