// cluster_part.h: what makes the Server one of a cluster: the shared log, the leases, and
// what the other servers are asked with.
//
// Built with BELLWETHER_CLUSTER (cluster_part.cc) or without (cluster_part_none.cc), which
// is decided in CMake alone.

#ifndef BELLWETHER_SERVER_APP_CLUSTER_PART_H_
#define BELLWETHER_SERVER_APP_CLUSTER_PART_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/access/access.h"
#include "server/access/tls_files.h"
#include "server/cluster/cluster_options.h"
#include "server/engine/engine.h"
#include "server/query/ports/peers.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// UNIMPLEMENTED: the options want a cluster, and this build has none.
absl::Status CheckClusterBuild(const ClusterOptions& options);

// Functions in the order of their calls.  Not thread-safe.
class ClusterPart {
 public:
  struct Options {
    ClusterOptions cluster;
    TlsFiles tls;  // For clients; for the other servers, too, where cluster.peer names none.
    unsigned tls_refresh_seconds = 10;
    int64_t call_ms_max = 30'000;  // Of a call to another server.
  };
  // All must outlive the part; `tls` is null without TLS.  UNIMPLEMENTED: as CheckClusterBuild().
  static absl::StatusOr<std::unique_ptr<ClusterPart>> Make(Options options, const TlsWatch* tls, Access* access,
                                                           Counters* counters, Clock* clock);
  virtual ~ClusterPart() = default;  // After the engine's end.

  // Gives the engine, which is not open yet, the cluster's log and partitions.
  virtual void ShareLog(Engine::Options* engine) = 0;
  // What the other servers are asked with; none is before Join().
  virtual absl::StatusOr<Peers*> StartPeers() = 0;
  // `address` is where this server listens.
  virtual absl::Status Join(const std::string& address, Engine* engine) = 0;
  // Each second.
  virtual void Tick() = 0;
  // Tells the others that this server ends; does nothing before Join().
  virtual void Announce() = 0;
  virtual void Leave() = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_APP_CLUSTER_PART_H_
