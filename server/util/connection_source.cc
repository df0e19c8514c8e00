#include "server/util/connection_source.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace bellwether::server {

std::string ConnectionSource(int fd, const sockaddr_storage& peer) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (peer.ss_family == AF_INET) {
    const auto& address = reinterpret_cast<const sockaddr_in&>(peer);
    return inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size());
  }
  if (peer.ss_family == AF_INET6) {
    in6_addr address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&address)) return inet_ntop(AF_INET, &address.s6_addr[12], text.data(), text.size());
    std::memset(&address.s6_addr[8], 0, 8);  // Whoever has one address there has 2^64.
    return inet_ntop(AF_INET6, &address, text.data(), text.size());
  }
  ucred user{};
  socklen_t size = sizeof(user);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &user, &size) == 0 ? absl::StrCat("user ", user.uid) : "unix";
}

}  // namespace bellwether::server
