#include "server/http/access.h"

#include <arpa/inet.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace bellwether::server {

std::string_view CookieValue(std::string_view header, std::string_view name) {
  for (absl::string_view pair : absl::StrSplit(absl::string_view(header.data(), header.size()), ';')) {
    pair = absl::StripAsciiWhitespace(pair);
    const size_t equals = pair.find('=');
    if (equals != absl::string_view::npos && pair.substr(0, equals) == absl::string_view(name.data(), name.size())) {
      return {pair.data() + equals + 1, pair.size() - equals - 1};
    }
  }
  return {};
}

bool HostIsAllowed(std::string_view host, const std::vector<std::string>& allowed) {
  std::string name;
  if (!host.empty() && host.front() == '[') {
    const size_t end = host.find(']');
    if (end == std::string_view::npos) return false;
    name = std::string(host.substr(1, end - 1));
  } else {
    name = std::string(host.substr(0, host.find(':')));
  }
  // A name can be made to point anywhere by whoever owns it, an address cannot.
  in6_addr address;
  if (inet_pton(AF_INET, name.c_str(), &address) == 1 || inet_pton(AF_INET6, name.c_str(), &address) == 1) return true;
  if (absl::EqualsIgnoreCase(name, "localhost")) return true;
  return std::any_of(allowed.begin(), allowed.end(),
                     [&name](const std::string& entry) { return entry == "*" || absl::EqualsIgnoreCase(entry, name); });
}

}  // namespace bellwether::server
