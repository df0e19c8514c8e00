#include "server/app/cluster_part.h"

namespace bellwether::server {

absl::Status CheckClusterBuild(const ClusterOptions& options) {
  if (!options.on()) return absl::OkStatus();
  return absl::UnimplementedError(
      "cluster.dsn_file, cluster.dsn_files, BELLWETHER_CLUSTER_DSN: this bellwetherd was built with "
      "BELLWETHER_CLUSTER=OFF, and can only be alone: set none of them, or take a build with the cluster");
}

absl::StatusOr<std::unique_ptr<ClusterPart>> ClusterPart::Make(Options options, const TlsWatch*, Access*, Counters*,
                                                               Clock*) {
  return CheckClusterBuild(options.cluster);
}

}  // namespace bellwether::server
