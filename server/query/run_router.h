// run_router.h: Query at any server of a cluster: whose run it is, and what the
// others say.
//
// A run is served by one server.  Any other finds out which, asks it for the caller,
// and gives on its answer; lists it makes of everybody's.  What was passed on by
// another server is answered from here alone.
//
// Which server has a run of a name is asked of all, and known for kKnownMs; a uuid
// says it by itself (the lease table as the member last saw it).
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

  // Of a name the newest run of all servers.  NOT_FOUND: nobody has it;
  // UNAVAILABLE: that is not known now, because its partition is being taken over or
  // a server does not answer.
  absl::StatusOr<Location> Find(const std::string& run, int64_t deadline_monotonic_ns);
  // The same without asking anybody; nothing: that would have to be done.
  std::optional<Location> Known(const std::string& run);
  // It was not where Find() said.
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

  // ---- lists of all servers (cluster_lists.cc) ----
  // Each run once, in the order of the list of one; `unanswered` and
  // `partitions_unserved` say what is missing.
  absl::StatusOr<v1::ListRunsResponse> ListRuns(const QueryEngine& engine, const v1::ListRunsRequest& request,
                                                const CallContext& context);
  // Of a server that does not answer what this one knows of its alerts, without
  // people's notes.
  absl::StatusOr<v1::ListAlertsResponse> ListAlerts(const QueryEngine& engine, const v1::ListAlertsRequest& request,
                                                    const CallContext& context);
  absl::StatusOr<v1::ListBaselinesResponse> ListBaselines(const QueryEngine& engine,
                                                          const v1::ListBaselinesRequest& request,
                                                          const CallContext& context);

  // ---- two runs of different owners (cluster_compare.cc) ----
  // As QueryEngine::CompareRuns(), of runs that are where the places say; read by
  // this server from whoever has them, one question after the other.
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
