// connection_source.h: the source that a connection counts for, where
// connections are limited by address.

#ifndef BELLWETHER_SERVER_UTIL_CONNECTION_SOURCE_H_
#define BELLWETHER_SERVER_UTIL_CONNECTION_SOURCE_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <string>

namespace bellwether::server {

// The IPv4 address, the /64 with IPv6, the user of a Unix socket.  `peer` is
// the address from accept() of `fd`.
std::string ConnectionSource(int fd, const sockaddr_storage& peer);

// After an accept() for which descriptors or memory do not suffice; the connection waits in the kernel's queue.
inline constexpr useconds_t kShortOfDescriptorsUs = 10'000;

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_UTIL_CONNECTION_SOURCE_H_
