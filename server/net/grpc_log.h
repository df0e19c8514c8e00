// grpc_log.h: gRPC's messages go into our log, at a bounded rate.
//
// gRPC writes a line to stderr for each connection that was reset before it was
// looked at.  A stranger that opened and closed connections filled the log with
// 6,000 lines a second.  Here a second has one line at most, and the next one
// has the number of lines left out.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_NET_GRPC_LOG_H_
#define BELLWETHER_SERVER_NET_GRPC_LOG_H_

namespace bellwether::server {

// From now on; before anything of gRPC is started.
void TakeGrpcLog();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_GRPC_LOG_H_
