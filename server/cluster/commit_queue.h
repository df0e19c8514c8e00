// commit_queue.h: records on their way into the shared log.
//
// They wait per partition.  A few writers have a connection and some partitions each.  A
// writer commits what waits for a partition as one row (frame_tables.h), fenced (fence.h).
// A commit without an answer is repeated, the same row under the same key, until an
// answer comes.  A row that is there already stays as it is.
//
// Errors and semantics as log_backend.h and shared_log.h say.  Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_COMMIT_QUEUE_H_
#define BELLWETHER_SERVER_CLUSTER_COMMIT_QUEUE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/cluster/fence.h"
#include "server/cluster/frame_tables.h"
#include "server/cluster/lsn_count.h"
#include "server/cluster/postgres_log.h"
#include "server/engine/ports/shared_log.h"
#include "server/model/partition.h"

namespace bellwether::server {

class CommitQueue {
 public:
  // `tables` must outlive the queue.
  CommitQueue(const PostgresLogOptions& options, FrameTables* tables, LogBackend::DurableCallback on_durable);
  ~CommitQueue();  // As Close().

  void Start();  // The writers; call once.
  void SetLost(SharedLog::LostCallback on_lost);

  // Takes appends for the partition from here on, with LSNs above `last`.
  void AcquirePartition(const Fence& fence, Lsn last);
  // Drops what waits, and returns when what is under way has an end.
  void ReleasePartition(uint32_t partition);
  // ABORTED: it is not ours.
  absl::StatusOr<Fence> FenceOf(uint32_t partition) const;
  std::vector<Fence> Owned() const;

  absl::StatusOr<Lsn> Append(WalRecord&& record);
  absl::Status Sync(Lsn lsn);
  void Hold(const absl::Status& why);
  // Something else than a commit was not answered.
  void RecordSilence(const absl::Status& why);
  // Waits a while for what was appended, then ends the writers.  UNAVAILABLE: some
  // of it was not committed.
  absl::Status Close();

  Lsn durable_lsn() const;
  Lsn last_lsn() const;
  absl::Status health() const;
  void TakeSyncSeconds(std::vector<double>* seconds);

 private:
  struct Part {
    bool owned = false;
    bool committing = false;
    uint64_t epoch = 0;
    Lsn first_committing = 0;
    std::deque<WalRecord> waiting;
  };
  struct Group {
    Fence fence;
    Lsn first_lsn = 0, last_lsn = 0;
    int64_t bytes = 0;
    std::vector<WalRecord> records;
    int table = -1;  // Chosen once: a commit that is tried again must find itself.
  };

  absl::Status HealthLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Everything of this queue up to it is committed, or dropped because another server
  // owns it.
  Lsn Watermark() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Part* part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  enum class Next { kGroup, kProbe, kClosed };
  // Fills in the group that writer `writer` commits next.  kProbe: there is none, and
  // no commit is under way, and the last one was not answered; of one writer alone.
  Next NextGroup(uint32_t writer, uint32_t* turn, Group* group);
  void Write(uint32_t writer);
  // A commit that was under way may have been dropped.  Without a probe this server would
  // never learn that the database answers again: an unhealthy log is sent no commits.
  void Probe(PgLink* link);
  void RecordAnswer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RecordSilence(const char* what, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Says what has become durable, unless that was said.
  void NotifyDurable();
  // Until it is committed (OK), void (ABORTED), or the log is closed (any other).
  absl::Status Commit(Group* group, PgLink* link);
  // Waiters for the partition's acknowledgements return first.
  void Lose(const Group& group);

  const PostgresLogOptions options_;
  FrameTables* const tables_;
  const LogBackend::DurableCallback on_durable_;
  const std::shared_ptr<LsnCount> lsns_;
  absl::Mutex durable_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable absl::Mutex mutex_;
  SharedLog::LostCallback on_lost_ ABSL_GUARDED_BY(mutex_);
  std::array<Part, kPartitions> parts_ ABSL_GUARDED_BY(mutex_);
  Lsn durable_ ABSL_GUARDED_BY(mutex_) = 0;  // As last told.
  // The first record that Close() left unwritten.
  Lsn unwritten_ ABSL_GUARDED_BY(mutex_) = std::numeric_limits<Lsn>::max();
  int64_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // Waiting or being committed.
  absl::Status held_ ABSL_GUARDED_BY(mutex_);
  absl::Status failing_ ABSL_GUARDED_BY(mutex_);
  int64_t failing_since_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // 0 = the last one was answered.
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<double> commit_seconds_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_COMMIT_QUEUE_H_
