#include "server/util/host_port.h"

#include <charconv>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "server/util/clean_text.h"

namespace bellwether::server {
namespace {

constexpr int kPortMax = 65535;
constexpr size_t kAddressBytesShown = 300;

// -1: it is none.
int PortOf(std::string_view text) {
  int port = -1;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, port);
  const bool octal = text.size() > 1 && text[0] == '0';
  return error == std::errc() && stopped == end && !octal && port >= 0 && port <= kPortMax ? port : -1;
}

}  // namespace

absl::StatusOr<HostPort> SplitHostPort(std::string_view key, std::string_view address) {
  const size_t colon = address.rfind(':');
  const int port = colon == std::string_view::npos ? -1 : PortOf(address.substr(colon + 1));
  if (port < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(absl::string_view(key.data(), key.size()), " = ", CleanText(address, kAddressBytesShown),
                     ": must be host:port, the port a decimal number of 0 to ", kPortMax));
  }
  return HostPort{std::string(address.substr(0, colon)), port};
}

bool IsLoopback(std::string_view address) {
  return address.starts_with("unix:") || address.starts_with("127.") || address.starts_with("localhost:") ||
         address.starts_with("[::1]:");
}

std::string BareHost(std::string_view host) {
  const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return std::string(brackets ? host.substr(1, host.size() - 2) : host);
}

}  // namespace bellwether::server
