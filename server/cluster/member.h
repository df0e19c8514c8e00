// member.h: one server in a database of its cluster: which partitions it owns there,
// and who has the rest.
//
// A partition is owned by a lease in the database, by the database's clock alone:
// taken when it has run out, renewed each third of its time, given back at the end.
// With n servers alive each takes its n-th part; who has more gives the rest back.
// That a lease is still ours is never assumed: each commit asks (postgres_log.h).
//
// Who cannot reach the database once its leases have run out asks the other servers.
// What one of them serves in a later epoch is lost, as if the database had said so:
// epochs only grow, and only with the owner.  Where the database is away from all of
// them nobody says so, and everybody keeps what he has.
//
// One thread keeps the leases, a few take partitions up and let them go, one gives the
// leases back, several at once: a slow takeover lets no lease run out, and who leaves
// waits for each commit of many together.  Thread-safe.

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
#include "server/access/tls_files.h"
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
// What the servers of these addresses serve, as far as they answer within a few
// seconds.  Called from the members' threads.
using AskHoldings = std::function<std::vector<Holding>(const std::vector<std::string>& servers)>;

struct ClusterOptions {
  std::vector<std::string> dsns;  // Of the cluster's databases, in their order; empty = this server is alone.
  // Where they were read from, for people: one of them alone is set, if any.
  std::string dsn_file;
  std::vector<std::string> dsn_files;
  std::string node;           // This server's name, unique in the cluster; "" = its host's.
  std::string address;        // Where clients and the other servers reach it, host:port; "" = where it listens.
  int64_t lease_seconds = 5;  // 2..60
  int connections = 4;        // To each database, that commit frames, 1..64; up to ten more do the rest.
  // What this server shows to the others, and who signed what they show (client_ca);
  // "" = as it does to clients (tls.*).
  TlsFiles peer;

  bool on() const { return !dsns.empty(); }
};

// This process and no other, that of before a restart neither.
std::string NewOwnerName(const std::string& node);

class Member {
 public:
  // Of options.dsns[database]; the first has the peer key.  `owner`: as the log was
  // opened with.  UNAVAILABLE: the first database cannot be reached; another is waited
  // for behind it.  No lease is taken over a connection that `greet` refuses.  `host`,
  // which is told partitions as the cluster counts them, must outlive the member.
  // `ask`: empty = nobody is asked.  Takes nothing and asks nobody before Begin().
  static absl::StatusOr<std::unique_ptr<Member>> Open(const ClusterOptions& options, uint32_t database,
                                                      const std::string& owner, PartitionHost* host, Counters* counters,
                                                      Clock* clock, AskHoldings ask = {}, PgLink::Greet greet = {});
  ~Member();  // As Leave().

  // Once, when `host` may be called and `ask` works.
  void Begin();

  // ---- partitions as in this database, 0 to 63 ----
  // Where the partition's owner is reached, as last seen; "" = nobody owns it, or its
  // owner leaves, or it is this server.
  std::string OwnerAddress(uint32_t partition) const;
  // Somebody came for a partition that is not served here: it may have moved.  Looks
  // soon, however often this is called.
  void LookSoon();

  // How partitions are spread, as last seen.
  struct Spread {
    std::vector<std::string> others;  // Addresses of the other owners, in order, each once.
    uint32_t unserved = 0;            // Partitions that nobody owns, or that are taken up or let go here just now.
  };
  Spread spread() const;
  // Whether this server serves the partition now.
  bool Serves(uint32_t partition) const;
  // What it serves now, in order; no addresses.
  std::vector<Holding> holdings() const;
  // The key that only servers of the cluster can read: 32 bytes, the same for all; ""
  // but in the first database.
  const std::string& peer_key() const { return peer_key_; }
  // The database's clock, as of the last look.
  int64_t DatabaseUnixMillis() const { return (clock_->MonotonicNanos() + database_offset_ns_) / 1'000'000; }
  // This server will leave: it takes no more partitions, and the others know that its
  // share is theirs.  Waits for nothing.
  void Announce();
  // Saves and gives back all partitions; others take them at once.
  void Leave();

 private:
  enum class State { kForeign, kTaking, kOwned, kLeaving };
  struct Part {
    State state = State::kForeign;
    uint64_t epoch = 0;          // Ours.
    std::string address;         // Of another owner.
    int64_t history_due_ns = 0;  // Its history could not be read: not before this again; 0 = nothing is due.
  };
  enum class Chore { kTake, kHistory, kDrop, kRelease };
  struct Errand {
    Chore chore;
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
  // `history`: what can wait, too; by one of them, so that it keeps nobody waiting.
  void Work(bool history);
  void Do(const Errand& errand);
  void GiveBack();
  // The key; the first server of all makes it.
  absl::Status LearnKey();
  absl::Status Renew();
  // Tells the others that this server leaves, and renews what it still has.
  absl::Status SendLeaving();
  // What the database says of all leases; notes what was lost, returns what is free.
  absl::Status Look(std::vector<uint32_t>* free, int64_t* servers);
  // The same from the other servers, when the database does not answer.
  void HearOthers();
  // Notes that the partition is another's.  True: the host is to be told.
  bool Lose(uint32_t partition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FenceLost(const std::vector<uint32_t>& lost);
  absl::Status Take(std::vector<uint32_t> free, int64_t share);
  void GiveExcess(int64_t share);
  // To be given back by GiveBack().
  void Release(uint32_t partition, uint64_t epoch, Lsn keep);
  int64_t CountMine() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Show() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ClusterOptions options_;
  const uint32_t first_;  // The first partition of this database, as the cluster counts.
  const std::string owner_;
  PartitionHost* const host_;
  Clock* const clock_;
  const AskHoldings ask_;
  PgLink lease_link_;          // The keeper's.
  SharedPgLink release_link_;  // GiveBack()'s.
  Gauge* const owned_;         // Of all databases.
  Gauge* const up_;
  Counter* const taken_;
  Counter* const lost_;
  Counter* const released_;
  int64_t renewed_ns_ = 0;
  bool announced_ = false;  // The keeper's: the others were told that this server leaves.
  absl::Status kept_;       // Likewise: of its last look.
  std::string peer_key_;
  std::atomic<int64_t> database_offset_ns_ = 0;  // Of its Unix time, from our monotonic one.

  mutable absl::Mutex mutex_;
  std::array<Part, kPartitions> parts_ ABSL_GUARDED_BY(mutex_);
  std::deque<Errand> errands_ ABSL_GUARDED_BY(mutex_);
  std::set<uint32_t> working_ ABSL_GUARDED_BY(mutex_);  // Partitions of errands that somebody does.
  std::vector<Released> released_now_ ABSL_GUARDED_BY(mutex_);
  int64_t shown_ ABSL_GUARDED_BY(mutex_) = 0;  // Of owned_.
  bool giving_ ABSL_GUARDED_BY(mutex_) = false;
  bool look_soon_ ABSL_GUARDED_BY(mutex_) = false;
  bool announcing_ ABSL_GUARDED_BY(mutex_) = false;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread keeper_, giver_;
  std::vector<std::thread> workers_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_MEMBER_H_
