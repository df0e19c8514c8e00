// config.h: flags, environment and the YAML file become Options.
//
// The file is read by the reader of rules, policy and access files
// (util/strict_yaml.h).  An unknown key, a wrong type or a value out of range
// is an error `file:line:col: message`, and all of them are reported at once.
// Flags wire the process; the file holds what people tune.

#ifndef BELLWETHER_SERVER_APP_CONFIG_H_
#define BELLWETHER_SERVER_APP_CONFIG_H_

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/server.h"

namespace bellwether::server {

// Reads `path` over `*options` and returns how many keys it holds.
// INVALID_ARGUMENT: every finding, a line each; then *options is as it was, and
// *legible, if it is not null, has what could be read.  NOT_FOUND: no such file.
absl::StatusOr<size_t> ReadConfig(const std::string& path, ServerOptions* options, ServerOptions* legible = nullptr);

// INVALID_ARGUMENT, with the address named `key`: it is neither host:port nor
// unix:/path.  The web's address is host:port, or "" for none.
absl::Status CheckGrpcAddress(std::string_view key, std::string_view address);
absl::Status CheckWebAddress(std::string_view key, std::string_view address);
// INVALID_ARGUMENT: begins neither with https:// nor with http://; "" is none.
absl::Status CheckPageUrl(std::string_view key, std::string_view url);
// FAILED_PRECONDITION: an address off loopback that anybody might use.  Once all
// options are known, the page's token among them.
absl::Status CheckProtection(const ServerOptions& options);

// When a change of a key counts.  The file itself is read at start alone.
enum class ConfigChange {
  kRestart,       // At the next start.
  kReload,        // The key at the next start; the contents of the file that it names at a reload.
  kReloadOrSeen,  // As kReload, and when that file changes.
  kSeen,          // The key at the next start; the contents of that file when they change.
};

// docs/reference/configuration.md: every key, as `bellwetherd config reference` prints it.
std::string ConfigReference();

// The options as key: value, secrets redacted; for GetServerInfo and the log.
std::map<std::string, std::string> DescribeOptions(const ServerOptions& options);
std::map<std::string, double> DescribeLimits(const ServerOptions& options);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_APP_CONFIG_H_
