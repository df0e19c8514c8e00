// connection_strings.h: how the databases of a cluster are reached, from the files
// that the configuration names or from the environment.

#ifndef BELLWETHER_SERVER_APP_CONNECTION_STRINGS_H_
#define BELLWETHER_SERVER_APP_CONNECTION_STRINGS_H_

#include "absl/status/status.h"
#include "server/cluster/cluster_options.h"

namespace bellwether::server {

// Fills in cluster->dsns.  `environment`: BELLWETHER_CLUSTER_DSN, which is preferred to
// dsn_file; null = not set.  An error has a line for each file that is bad, with its key.
absl::Status ReadConnectionStrings(const char* environment, ClusterOptions* cluster);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_APP_CONNECTION_STRINGS_H_
