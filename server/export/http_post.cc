#include "server/export/http_post.h"

#include <httplib.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace bellwether::server {

absl::StatusOr<UrlParts> SplitUrl(const std::string& url) {
  const bool known = absl::StartsWith(url, "http://") || absl::StartsWith(url, "https://");
  const size_t host = url.find("://") + 3;
  const size_t path = known ? url.find('/', host) : std::string::npos;
  const std::string authority = known ? url.substr(host, path == std::string::npos ? path : path - host) : "";
  if (authority.empty() ||
      std::any_of(url.begin(), url.end(), [](char c) { return absl::ascii_isspace(c) || absl::ascii_iscntrl(c); })) {
    return absl::InvalidArgumentError(absl::StrCat("\"", url, "\": must be http://host[:port]/path or https://..."));
  }
  if (absl::StrContains(authority, '@')) {
    return absl::InvalidArgumentError("an address must hold no user and password");
  }
  if (path == std::string::npos) return UrlParts{url, "/"};
  return UrlParts{url.substr(0, path), url.substr(path)};
}

absl::Status PostJson(const UrlParts& url, const std::string& body, int64_t timeout_ns) {
  const auto timeout = std::chrono::nanoseconds(timeout_ns);
  httplib::Client client(url.origin);
  if (!client.is_valid()) return absl::UnavailableError(absl::StrCat(url.origin, ": cannot be reached by this build"));
  client.set_connection_timeout(timeout);
  client.set_read_timeout(timeout);
  client.set_write_timeout(timeout);
  const httplib::Result result = client.Post(url.path, body, "application/json");
  if (!result) return absl::UnavailableError(absl::StrCat(url.origin, ": ", httplib::to_string(result.error())));
  if (result->status >= 200 && result->status < 300) return absl::OkStatus();
  // What a receiver says of a bad request is what one needs to mend it.
  return absl::UnavailableError(
      absl::StrCat(url.origin, ": answered ", result->status, " ", result->body.substr(0, 200)));
}

}  // namespace bellwether::server
