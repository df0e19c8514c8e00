// config.h: flags, environment and the YAML file become Options.
//
// The file is strict: an unknown key, a wrong type or a value out of range is
// an error `file:line:col: message`, and all of them are reported at once.
// Flags wire the process; the file holds what people tune.

#ifndef BELLWETHER_SERVER_CONFIG_H_
#define BELLWETHER_SERVER_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/server.h"

namespace bellwether::server {

// Reads `path` over `*options`.  INVALID_ARGUMENT: every finding, a line each;
// then *options is as it was.  NOT_FOUND: no such file.
absl::Status ReadConfig(const std::string& path, ServerOptions* options);

// The options as key: value, secrets redacted; for GetServerInfo and the log.
std::map<std::string, std::string> DescribeOptions(const ServerOptions& options);
std::map<std::string, double> DescribeLimits(const ServerOptions& options);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CONFIG_H_
