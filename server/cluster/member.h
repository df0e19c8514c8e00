// member.h: one server of a cluster: which partitions it owns, and who has the rest.
//
// A partition is owned by a lease in the database, by the database's clock alone:
// taken when it has run out, renewed each third of its time, given back at the end.
// With n servers alive each takes its n-th part; who has more gives the rest back.
// That a lease is still ours is never assumed: each commit asks (postgres_log.h).
//
// Two threads: one keeps the leases, one takes partitions up and lets them go, so
// that a slow takeover lets no lease run out.  Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_MEMBER_H_
#define BELLWETHER_SERVER_CLUSTER_MEMBER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/cluster/connection.h"
#include "server/cluster/partition.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// Who serves partitions: the server's root.  Called from the member's threads, and
// FencePartition() from the log's, too.
class PartitionHost {
 public:
  virtual ~PartitionHost() = default;
  // Takes up what the shared log holds of it; serves it when this returns OK.
  virtual absl::Status TakePartition(uint32_t partition, uint64_t epoch) = 0;
  // What can wait until it is served: the series of before.
  virtual absl::Status TakeHistory(uint32_t partition) = 0;
  // It is not served any more, nothing more is acknowledged, its streams end.
  // Quick, and waits for nothing; again does nothing.
  virtual void FencePartition(uint32_t partition) = 0;
  // Fences it, and forgets its runs, saved before if `save`.
  virtual void DropPartition(uint32_t partition, bool save) = 0;
};

struct ClusterOptions {
  std::string dsn;            // "" = this server is alone.
  std::string dsn_file;       // Where it was read from; for people.
  std::string node;           // This server's name, unique in the cluster; "" = its host's.
  std::string address;        // Where clients reach it, host:port; "" = where it listens.
  int64_t lease_seconds = 5;  // 2..60
  int connections = 4;        // That commit frames, 1..64; three more do the rest.

  bool on() const { return !dsn.empty(); }
};

// This process and no other, that of before a restart neither.
std::string NewOwnerName(const std::string& node);

class Member {
 public:
  // `owner`: as the log was opened with.  UNAVAILABLE: the database cannot be
  // reached.  `host` must outlive the member.
  static absl::StatusOr<std::unique_ptr<Member>> Start(const ClusterOptions& options, const std::string& owner,
                                                       PartitionHost* host, Counters* counters, Clock* clock);
  ~Member();  // As Leave().

  // Where the partition's owner is reached, as last seen; "" = nobody owns it, or
  // it is this server.
  std::string OwnerAddress(uint32_t partition) const;
  // Saves and gives back all partitions; others take them at once.
  void Leave();

 private:
  enum class State { kForeign, kTaking, kOwned, kLeaving };
  struct Part {
    State state = State::kForeign;
    uint64_t epoch = 0;   // Ours.
    std::string address;  // Of another owner.
  };
  enum class Chore { kTake, kHistory, kDrop, kRelease };
  struct Errand {
    Chore chore;
    uint32_t partition;
    uint64_t epoch;
  };

  Member(const ClusterOptions& options, std::string owner, PartitionHost* host, Counters* counters, Clock* clock);
  void Keep();
  void Work();
  void Do(const Errand& errand);
  absl::Status Renew();
  // What the database says of all leases; notes what was lost, returns what is free.
  absl::Status Look(std::vector<uint32_t>* free, int64_t* servers);
  absl::Status Take(const std::vector<uint32_t>& free, int64_t share);
  void GiveExcess(int64_t share);
  absl::Status Release(uint32_t partition, uint64_t epoch);
  // With a connection of the calling thread's own.
  absl::StatusOr<std::vector<PgResult>> Run(std::unique_ptr<PgConnection>* connection,
                                            const std::vector<PgStatement>& statements);
  int64_t CountMine() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Show() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ClusterOptions options_;
  const std::string owner_;
  PartitionHost* const host_;
  Clock* const clock_;
  Gauge* const owned_;
  Counter* const taken_;
  Counter* const lost_;
  Counter* const released_;
  std::unique_ptr<PgConnection> lease_connection_;    // The keeper's.
  std::unique_ptr<PgConnection> release_connection_;  // The worker's.
  int64_t renewed_ns_ = 0;

  mutable absl::Mutex mutex_;
  std::array<Part, kPartitions> parts_ ABSL_GUARDED_BY(mutex_);
  std::deque<Errand> errands_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread keeper_, worker_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_MEMBER_H_
