// run_table.h: what every run looks like right now, for readers.
//
// The shard that owns a run publishes immutable snapshots of it, at most every
// 50 ms.  Readers (queries, exporter, page) take the newest without disturbing
// the shard.  Thread-safe.

#ifndef BELLWETHER_SERVER_STORE_RUN_TABLE_H_
#define BELLWETHER_SERVER_STORE_RUN_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/model/alert_transition.h"
#include "server/model/row_values.h"
#include "server/model/step_sample.h"
#include "server/store/database.h"

namespace bellwether::server {

struct RunSnapshot {
  RunRecord record;
  Eta eta;
  uint32_t alerts_firing = 0;
  uint32_t ranks_reporting = 0;
  uint64_t version = 0;  // Rises with every snapshot of the run.
  // The newest closed step that had head signals, nullptr if none yet, and the
  // newest closed step of all (run signals).
  std::shared_ptr<const StepSample> heads;
  std::shared_ptr<const StepSample> newest;
  std::vector<uint8_t> head_stage;  // [layers][heads], 0-5; may be empty.
  // Sums since the server knows the run, for the exported counters: per signal
  // with an AGGREGATE_TOTAL metric, [layers] (head signals) or [1] (run ones).
  std::map<SignalId, std::vector<double>> totals;
  // Null: the database has them (of a run without a writer).
  std::shared_ptr<const RunRows> rows;
  // Of its rows.  Null: of a run without a writer.
  std::shared_ptr<const RowValues> row_values;
  // Of the run's events the database holds the first so many as of this
  // snapshot (all of them for a run without a writer).  These come after them.
  uint64_t events_stored = UINT64_MAX;
  std::shared_ptr<const std::vector<RunEvent>> events_new;
};
using RunSnapshotPtr = std::shared_ptr<const RunSnapshot>;

// At the run's newest step.
JudgedBy JudgedByOf(const RunRecord& run);

class RunTable {
 public:
  void Publish(RunSnapshotPtr snapshot);
  void Remove(RunId run);

  // By name (the newest run of that name) or by 32 hexadecimal digits of the
  // uuid; nullptr if there is none.
  RunSnapshotPtr Find(std::string_view name_or_uuid) const;
  RunSnapshotPtr Get(RunId run) const;
  std::vector<RunSnapshotPtr> List() const;  // By id.
  // Rises with every Publish.
  uint64_t version() const;
  // Waits until version() > `seen` or until the timeout; returns version().
  uint64_t AwaitChange(uint64_t seen, int64_t timeout_ms) const;

 private:
  mutable absl::Mutex mutex_;
  std::map<RunId, RunSnapshotPtr> runs_ ABSL_GUARDED_BY(mutex_);
  uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The events of a run as of its snapshot, in the order of the log: `count` at most,
// without the first `skip`; and how many there are.
absl::StatusOr<std::vector<RunEvent>> EventsOf(const RunSnapshot& snapshot, const Database& database, uint64_t skip,
                                               size_t count);
absl::StatusOr<uint64_t> CountEventsOf(const RunSnapshot& snapshot, const Database& database);

// The names of a run's rows as of its snapshot; never null.
absl::StatusOr<std::shared_ptr<const RunRows>> RowsOf(const RunSnapshot& snapshot, const Database& database);

// "" where the signal's rows have no names, or the row has none.
std::string_view RowName(const SignalInfo& signal, int32_t row, const RunRows& rows);

// Goes through all of them, a page at a time.  Both must outlive it.
class EventReader {
 public:
  EventReader(const RunSnapshot* snapshot, const Database* database) : snapshot_(snapshot), database_(database) {}
  // Null: there are no more.
  absl::StatusOr<const RunEvent*> Peek();
  void Pop() { ++at_; }

 private:
  const RunSnapshot* const snapshot_;
  const Database* const database_;
  std::vector<RunEvent> page_;
  uint64_t begin_ = 0;  // Of the page.
  uint64_t at_ = 0;
};

// 32 lower-case hexadecimal digits, and back; false if `text` is no uuid.
std::string FormatUuid(const RunUuid& uuid);
bool ParseUuid(std::string_view text, RunUuid* uuid);
// A stable uuid for a name, of a recording that is imported by it: the same on every
// machine.
RunUuid UuidOfName(std::string_view name);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_RUN_TABLE_H_
