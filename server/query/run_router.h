// run_router.h: Query at any server of a cluster: the owner of each run, and the
// other servers' answers.
//
// A run is served by one server.  Any other server finds out which, asks it for
// the caller, and gives on its answer.  It makes lists from the lists of all
// servers.  A call that another server passed on is answered from here alone.
//
// All servers are asked which of them has a run of a name, and the answer is
// kept for kKnownMs.  A uuid itself gives its partition, and so its owner (the
// lease table as the member last saw it).
//
// Thread-safe; calls may wait for other servers.

#ifndef BELLWETHER_SERVER_QUERY_RUN_ROUTER_H_
#define BELLWETHER_SERVER_QUERY_RUN_ROUTER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bellwether/v1/query.pb.h"
#include "server/access/access.h"
#include "server/query/ports/peers.h"
#include "server/store/run_table.h"
#include "server/util/clock.h"

namespace bellwether::server {

struct CallContext;
class QueryEngine;

class RunRouter {
 public:
  static constexpr int64_t kKnownMs = 1000;
  static constexpr size_t kKnownMax = 4096;

  // A run of the cluster.
  struct Location {
    std::string server;  // Its owner; "" = this one.
    std::string uuid;    // 32 hexadecimal digits
    std::string name;
  };

  // All must outlive this object.
  RunRouter(Peers* peers, const RunTable* runs, Clock* clock) : peers_(peers), runs_(runs), clock_(clock) {}

  // For a name, the newest run of all servers.  NOT_FOUND: no server has it.
  // UNAVAILABLE: that is not known now, because its partition is being taken
  // over or a server does not answer.
  absl::StatusOr<Location> Find(const std::string& run, int64_t deadline_monotonic_ns);
  // The same without asking another server; nothing if that is needed.
  std::optional<Location> Known(const std::string& run);
  // The run was not where Find() had found it.
  void Forget(const std::string& run);
  // Why this server does not have the run: NOT_FOUND or UNAVAILABLE, as above.
  absl::Status Absent(const std::string& run) const;

  // The owner's answer to the caller of `context`.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(const std::string& server, const char* method, const Request& request,
                                const Grant& grant, int64_t deadline_monotonic_ns) {
    absl::StatusOr<std::string> bytes =
        peers_->Call(server, method, request.SerializeAsString(), grant.PassOn(method), deadline_monotonic_ns);
    if (!bytes.ok()) return bytes.status();
    Response response;
    if (!response.ParseFromString(*bytes)) return absl::InternalError("another server's answer cannot be read");
    return response;
  }

  // ---- lists of all servers (cluster_lists.cc) ---- Each run once, in the
  // order of the list of one; `unanswered` and `partitions_unserved` are what
  // is missing.
  absl::StatusOr<v1::ListRunsResponse> ListRuns(const QueryEngine& engine, const v1::ListRunsRequest& request,
                                                const CallContext& context);
  // Of a server that does not answer what this one knows of its alerts, without
  // people's notes.
  absl::StatusOr<v1::ListAlertsResponse> ListAlerts(const QueryEngine& engine, const v1::ListAlertsRequest& request,
                                                    const CallContext& context);
  absl::StatusOr<v1::ListBaselinesResponse> ListBaselines(const QueryEngine& engine,
                                                          const v1::ListBaselinesRequest& request,
                                                          const CallContext& context);

  // ---- two runs of different owners (cluster_compare.cc) ---- As
  // QueryEngine::CompareRuns(), of runs that are where the places point.  This
  // server reads them from their owners, one question after the other.
  absl::StatusOr<v1::CompareRunsResponse> CompareRuns(const QueryEngine& engine, const v1::CompareRunsRequest& request,
                                                      const Location& run, const Location& baseline,
                                                      const CallContext& context);

  Peers& peers() { return *peers_; }
  // Whether there is another server whose runs may have changed.
  bool others() const { return !peers_->spread().others.empty(); }

 private:
  struct KnownPlace {
    Location place;
    int64_t until_ns = 0;
  };
  absl::StatusOr<Location> FindByUuid(const std::string& run, const RunUuid& uuid, int64_t deadline_monotonic_ns);
  absl::StatusOr<Location> FindByName(const std::string& run, int64_t deadline_monotonic_ns);
  std::optional<Location> Here(const std::string& run) const;
  void Learn(const std::string& run, const Location& place);

  Peers* const peers_;
  const RunTable* const runs_;
  Clock* const clock_;
  absl::Mutex mutex_;
  std::map<std::string, KnownPlace> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_RUN_ROUTER_H_
