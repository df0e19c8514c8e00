// grpc_status.h: the one place where absl::Status becomes grpc::Status.

#ifndef BELLWETHER_SERVER_UTIL_GRPC_STATUS_H_
#define BELLWETHER_SERVER_UTIL_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace bellwether::server {

// The codes are numbered alike.
inline grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_GRPC_STATUS_H_
