// members.h: one server of a cluster, in each of its databases.
//
// Each database has leases, and a list of servers, of its own, and each is looked
// after by itself (member.h): one that is away stops nothing in the others.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_MEMBERS_H_
#define BELLWETHER_SERVER_CLUSTER_MEMBERS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cluster/member.h"

namespace bellwether::server {

class Members {
 public:
  // As Member::Open(), in all databases of `options`, whose identities are checked
  // before, and with each connection that leases are taken over.
  static absl::StatusOr<std::unique_ptr<Members>> Open(const ClusterOptions& options, const std::string& owner,
                                                       PartitionHost* host, Counters* counters, Clock* clock,
                                                       const AskHoldings& ask);
  ~Members();  // As Leave().

  void Begin();

  // ---- partitions as the cluster counts them; as Member's own ----
  std::string OwnerAddress(uint32_t partition) const;
  bool Serves(uint32_t partition) const;
  Member::Spread spread() const;
  std::vector<Holding> holdings() const;
  const std::string& peer_key() const { return members_.front()->peer_key(); }
  // The first database's clock.
  int64_t DatabaseUnixMillis() const { return members_.front()->DatabaseUnixMillis(); }
  void LookSoon(uint32_t partition);
  void Announce();
  // All at the same time, so that one that waits for its database delays no other.
  void Leave();

 private:
  Members() = default;

  std::vector<std::unique_ptr<Member>> members_;  // By database.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_MEMBERS_H_
