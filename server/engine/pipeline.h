// pipeline.h: the writing side of the server, from a stream to the store.
//
// Owns the log, the database, the series, the table of runs and the shards.
// For streams and imports it is the ImportSink: it registers sessions, numbers epochs,
// drops duplicates, appends to the log, and acknowledges once the log says
// durable.  For readers it is the RunControl.  Thread-safe.
//
// Order of locks: a lane's flush mutex, registry, then a shard's mutex, then a
// session's.

#ifndef BELLWETHER_SERVER_ENGINE_PIPELINE_H_
#define BELLWETHER_SERVER_ENGINE_PIPELINE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/detect/detector_bank.h"
#include "server/detect/judge_options.h"
#include "server/engine/baseline_learner.h"
#include "server/engine/ports/ownership.h"
#include "server/engine/ports/partition_host.h"
#include "server/engine/ports/run_control.h"
#include "server/engine/ports/shared_log.h"
#include "server/engine/reloadable_policy.h"
#include "server/engine/reloadable_rules.h"
#include "server/engine/run_admission.h"
#include "server/engine/shard.h"
#include "server/engine/spectra_worker.h"
#include "server/ingest/decode_limits.h"
#include "server/ingest/ingest_sink.h"
#include "server/ingest/launches.h"
#include "server/model/partition.h"
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

class Pipeline final : public ImportSink, public RunControl, public PartitionHost {
 public:
  struct Options {
    std::string storage_path;
    int shards = 1;
    RunAdmission::Options admission;  // own_bytes is set from the options below.
    DecodeLimits limits;
    Wal::Options wal;            // directory is set from storage_path
    Database::Options database;  // likewise
    SeriesStore::Options series;
    Retention::Options retention;
    Baselines::Options baselines;
    BaselineLearner::Options learner;
    Shard::Options shard;
    JudgeOptions judge;                   // Built in: what a run without a rules file is judged by.
    RuleSetPtr rules;                     // In force at the start; null = none.
    PolicyPtr policy;                     // Likewise; null = the built-in one.
    DetectorBank* bank = nullptr;         // Must outlive the pipeline; null = the CPU's.
    SpectraBank* spectra_bank = nullptr;  // Likewise.
    SpectraWorker::Options spectra;
    // The log is made shorter every flush_ms, and when there is more of it than
    // this; runs that only its older half still holds are saved for that.
    int64_t wal_bytes_flush = 1 << 30;
    int64_t flush_ms = 60'000;
    // The data's file system keeps free the smaller of these; below it nothing
    // more is acknowledged until a tenth more is free.
    int64_t free_bytes_min = int64_t{1} << 30;
    double free_ratio_min = 0.05;
    // Open() waits so long for what the log holds beyond the database to be
    // applied; the rest is applied behind what comes in.
    int64_t apply_ms_max = 500;
    // Opens the log that several servers share; null = this one is alone, and its
    // log is a file.  With it storage_path holds a cache, which begins empty.
    std::function<absl::StatusOr<std::unique_ptr<SharedLog>>(SharedLog::LaneDurableCallback)> open_shared_log;
    Ownership* ownership = nullptr;        // With a shared log; must outlive the pipeline.  Null = AlwaysHere.
    uint64_t events_per_run_max = 10'000;  // Kept; the last one says that others were not.
    Info info;                             // Version, addresses, options, limits.
  };

  // With what the server takes for itself.
  static RunAdmission::Options AdmissionOf(const Options& options);

  // Opens everything under storage_path; what the log holds beyond the database
  // is applied behind it, in the log's order and before whatever comes later.
  // DATA_LOSS: corruption, with what to do.
  static absl::StatusOr<std::unique_ptr<Pipeline>> Open(const Options& options, Counters* counters, Clock* clock);
  ~Pipeline() override;

  // Refuses new sessions and waits until all that was taken is durable and
  // applied; closes the log and flushes the database.
  absl::Status Close();
  // Call each second: guards the disk's floor, updates gauges.  An error is final: the
  // server must not go on.
  absl::Status Maintain();
  // What may wait for a database, each second on a thread of its own: stores the alerts
  // that wait, tells of other servers', makes the log shorter.
  void Upkeep();
  // Writes a copy of everything that is durable to `directory`, which must be
  // missing and on the same file system: a storage_path of its own, of one point
  // in time.  Ingest goes on.  FAILED_PRECONDITION: the log is still being applied.
  absl::Status WriteCheckpoint(const std::string& directory);

  // Known once they are bound; before anybody can ask.
  void SetAddresses(std::string grpc, std::string http) {
    grpc_address_ = std::move(grpc);
    http_address_ = std::move(http);
  }

  // Of a cluster: who is told which runs are served here from now on, each time some
  // are; once, before any.  Called from the thread that takes them.
  void SetTaken(std::function<void(RunId first, RunId end)> taken) { taken_ = std::move(taken); }

  // Of a cluster: what is old becomes smaller from here on, by that time.
  void StartRetention(std::function<int64_t()> unix_nanos);

  // Every run is judged by these from some next step on, which its log says;
  // null = the built-in ones.
  void SetRules(RuleSetPtr rules) { rules_.Set(std::move(rules)); }
  // Likewise of every run that nobody set a policy for.
  void SetPolicy(PolicyPtr policy) { policy_.Set(std::move(policy)); }

  RunTable* runs() { return &table_; }
  SeriesStore* series() { return series_.get(); }
  AlertStore* alerts() { return alerts_.get(); }
  ActionStore* actions() { return actions_.get(); }
  Database* database() { return database_.get(); }
  Baselines* baselines() { return baselines_.get(); }

  // ImportSink
  absl::StatusOr<std::shared_ptr<IngestSession>> Open(const HelloMessage& hello, std::string payload,
                                                      SessionOwner* owner) override;
  void AwaitApplied(RunId run) override;
  void EndUnheard(RunId run) override;
  // RunControl
  absl::Status Annotate(RunId run, const RunEvent& event) override;
  absl::Status NoteAlert(RunId run, const std::string& key, const Database::AlertNote& note) override;
  std::unique_ptr<RunImport> StartImport(const std::string& as_name, bool notify) override;
  absl::Status Export(RunId run, const std::function<bool(std::string_view)>& sink) override;
  absl::StatusOr<Action> Act(RunId run, const ActionRequest& request, const std::string& malformed) override;
  absl::StatusOr<PolicyView> GetPolicy(RunId run) override;
  absl::StatusOr<PolicyView> SetPolicy(RunId run, const std::string& text, const std::string& by,
                                       const std::string& malformed) override;
  Info GetInfo() const override;
  absl::Status Ready() const override;
  // PartitionHost (pipeline_partitions.cc)
  absl::Status TakePartition(uint32_t partition, uint64_t epoch) override;
  absl::Status TakeHistory(uint32_t partition, const std::function<bool()>& is_wanted) override;
  void FencePartition(uint32_t partition) override;
  Lsn DropPartition(uint32_t partition, bool save) override;

  // Waits until every run that is shown as ended was looked at for what its
  // siblings can learn from it.
  void AwaitLearned() { learner_->Drain(); }

 private:
  class Session;
  friend class Session;

  // One (run, rank); guarded by its shard's mutex.
  struct RankSlot {
    uint64_t epoch = 0;
    uint64_t last_seq = 0;
    std::weak_ptr<Session> session;
    std::vector<Head> deeper;  // The session was asked to look deeper at these.
    uint32_t attempt = 0;      // The newest that the rank said hello of.
  };
  struct RunEntry : std::enable_shared_from_this<RunEntry> {
    RunId id = 0;
    RunDescription description;
    Launches launches;
    size_t shard = 0;
    std::map<uint32_t, std::unique_ptr<RankSlot>> ranks;
    // A new run, until its first Hello is in the log.  Nobody sees it and nothing of
    // it may be logged before: recovery learns from that Hello what the run is.
    std::unique_ptr<LiveRun> unlogged;
  };
  // Waits in the order of its lane of the log; guarded by its shard's mutex.
  struct PendingAck {
    enum class Of { kHello, kMessage, kBye };
    Lsn lsn = 0;
    Of of = Of::kMessage;
    uint64_t seq = 0;
    int64_t since_ns = 0;
    std::shared_ptr<Session> session;
  };

  Pipeline(const Options& options, Counters* counters, Clock* clock);
  absl::Status Recover();
  // What the database knows, then what the log adds to it: runs, ranks, epochs,
  // seqs; no payload is looked at but hellos'.
  absl::Status LoadRuns();
  absl::Status GoOnAboveSaved(Lsn saved, const std::string& run);
  // With `take_up` for a run that its hello tells of for the first time.
  absl::Status LoadRank(const WalRecord& record, const std::function<absl::Status(const RunRecord& fresh)>& take_up);
  // Its entry, with its ranks as stored.
  absl::Status LoadRun(const RunRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_mutex_);
  absl::Status AdoptNewRun(const RunRecord& fresh);
  // OK, or who serves the run.
  absl::Status AdmitRun(const RunUuid& uuid) ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_mutex_);
  // Everything of the run is here, and the log and rows that it is in can be written.
  bool HasWhole(RunId run);
  // What a record of a partition that is taken up says, unless it is applied.
  // Under the flush mutex of the partition's lane.
  absl::Status TakeUp(uint32_t partition, uint64_t epoch);
  Lsn LetGo(uint32_t partition, bool save);
  absl::Status TakeRecord(const WalRecord& record, const std::map<RunId, Lsn>& applied,
                          std::map<RunId, std::unique_ptr<LiveRun>>* live);
  // On a thread of its own: applies the log from `from` on, then lets the shards
  // have what comes in.
  void ApplyLog(Lsn from);
  absl::Status ApplyLogUntil(Lsn from, Lsn until);
  absl::Status ApplyRecord(const WalRecord& record);
  // Waits until the log is applied, as long as a person would.
  absl::Status AwaitRecovered() const;
  void GuardDisk();
  // Saves the runs that need the log below `end`, forgets what none needs; one lane
  // after the other, so that one whose database is silent holds up itself alone.
  void ShortenLog(Lsn end);
  absl::Status ShortenLane(uint32_t lane, Lsn end);
  // Saves the lane's runs that need the log below `end`; it is needed from the result on.
  Lsn CommitShards(uint32_t lane, Lsn end);
  // Makes the database durable and drops the lane below `keep`.
  absl::Status Forget(uint32_t lane, Lsn keep);
  LiveRunParts Parts();
  // A new run is judged by the rules in force from its first step on.
  void AppendRules(const RunEntry& run, int64_t time_unix_ms);
  void AppendPolicy(const RunEntry& run, int64_t time_unix_ms);  // Likewise.
  // Logs what was asked of `run`, and returns once it is durable and applied.
  absl::Status Ask(RunId run, WalKind kind, std::string payload, IngestMessage message);
  absl::Status LogAndApply(WalRecord record, IngestMessage message);
  bool HandOver(RunId run, uint32_t rank, const Action& action);
  bool IsAttached(RunId run);
  void CountActions();
  // Gives the Hello the attempt that its launch is of its run, and a launch that counts.
  absl::Status ResolveAttempt(int64_t time_unix_ms, HelloMessage* hello) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_mutex_);
  absl::StatusOr<RunEntry*> FindOrCreate(const HelloMessage& hello, int64_t time_unix_ms)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_mutex_);
  RunEntry* AddEntry(const RunRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_mutex_);
  void ForgetRun(RunEntry* run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_mutex_);
  void Adopt(std::unique_ptr<LiveRun> run);  // By its shard.
  // Of a shard and a lane; under the shard's mutex.
  std::deque<PendingAck>& PendingAcks(size_t shard, uint32_t lane) {
    return pending_acks_[shard * wal_->lanes() + lane];
  }
  std::deque<PendingAck>& PendingAcks(const RunEntry& run) { return PendingAcks(run.shard, wal_->LaneOf(run.id)); }
  void OnDurable(uint32_t lane, Lsn durable);
  // OK if any lane of the log goes on.
  absl::Status LogHealth() const;
  // INVALID_ARGUMENT: the seq is too far beyond the last one.
  absl::Status CheckRise(const Session& session, uint64_t seq) const;
  absl::StatusOr<IngestSession::Taken> Put(Session* session, IngestMessage& message, std::string& payload);
  // Asks the clients of runs for more of the heads that are on their way to fail.
  void AskForDeeper();

  const Options options_;
  Counters* const counters_;
  Clock* const clock_;
  RunTable table_;
  std::unique_ptr<RunAdmission> admission_;
  ReloadableRules rules_;
  ReloadablePolicy policy_;
  std::unique_ptr<LogBackend> wal_;
  SharedLog* shared_ = nullptr;  // wal_, where servers share it.
  AlwaysHere always_here_;
  Ownership* const ownership_;  // options_.ownership, or the one above.
  std::function<void(RunId first, RunId end)> taken_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<SeriesStore> series_;
  std::unique_ptr<AlertStore> alerts_;
  std::unique_ptr<ActionStore> actions_;
  std::unique_ptr<Baselines> baselines_;
  std::unique_ptr<SpectraWorker> spectra_;
  std::vector<std::unique_ptr<WorkPool>> savers_;  // By lane: wait for runs' saves; empty: this server is alone.
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<std::deque<PendingAck>> pending_acks_;  // PendingAcks()
  std::unique_ptr<BaselineLearner> learner_;
  std::unique_ptr<Retention> retention_;

  absl::Mutex registry_mutex_;
  // Sessions hold theirs, too: a run may be let go while streams end.
  std::map<RunUuid, std::shared_ptr<RunEntry>> runs_ ABSL_GUARDED_BY(registry_mutex_);
  std::map<RunId, RunEntry*> runs_by_id_ ABSL_GUARDED_BY(registry_mutex_);
  std::atomic<bool> closing_ = false;
  std::atomic<int64_t> flushed_ns_ = 0;
  std::atomic<bool> serving_ = false;    // The shards are made: acks may go out.
  std::atomic<bool> recovered_ = false;  // All of the log is applied: it may be shortened.
  std::map<RunId, Lsn> applied_lsn_;     // Of the database at the start; read by the thread below.
  mutable absl::Mutex apply_mutex_;
  absl::Status apply_status_ ABSL_GUARDED_BY(apply_mutex_);  // Why the log could not be applied.
  bool apply_ended_ ABSL_GUARDED_BY(apply_mutex_) = false;
  std::thread apply_thread_;
  // By lane: while it is held that lane of the log is not shortened.  Whoever holds one
  // may wait for its database; nobody holds two.
  std::array<absl::Mutex, kDatabasesMax> flush_mutexes_;
  bool disk_low_ = false;  // Maintain()'s own.
  std::string grpc_address_, http_address_;

  Counter* const gaps_;
  Histogram* const ack_seconds_;
  Histogram* const fsync_seconds_;
  Gauge* const wal_bytes_;
  Gauge* const store_bytes_;
  Gauge* const store_free_bytes_;
  Gauge* const unapplied_;
  Gauge* const disk_degraded_;
  Gauge* const database_degraded_;
  Gauge* const degraded_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PIPELINE_H_
