// log_backend.h: the log that the engine commits through.
//
// Whatever is acknowledged went through one of these first: the write-ahead log
// of this machine (wal.h), or a PostgreSQL that several servers share
// (server/cluster/postgres_log.h).  Both give records their LSNs in the order in
// which they are appended, and report them durable in that order; "durable" is
// the promise that an acknowledgement passes on: on disk here, or committed there.
//
// A log has one lane, or several where it is spread over several databases: all
// records of a run go into one of them.  LSNs are of the whole log; what is durable,
// and whether it goes on, is each lane's own.

#ifndef BELLWETHER_SERVER_STORE_LOG_BACKEND_H_
#define BELLWETHER_SERVER_STORE_LOG_BACKEND_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// 1, 2, 3, ... over the whole life of the log.
using Lsn = uint64_t;

// What a record's payload is.  Numbers are on disk: never renumber.
enum class WalKind : uint8_t {
  kNone = 0,     // The log's own: an empty record that covers the last batch.
  kHello = 1,    // A session opened: serialized v1.ClientMessage (hello).
  kMessage = 2,  // A frame, event, spectrum or action result.
  kBye = 3,
  kStepClosed = 4,  // The server closed a step by its deadline.
  // 5 is not used: the database keeps people's notes itself.
  kSilence = 6,        // Ranks fell silent or spoke again.
  kRules = 7,          // The run is judged by other rules from here on: their text.
  kSpectra = 8,        // What Gram matrices of the run gave.
  kActionRequest = 9,  // What a person asked about an action.
  kPolicy = 10,        // The run goes on by another policy: its text, and its author.
  kActionSent = 11,    // A stream was handed an action for the first time: its id.
  kRunSilent = 12,     // No message of the run has come for too long: it has ended.
  kFalseAlarm = 13,    // A person called an alert of the run a false alarm, or took that back.
  kRename = 14,        // A person gave the run another name.
};

struct WalRecord {
  Lsn lsn = 0;  // Given by the log.
  WalKind kind = WalKind::kNone;
  uint64_t run = 0;
  uint32_t rank = 0;
  uint32_t attempt = 0;
  uint64_t epoch = 0;        // Session epoch.
  uint64_t seq = 0;          // 0 = not sequenced
  int64_t time_unix_ms = 0;  // When the server took it.
  std::string payload;
};

// Thread-safe.
class LogBackend {
 public:
  struct Recovery {
    Lsn first_lsn = 0;  // Oldest record held; 0 = empty.
    Lsn last_lsn = 0;
    int64_t torn_bytes = 0;  // Cut off the tail.
    int64_t bytes = 0;       // Held in records.
    uint64_t records = 0;
    std::string lost;  // With repair: the exact LSN ranges that are gone.
  };

  // Called from the log's thread, in LSN order: everything up to and with
  // `durable` is on disk.
  using DurableCallback = std::function<void(Lsn durable)>;

  virtual ~LogBackend() = default;

  // A lane is a log of its own, but for its LSNs, with one lane.  What is asked of the
  // whole is asked of all lanes: an error is that of the first that has one, the
  // durable LSN the lowest.
  virtual uint32_t lanes() const { return 1; }
  virtual uint32_t LaneOf(RunId) const { return 0; }
  virtual LogBackend* lane(uint32_t) { return this; }
  LogBackend* LogOf(RunId run) { return lane(LaneOf(run)); }

  virtual const Recovery& recovery() const = 0;

  // Hands every record with lsn >= from to `visit`, oldest first, from disk;
  // not those of kind kNone, whose LSNs are missing from the sequence.
  // DATA_LOSS: a record went bad since Open.
  // Records appended meanwhile may or may not be seen; pass `until` to stop
  // there (0 = recovery().last_lsn).  Stops at the first error of `visit`.
  virtual absl::Status Read(Lsn from, Lsn until, const std::function<absl::Status(const WalRecord&)>& visit) const = 0;
  // As Read, of what Open() found, but quicker: Open() has verified it, and no
  // payload is given except that of hellos.
  virtual absl::Status ReadHeads(const std::function<absl::Status(const WalRecord&)>& visit) const = 0;

  // Queues a record and returns its LSN.  RESOURCE_EXHAUSTED: pending_bytes_max
  // reached, try later.  INVALID_ARGUMENT: too large, or of kind kNone.
  // UNAVAILABLE: failed or closed.  An error leaves `record` as it was.
  virtual absl::StatusOr<Lsn> Append(WalRecord&& record) = 0;
  // Waits until `lsn` is durable.  An error as soon as that has no end in
  // sight: the log failed, is closed, or health() is an error.
  virtual absl::Status Sync(Lsn lsn) = 0;
  // What is appended from now on has LSNs above `lsn`; durable when it returns.
  // For a log that lost its end, before anything else is appended: records up
  // to there were applied and count as known.  UNIMPLEMENTED: a log that loses
  // none.
  virtual absl::Status GoOnAbove(Lsn) { return absl::UnimplementedError("this log loses no end"); }
  // Everything below `keep` may be forgotten: whole segments are given up.
  // Changes nothing while health() is an error.
  virtual absl::Status Truncate(Lsn keep) = 0;
  // With an error: nothing is written, and so nothing becomes durable; what is
  // appended waits in memory.  OK: the log goes on, in the order of the LSNs.
  virtual void Hold(const absl::Status& why) = 0;
  // Copies what is durable to an empty or missing directory, synced: a log of
  // its own, which Open() takes.  Truncate() waits meanwhile, appends do not.
  virtual absl::Status CopyTo(const std::string& directory) = 0;
  // Writes and syncs what is queued, then refuses appends.
  virtual absl::Status Close() = 0;

  virtual Lsn durable_lsn() const = 0;
  virtual Lsn last_lsn() const = 0;   // Highest given.
  virtual int64_t bytes() const = 0;  // On this machine's disk.
  // The first LSN of the newest segments that together have no more than
  // `bytes` (the one that is written to counts in any case); 0 if that is all.
  virtual Lsn TailBegin(int64_t bytes) const = 0;
  // Why it failed (for good), or why it cannot go on right now: it is held, or
  // has no room for the next segment (RESOURCE_EXHAUSTED), which ends by itself
  // once there is.
  virtual absl::Status health() const = 0;
  // Seconds of every fdatasync since the last call; for the histogram.
  virtual void TakeSyncSeconds(std::vector<double>* seconds) = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_LOG_BACKEND_H_
