// cluster_options.h: the settings of a server of a cluster.  A build without the cluster
// reads them, too, to say what it lacks.

#ifndef BELLWETHER_SERVER_CLUSTER_CLUSTER_OPTIONS_H_
#define BELLWETHER_SERVER_CLUSTER_CLUSTER_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/access/tls_files.h"

namespace bellwether::server {

struct ClusterOptions {
  std::vector<std::string> dsns;  // Of the cluster's databases, in their order; empty = this server is alone.
  // Where they were read from, for people: one of them alone is set, if any.
  std::string dsn_file;
  std::vector<std::string> dsn_files;
  std::string node;           // This server's name, unique in the cluster; "" = its host's.
  std::string address;        // Where clients and the other servers reach it, host:port; "" = where it listens.
  int64_t lease_seconds = 5;  // 2..60
  int connections = 4;        // To each database, that commit frames, 1..64; up to ten more do the rest.
  // The certificate that this server presents to the others, and the authority that signed
  // theirs (client_ca); "" = those for clients (tls.*).
  TlsFiles peer;

  bool on() const { return !dsns.empty(); }
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_CLUSTER_OPTIONS_H_
