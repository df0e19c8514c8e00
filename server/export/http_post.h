// http_post.h: JSON to an address that people configured.

#ifndef BELLWETHER_SERVER_EXPORT_HTTP_POST_H_
#define BELLWETHER_SERVER_EXPORT_HTTP_POST_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

struct UrlParts {
  std::string origin;  // Scheme, host and port.
  std::string path;    // Begins with a slash.
};

// INVALID_ARGUMENT says what is wrong with the url: it must be http or https
// and hold neither a user nor a password.
absl::StatusOr<UrlParts> SplitUrl(const std::string& url);

// POSTs `body` as application/json.  UNAVAILABLE: no answer within `timeout_ns`
// (to connect, write and read, each), or one that is not 2xx; says which.
absl::Status PostJson(const UrlParts& url, const std::string& body, int64_t timeout_ns);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_HTTP_POST_H_
