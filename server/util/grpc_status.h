// grpc_status.h: the one place where absl::Status becomes grpc::Status.

#ifndef BELLWETHER_SERVER_UTIL_GRPC_STATUS_H_
#define BELLWETHER_SERVER_UTIL_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace bellwether::server {

namespace grpc_status_internal {

inline void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

inline void AppendBytes(int field, absl::string_view bytes, std::string* out) {
  out->push_back(static_cast<char>(field << 3 | 2));
  AppendVarint(bytes.size(), out);
  out->append(bytes.data(), bytes.size());
}

}  // namespace grpc_status_internal

// The codes are numbered alike.  Payloads become the details of a
// google.rpc.Status { code = 1, message = 2, details = 3 }, which clients read.
inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string details;
  status.ForEachPayload([&details](absl::string_view type_url, const absl::Cord& value) {
    std::string any;
    grpc_status_internal::AppendBytes(1, type_url, &any);
    grpc_status_internal::AppendBytes(2, std::string(value), &any);
    grpc_status_internal::AppendBytes(3, any, &details);
  });
  const std::string message(status.message());
  if (!details.empty()) {
    std::string head(1, static_cast<char>(1 << 3));
    grpc_status_internal::AppendVarint(static_cast<uint64_t>(status.raw_code()), &head);
    grpc_status_internal::AppendBytes(2, message, &head);
    details.insert(0, head);
  }
  return {static_cast<grpc::StatusCode>(status.raw_code()), message, details};
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_GRPC_STATUS_H_
