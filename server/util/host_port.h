// host_port.h: where a server listens, as people write it.

#ifndef BELLWETHER_SERVER_UTIL_HOST_PORT_H_
#define BELLWETHER_SERVER_UTIL_HOST_PORT_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace bellwether::server {

struct HostPort {
  std::string host;
  int port = 0;  // 0 = any free one.
};

// Parts host:port at its last colon.  INVALID_ARGUMENT: there is none, or the
// port is no decimal number of 0 to 65535; calls the address `key`.
absl::StatusOr<HostPort> SplitHostPort(std::string_view key, std::string_view address);

// The host as look-ups want it: an IPv6 address without its brackets.
std::string BareHost(std::string_view host);

// Of host:port or unix:/path: whether only this machine reaches it.
bool IsLoopback(std::string_view address);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_HOST_PORT_H_
