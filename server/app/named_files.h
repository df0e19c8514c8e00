// named_files.h: the files that the configuration names, read as a server reads them.
//
// An error has all findings, each as `key: file: ...` in a line of its own.
// Templates of webhooks are not among them: ReadConfig reads those.

#ifndef BELLWETHER_SERVER_APP_NAMED_FILES_H_
#define BELLWETHER_SERVER_APP_NAMED_FILES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/app/server.h"

namespace bellwether::server {

// Reads rules, policy and the cluster's connection strings into *options, and
// looks at the identities.  `dsn`: BELLWETHER_CLUSTER_DSN; null = not set.
absl::Status ReadNamedFiles(const char* dsn, ServerOptions* options);

// Looks at those that the parts of a server open by themselves: certificates,
// keys and tokens.  Tokens are to be there, though a server starts without.
absl::Status CheckNamedFiles(const ServerOptions& options, int64_t now_unix_s);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_APP_NAMED_FILES_H_
