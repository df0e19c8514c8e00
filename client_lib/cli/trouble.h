// trouble.h: what gRPC's errors mean, and what can be done about them.

#ifndef BELLWETHER_CLI_TROUBLE_H_
#define BELLWETHER_CLI_TROUBLE_H_

#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include <string>

#include "cli/connect.h"

namespace bellwether::cli {

// Empty if `address` is host:port, [host]:port, or unix:PATH; else what it must be.
std::string WhyNoAddress(const std::string& address);

// Why a call came to nothing (UNAVAILABLE, DEADLINE_EXCEEDED).  Where gRPC does not know, the
// address is asked what it speaks, for two seconds at most.
std::string WhyUnreachable(const Connection& connection, const grpc::Status& status);

// What the server's words leave open: names near the one that it does not know.  May ask it.
std::string Suggestion(Connection* connection, const grpc::Status& status);

// On a terminal a request that only asks takes the beginning of a run's name.  Where `status` says
// that no run has the name, and one run alone begins so, its name is put into `request` and told on
// stderr.  True: the call is to be made again.
bool CompleteRunNames(Connection* connection, const grpc::Status& status, google::protobuf::Message* request);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_TROUBLE_H_
