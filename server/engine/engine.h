// engine.h: the writing side of the server, from a stream to the store.
//
// The engine opens and owns the log, the database, the series, the table of runs and the
// shards; it keeps them up and closes them.  Three parts of it do what others ask:
//   ingest()      sessions of streams and imports   (ingest_coordinator.h)
//   control()     what people ask of runs           (run_controller.h)
//   partitions()  runs that move between servers    (partition_handover.h)
//
// Thread-safe.  Locks are taken in this order:
//   1. the mutex of one lane      LogTruncator::lane_mutex()
//   2. the registry's mutex       RunRegistry::mutex()
//   3. the mutex of one shard     Shard::mutex(); only LogReplay takes all, by index
//   4. the mutex of one session   RankSession::Notify(), Detach()

#ifndef BELLWETHER_SERVER_ENGINE_ENGINE_H_
#define BELLWETHER_SERVER_ENGINE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/detect/detector_bank.h"
#include "server/detect/judge_options.h"
#include "server/engine/baseline_learner.h"
#include "server/engine/disk_guard.h"
#include "server/engine/ingest_coordinator.h"
#include "server/engine/live_run.h"
#include "server/engine/log_replay.h"
#include "server/engine/log_truncator.h"
#include "server/engine/partition_handover.h"
#include "server/engine/ports/ownership.h"
#include "server/engine/ports/shared_log.h"
#include "server/engine/reloadable_policy.h"
#include "server/engine/reloadable_rules.h"
#include "server/engine/run_admission.h"
#include "server/engine/run_controller.h"
#include "server/engine/run_registry.h"
#include "server/engine/shards.h"
#include "server/engine/spectra_worker.h"
#include "server/ingest/decode_limits.h"
#include "server/store/action_store.h"
#include "server/store/alert_store.h"
#include "server/store/baselines.h"
#include "server/store/database.h"
#include "server/store/retention.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"
#include "server/store/wal.h"
#include "server/util/work_pool.h"

namespace bellwether::server {

class Engine {
 public:
  struct Options {
    std::string storage_path;
    int shards = 1;
    int64_t answers_bytes_max = 0;    // What answers may take beside the engine; a part of limits.memory_max.
    RunAdmission::Options admission;  // Open() sets own_bytes from the options below.
    DecodeLimits limits;
    Wal::Options wal;            // Open() sets directory from storage_path.
    Database::Options database;  // Open() sets directory from storage_path.
    SeriesStore::Options series;
    Retention::Options retention;
    Baselines::Options baselines;
    BaselineLearner::Options learner;
    Shard::Options shard;
    JudgeOptions judge;                   // Built in: runs without a rules file are judged by these.
    RuleSetPtr rules;                     // In force at the start; null = none.
    PolicyPtr policy;                     // In force at the start; null = the built-in one.
    DetectorBank* bank = nullptr;         // Must outlive the engine; null = the CPU's.
    SpectraBank* spectra_bank = nullptr;  // Must outlive the engine; null = the CPU's.
    SpectraWorker::Options spectra;
    // The log is truncated every flush_ms, and when it is longer than wal_bytes_flush.
    int64_t wal_bytes_flush = 1 << 30;
    int64_t flush_ms = 60'000;
    // The data's file system keeps free the smaller of these.  Below it nothing more is
    // acknowledged until a tenth more is free.
    int64_t free_bytes_min = int64_t{1} << 30;
    double free_ratio_min = 0.05;
    // Open() waits so long for the log to be applied; the rest is applied behind it.
    int64_t apply_ms_max = 500;
    // Opens the log that several servers share; null = this server is alone, and its log
    // is a file.  With a shared log storage_path holds a cache, which begins empty.
    std::function<absl::StatusOr<std::unique_ptr<SharedLog>>(SharedLog::LaneDurableCallback)> open_shared_log;
    Ownership* ownership = nullptr;        // With a shared log; must outlive the engine.  Null = AlwaysHere.
    uint64_t events_per_run_max = 10'000;  // Events that are kept; the last one says that others were not.
  };

  // The admission's options, with the memory that the server takes for itself.
  static RunAdmission::Options AdmissionOf(const Options& options);

  // Opens everything under storage_path.  What the log holds beyond the database is
  // applied in the log's order, before later messages.  DATA_LOSS: corruption, with
  // what to do.
  static absl::StatusOr<std::unique_ptr<Engine>> Open(const Options& options, Counters* counters, Clock* clock);
  ~Engine();  // As Close().

  // Refuses new sessions and waits until all that was taken is durable and applied;
  // closes the log and flushes the database.
  absl::Status Close();
  // Call each second: guards the disk's floor, updates gauges.  An error is final: the
  // server must not go on.
  absl::Status Maintain();
  // Call each second, on a thread of its own, because it may wait for a database: stores
  // alerts that wait, reads other servers' alerts, truncates the log.
  void Upkeep();
  // Copies everything that is durable to `directory`, which must be missing and on the
  // same file system: a storage_path of one point in time.  Ingest goes on.
  // FAILED_PRECONDITION: the log is still being applied, or is shared.
  absl::Status WriteCheckpoint(const std::string& directory);
  // Of a cluster: lets old values become smaller from here on, by that time.
  void StartRetention(std::function<int64_t()> unix_nanos);

  // Every run is judged by these rules from some next step on, which its log says;
  // null = the built-in ones.
  void SetRules(RuleSetPtr rules) { rules_.Set(std::move(rules)); }
  // The same for every run without a policy of its own.
  void SetPolicy(PolicyPtr policy) { policy_.Set(std::move(policy)); }

  ImportSink* ingest() { return ingest_.get(); }
  RunControl* control() { return control_.get(); }
  PartitionHandover* partitions() { return partitions_.get(); }  // Null: this server is alone.

  RunTable* runs() { return &table_; }
  SeriesStore* series() { return series_.get(); }
  AlertStore* alerts() { return alerts_.get(); }
  ActionStore* actions() { return actions_.get(); }
  Database* database() { return database_.get(); }
  Baselines* baselines() { return baselines_.get(); }
  // The memory that the process may take, in bytes: limits.memory_max, or this machine's.
  int64_t memory_max() const { return admission_->memory_max(); }

  // Waits until every run that is shown as ended was looked at for its baselines.
  void AwaitLearned() { learner_->Drain(); }

 private:
  Engine(const Options& options, Counters* counters, Clock* clock);
  absl::Status OpenStores();
  void MakeParts();
  // Starts the shards on what the database and the log hold.
  absl::Status Recover();
  void CountActions();
  void OnDurable(uint32_t lane, Lsn durable);
  // `counted`: what the server and its runs may take by now.
  void ReturnMemory(int64_t counted);

  // Constant after construction.
  const Options options_;
  Counters* const counters_;
  Clock* const clock_;
  Histogram* const fsync_seconds_;
  Gauge* const wal_bytes_;
  Gauge* const database_degraded_;
  Gauge* const log_degraded_;

  // Constant after Open(), each thread-safe: the stores, lowest first.
  RunTable table_;
  ReloadableRules rules_;
  ReloadablePolicy policy_;
  AlwaysHere always_here_;
  Ownership* const ownership_;  // options_.ownership, or always_here_.
  std::unique_ptr<RunAdmission> admission_;
  int64_t memory_returned_ns_ = 0;  // Upkeep()'s.
  std::unique_ptr<LogBackend> wal_;
  SharedLog* shared_ = nullptr;  // wal_, if servers share it.
  std::unique_ptr<Database> database_;
  std::unique_ptr<SeriesStore> series_;
  std::unique_ptr<AlertStore> alerts_;
  std::unique_ptr<ActionStore> actions_;
  std::unique_ptr<Baselines> baselines_;

  // Constant after Open(), each thread-safe: what works on them.
  std::unique_ptr<SpectraWorker> spectra_;
  std::vector<std::unique_ptr<WorkPool>> savers_;  // By lane; empty: this server is alone.
  LiveRunParts parts_;
  Shards shards_;
  std::unique_ptr<RunRegistry> registry_;
  std::unique_ptr<LogReplay> replay_;
  std::unique_ptr<IngestCoordinator> ingest_;
  std::unique_ptr<RunController> control_;
  std::unique_ptr<LogTruncator> truncator_;
  std::unique_ptr<PartitionHandover> partitions_;
  std::unique_ptr<BaselineLearner> learner_;
  std::unique_ptr<Retention> retention_;
  std::unique_ptr<DiskGuard> disk_guard_;  // Maintain()'s own.

  std::atomic<bool> acknowledging_ = false;  // The shards have started: acknowledgements may go out.
  std::atomic<bool> closed_ = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_ENGINE_H_
