// database.h: everything that is kept, on RocksDB.
//
// Keys have a one-byte prefix per kind.  RocksDB's own log is off: what a crash
// takes from here is replayed from the WAL.  There are two column families,
// flushed together: w, p and j pass within minutes, the rest stays.
//
// Transitions, notes, actions, bands and the last ids that were sent are the
// exception: people have seen them.  So they are synced through RocksDB's own
// log, alone, and transitions keep their ids whatever happens.
//
// All that belongs to one point of a run's history goes into one WriteBatch:
// its chunks, saved state and the LSN up to which it is applied.  So a crash
// keeps all of it or none.
//
//   r <run>                               RunRecord
//   k <run> <rank>                        RankRecord: session epoch, durable seq
//
//   s <run> <signal> <group> <attempt> <step>   chunk (chunk.h)
//   m <run> <signal> <group> <attempt> <step>   summaries of a chunk, or of a derived signal
//   w <run> <signal> <part> <attempt> <step>    window: a few steps of many heads, until packed into chunks
//   p <run> <signal> <part> <attempt> <step>    steps of a chunk that is not full yet, for a restart
//   e <run> <n>                           event
//   t <id>                                transition
//   T <run> <key> <k>                     index: id
//   a <run> <key>                         note: acknowledged, silenced, a false alarm
//   d <run> <receiver>                    id of the last transition that the receiver was sent
//   j <run>                               state: saved judge and windows
//   J <run>                               the same of a run that has ended
//   A <run> <id>                          action, with its whole history
//   q <run> <lsn>                         audit entry, of the log record that it comes from
//   v                                     schema version, below
//   i                                     no id up to this is given again: of a repair
//   n <run>                               names of its rows, compressed (row_names.h)
//   b <run>                               bands: what it was like while healthy (baseline_percentiles.h)
//   x <run>                               how old what is, and what was done about it (retention.h)
//
// Numbers in keys are big-endian.  Thread-safe.

#ifndef BELLWETHER_SERVER_STORE_DATABASE_H_
#define BELLWETHER_SERVER_STORE_DATABASE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/action.h"
#include "server/model/alert_transition.h"
#include "server/model/false_alarm.h"
#include "server/model/row_names.h"
#include "server/model/run_coverage.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"
#include "server/store/shared_rows.h"
#include "server/store/wal.h"

namespace bellwether::server {

// What the rows are like.  A database of an older version is brought up to date
// when it is opened, one of a newer version is refused.
//   1  before there was a version: no row v
//   2  row v
inline constexpr uint32_t kSchemaVersion = 2;

// RunRecord::end_reason of a run that fell silent without a goodbye.
inline constexpr char kEndedSilent[] = "silent";

// What is known of a run, kept up to date by its shard.
struct RunRecord {
  RunId id = 0;
  RunDescription description;  // The newest attempt's.
  int64_t step = -1;
  int32_t stage = 0;
  bool ended = false;
  std::string end_reason;
  int64_t started_unix_ns = 0;
  int64_t last_report_unix_ns = 0;
  uint64_t frames = 0;
  uint64_t frames_dropped = 0;
  uint64_t frames_stripped = 0;  // Sent without their heads.
  uint64_t steps_recorded = 0;
  Lsn applied_lsn = 0;            // State below is that of this LSN.
  std::vector<SignalId> signals;  // Reported so far.
  bool kind_changed = false;      // Its kind (baseline_percentiles.h) changed on the way.
  // Which recording it is imported from, so that an import that was cut off can be
  // made again (run_import.h); "" = a trainer sends it.
  std::string import_of;
  bool import_notifies = false;  // Its alerts are sent to people all the same.
  std::string renamed;           // The name that a person gave it; "" = its trainer's.
  // All else of it is gone.  The record stays, so that what the log still holds of the
  // run is passed over, and its number is given to no other.
  bool deleted = false;

  // Whether its alerts go to webhooks, Alertmanagers and Prometheus.  Those of
  // a recording are of long ago.
  bool notifies() const { return import_of.empty() || import_notifies; }
  // What it can be judged by.  Empty in an older record; `signals` has it then.
  RunCoverage coverage;
};

struct RankRecord {
  uint32_t rank = 0;
  uint64_t epoch = 0;
  uint64_t durable_seq = 0;  // As of the run's applied_lsn.
};

// One run's changes since the last commit, written atomically.
class RunBatch {
 public:
  virtual ~RunBatch() = default;
  virtual void PutRun(const RunRecord& run) = 0;
  virtual void PutRank(RunId run, const RankRecord& rank) = 0;
  virtual void PutEvent(RunId run, const RunEvent& event) = 0;
  virtual void PutState(const RunRecord& run, std::string_view state) = 0;
  // In place of what was put before.
  virtual void PutRows(RunId run, const RunRows& rows) = 0;
};

class Database {
 public:
  struct Options {
    std::string directory;
    int64_t cache_bytes = 64 << 20;
    int64_t write_buffer_bytes = 32 << 20;
    // Gets every row of a run before this database has it; null = rows are not
    // shared.  Must outlive the database.
    SharedRows* shared = nullptr;
  };

  // DATA_LOSS: damaged.  FAILED_PRECONDITION: written by a newer version.
  static absl::StatusOr<std::unique_ptr<Database>> Open(const Options& options);
  virtual ~Database() = default;

  // ---- runs ----
  // Those in [first, end), by id; without arguments all.  With what is left of deleted ones.
  virtual absl::StatusOr<std::vector<RunRecord>> ListRuns(RunId first, RunId end) const = 0;
  absl::StatusOr<std::vector<RunRecord>> ListRuns() const { return ListRuns(0, UINT64_MAX); }
  virtual absl::StatusOr<RunRecord> GetRun(RunId run) const = 0;
  // Deletes everything of the run but its record, which says so from then on.  Durable when
  // it returns.  After a crash, or an error, it is called again: the record may say so while
  // rows are left.
  virtual absl::Status DeleteRun(const RunRecord& run) = 0;
  virtual absl::StatusOr<std::vector<RankRecord>> ListRanks(RunId run) const = 0;
  virtual absl::StatusOr<std::string> GetState(RunId run) const = 0;  // NOT_FOUND
  virtual absl::StatusOr<RunRows> GetRows(RunId run) const = 0;       // Empty if none were put.
  // In the order of the log, `count` at most, without the first `skip`.
  virtual absl::StatusOr<std::vector<RunEvent>> ListEvents(RunId run, uint64_t skip, size_t count) const = 0;
  virtual absl::StatusOr<uint64_t> CountEvents(RunId run) const = 0;

  // Events of a run stand in one batch at a time.
  virtual std::unique_ptr<RunBatch> NewBatch() = 0;
  // The first part of Commit(): brings the batch to the shared store, if there
  // is one, and waits for that.  By any thread.  A caller that calls it apart
  // commits only what was shared.
  virtual absl::Status ShareBatch(RunBatch*) { return absl::OkStatus(); }
  // Memory only until Flush(); atomic with respect to it.
  virtual absl::Status Commit(std::unique_ptr<RunBatch> batch) = 0;

  // ---- alerts ----
  // Stores the transition unless (run, key, k) is there already; gives it the
  // next id and returns true, or fills in the stored id and returns false.  Ids
  // rise, and an id that a crash took back is never given to another.
  virtual absl::StatusOr<bool> PutTransition(AlertTransition* transition) = 0;
  // Ids above `after`, rising, at most `limit`; run 0 = all.
  virtual absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t limit,
                                                                       RunId run) const = 0;
  virtual uint64_t last_transition_id() const = 0;
  struct AlertNote {
    bool acknowledged = false;
    std::string by;
    std::string comment;
    int64_t silenced_until_unix_ns = 0;
    std::vector<FalseAlarm> false_alarms;  // What was said by this key, oldest first.
  };
  virtual absl::Status PutAlertNote(RunId run, const std::string& key, const AlertNote& note) = 0;
  virtual absl::StatusOr<AlertNote> GetAlertNote(RunId run, const std::string& key) const = 0;  // Default if none.

  // The last transition of the run that was sent to a receiver outside, known
  // by a number.
  virtual absl::Status PutTold(RunId run, uint32_t receiver, uint64_t id) = 0;
  virtual absl::StatusOr<uint64_t> GetTold(RunId run, uint32_t receiver) const = 0;  // 0 = of nothing.

  // ---- actions; durable when the call returns ----
  // An action changes by growing histories only.  Returns how many changes of
  // `action` were not stored yet; 0 = a replay, nothing was written.
  virtual absl::StatusOr<size_t> PutAction(RunId run, const Action& action) = 0;
  virtual absl::StatusOr<std::vector<Action>> ListActions(RunId run) const = 0;  // By id as a text.
  // Keeps the newest kAuditMax of a run.  False: it was there already, or is
  // older than all that is kept.
  static constexpr size_t kAuditMax = 512;
  virtual absl::StatusOr<bool> PutAudit(RunId run, Lsn lsn, const AuditEntry& entry) = 0;
  virtual absl::StatusOr<std::vector<AuditEntry>> ListAudit(RunId run) const = 0;  // Oldest first.

  // ---- bands of healthy runs; durable when the call returns ----
  virtual absl::Status PutBands(RunId run, std::string_view row) = 0;
  virtual absl::Status DeleteBands(RunId run) = 0;
  struct BandsRow {
    RunId run = 0;
    std::string row;  // As it was put.
  };
  virtual absl::StatusOr<std::vector<BandsRow>> ListBands() const = 0;  // By run.

  // ---- where several servers share their rows; UNIMPLEMENTED elsewhere ----
  // Rows of runs that another server kept, written here only; `only_missing`:
  // those that are here stay as they are.
  virtual absl::Status TakeUpRows(const std::vector<SharedRow>& rows, bool only_missing);
  // Forgets all rows of the runs in [first, end) here, but no alert of theirs.
  virtual absl::Status ForgetRuns(RunId first, RunId end);
  // PutTransition() may wait for a store elsewhere.
  virtual bool is_shared() const { return false; }
  // As SharedRows::StoreOf() and KeepTransition().
  virtual uint32_t StoreOf(RunId) const { return 0; }
  virtual absl::Status KeepTransition(const AlertTransition&) { return absl::OkStatus(); }
  // Transitions that other servers stored since the last call, rising ids.
  virtual absl::StatusOr<std::vector<AlertTransition>> FetchTransitions();

  // Makes everything committed so far durable without the WAL, and gives back
  // the space of what it superseded.
  virtual absl::Status Flush() = 0;
  // Makes everything durable and a copy of it in a new directory on the same file
  // system: hard links, where files do not change any more.
  virtual absl::Status CopyTo(const std::string& directory) = 0;
  virtual int64_t bytes() const = 0;

 protected:
  friend class SeriesStore;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_DATABASE_H_
