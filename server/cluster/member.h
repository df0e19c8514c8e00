// member.h: one server in a database of its cluster: which partitions it owns there,
// and which servers own the others.
//
// A server owns a partition by a lease in the database, by the database's clock alone.
// It takes a lease that has run out, renews it each third of its time, and gives it back
// at the end.  With n servers alive each takes its n-th part, and gives back what is more.
// A server never assumes that it still holds a lease: each commit asks (postgres_log.h).
//
// A server that cannot reach the database once its leases have run out asks the other
// servers.  A partition that one of them serves in a later epoch is lost: epochs only
// grow, and only with the owner.  If no server can reach the database, each keeps its
// partitions.
//
// One thread keeps the leases.  A few acquire and release partitions, so that a slow
// acquisition lets no lease run out.  One gives leases back, many in one commit.
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_MEMBER_H_
#define BELLWETHER_SERVER_CLUSTER_MEMBER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/cluster/cluster_options.h"
#include "server/cluster/link.h"
#include "server/engine/ports/partition_host.h"
#include "server/model/partition.h"
#include "server/store/log_backend.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// A partition that a server serves.
struct Holding {
  uint32_t partition = 0;  // As the cluster counts.
  uint64_t epoch = 0;
  std::string address;  // Of the server.
};
// Asks the servers of these addresses what they serve; those that answer within a few
// seconds count.  Called from the members' threads.
using AskHoldings = std::function<std::vector<Holding>(const std::vector<std::string>& servers)>;

// A name for this process alone: a restarted server has another one.
std::string NewOwnerName(const std::string& node);

class Member {
 public:
  // Opens options.dsns[database]; the first database has the peer key.  `owner` is the
  // log's.  `host` gets partitions as the cluster counts them, and must outlive the
  // member.  `ask`: empty = no server is asked.  No lease is taken over a connection that
  // `greet` refuses, and none before Begin().  UNAVAILABLE: the first database cannot be
  // reached; another one is waited for later.
  static absl::StatusOr<std::unique_ptr<Member>> Open(const ClusterOptions& options, uint32_t database,
                                                      const std::string& owner, PartitionHost* host, Counters* counters,
                                                      Clock* clock, AskHoldings ask = {}, PgLink::Greet greet = {});
  ~Member();  // As Leave().

  // Once, when `host` may be called and `ask` works.
  void Begin();

  // ---- partitions as in this database, 0 to 63 ----
  // The address of the partition's owner, as last seen; "" = no server owns it, or its
  // owner leaves, or this server owns it.
  std::string OwnerAddress(uint32_t partition) const;
  // A caller asked for a partition that is not served here: it may have moved.  The
  // member looks soon, however often this is called.
  void LookSoon();

  // How partitions are spread, as last seen.
  struct Spread {
    std::vector<std::string> others;  // Addresses of the other owners, in order, each once.
    uint32_t unserved = 0;            // Partitions without an owner, or being acquired or released here.
  };
  Spread spread() const;
  // Whether this server serves the partition now.
  bool Serves(uint32_t partition) const;
  // The partitions that this server serves, in order; no addresses.
  std::vector<Holding> holdings() const;
  // The key that only servers of the cluster can read: 32 bytes, the same for all; ""
  // but in the first database.
  const std::string& peer_key() const { return peer_key_; }
  // The database's clock, as of the last look.
  int64_t DatabaseUnixMillis() const { return (clock_->MonotonicNanos() + database_offset_ns_) / 1'000'000; }
  // This server will leave: it acquires no more partitions, and the others learn that its
  // share is theirs.  Waits for nothing.
  void Announce();
  // Saves and gives back all partitions; others take them at once.
  void Leave();

 private:
  enum class State { kForeign, kAcquiring, kOwned, kReleasing };
  struct PartitionLease {
    State state = State::kForeign;
    uint64_t epoch = 0;          // This server's.
    std::string address;         // Another owner's.
    int64_t history_due_ns = 0;  // When its history is read again after a failure; 0 = not at all.
  };
  enum class TaskKind { kAcquire, kLoadHistory, kDrop, kRelease };
  struct PartitionTask {
    TaskKind kind;
    uint32_t partition;
    uint64_t epoch;
  };
  struct Released {
    uint32_t partition;
    uint64_t epoch;
    Lsn keep;
  };

  Member(const ClusterOptions& options, uint32_t database, std::string owner, PartitionHost* host, Counters* counters,
         Clock* clock, AskHoldings ask, PgLink::Greet greet);
  void Keep();
  // `history`: loads histories, too; one worker does, so that no acquisition waits.
  void Work(bool history);
  void Do(const PartitionTask& task);
  void GiveBack();
  // Reads the key; the first server of all makes it.
  absl::Status LearnKey();
  absl::Status Renew();
  // Reports to the others that this server leaves, and renews the leases that it has.
  absl::Status SendLeaving();
  // Reads all leases from the database; notes lost partitions, returns free ones.
  absl::Status Look(std::vector<uint32_t>* free, int64_t* servers);
  // Asks the other servers for the same, when the database does not answer.
  void HearOthers();
  // Notes that another server has the partition.  True: the host must be notified.
  bool Lose(uint32_t partition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FenceLost(const std::vector<uint32_t>& lost);
  absl::Status Take(std::vector<uint32_t> free, int64_t share);
  void GiveExcess(int64_t share);
  // To be given back by GiveBack().
  void Release(uint32_t partition, uint64_t epoch, Lsn keep);
  int64_t CountMine() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Show() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const ClusterOptions options_;
  const uint32_t first_;  // The first partition of this database, as the cluster counts.
  const std::string owner_;
  PartitionHost* const host_;
  Clock* const clock_;
  const AskHoldings ask_;
  Gauge* const owned_;  // Of all databases.
  Gauge* const up_;
  Counter* const taken_;
  Counter* const lost_;
  Counter* const released_;
  std::string peer_key_;  // Constant after Open().

  // Keeper's thread only; before Begin() and after its end the caller's.
  PgLink lease_link_;
  int64_t renewed_ns_ = 0;
  bool announced_ = false;  // The others were told that this server leaves.
  absl::Status kept_;       // Of the last look.

  SharedPgLink release_link_;                    // GiveBack()'s.
  std::atomic<int64_t> database_offset_ns_ = 0;  // Of its Unix time, from our monotonic one.

  // Guarded by mutex_.
  mutable absl::Mutex mutex_;
  std::array<PartitionLease, kPartitions> leases_ ABSL_GUARDED_BY(mutex_);
  std::deque<PartitionTask> tasks_ ABSL_GUARDED_BY(mutex_);
  std::set<uint32_t> working_ ABSL_GUARDED_BY(mutex_);  // Partitions whose task is under way.
  std::vector<Released> released_now_ ABSL_GUARDED_BY(mutex_);
  int64_t shown_ ABSL_GUARDED_BY(mutex_) = 0;  // This database's part of owned_.
  bool giving_ ABSL_GUARDED_BY(mutex_) = false;
  bool look_soon_ ABSL_GUARDED_BY(mutex_) = false;
  bool announcing_ ABSL_GUARDED_BY(mutex_) = false;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;

  // Constant after Begin().
  std::thread keeper_, giver_;
  std::vector<std::thread> workers_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_MEMBER_H_
