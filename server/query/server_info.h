// server_info.h: what a server reports about itself to GetServerInfo.

#ifndef BELLWETHER_SERVER_QUERY_SERVER_INFO_H_
#define BELLWETHER_SERVER_QUERY_SERVER_INFO_H_

#include <cstdint>
#include <map>
#include <string>

namespace bellwether::server {

struct ServerInfo {
  std::string version, revision, grpc_version, backend;
  std::string storage_path, http_address, grpc_address;
  int64_t started_unix_ns = 0;
  std::map<std::string, std::string> options;  // In force; secrets redacted.
  std::map<std::string, double> limits;
  std::map<std::string, double> counters;  // Counters and gauges, as `name{label=value}`.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_SERVER_INFO_H_
