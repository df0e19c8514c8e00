#include "server/engine/engine.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/act/action_kinds.h"
#include "server/store/file_system.h"
#include "server/util/machine_memory.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Threads that wait for saves to be with the other servers of a cluster, for each of its
// databases: one fewer than the connections for rows (server/cluster/postgres_log.cc).
constexpr int kSavers = 4;
// The memory that the server takes beside its cache, the windows' budget and its runs:
// code, write buffers, and queues of usual length.
constexpr int64_t kOwnBytes = int64_t{256} << 20;
// How far the process may be beyond what is counted until freed memory is returned, and how often.
constexpr int64_t kReturnBytesMin = int64_t{128} << 20;
constexpr int64_t kReturnNanos = 10'000'000'000;

}  // namespace

Engine::Engine(const Options& options, Counters* counters, Clock* clock)
    : options_(options),
      counters_(counters),
      clock_(clock),
      fsync_seconds_(counters->histogram("bellwether_wal_fsync_seconds")),
      wal_bytes_(counters->gauge("bellwether_wal_bytes")),
      database_degraded_(counters->gauge("bellwether_degraded", {{"reason", "database"}})),
      log_degraded_(counters->gauge("bellwether_degraded", {{"reason", "log"}})),
      rules_(options.judge),
      ownership_(options.ownership != nullptr ? options.ownership : &always_here_) {
  rules_.Set(options.rules);
  policy_.Set(options.policy);
  spectra_ = std::make_unique<SpectraWorker>(options.spectra, options.spectra_bank, counters, clock);
}

Engine::~Engine() { (void)Close(); }

RunAdmission::Options Engine::AdmissionOf(const Options& options) {
  RunAdmission::Options admission = options.admission;
  admission.own_bytes =
      kOwnBytes + options.database.cache_bytes + options.series.window_bytes_max + options.answers_bytes_max;
  return admission;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Open(const Options& options, Counters* counters, Clock* clock) {
  std::unique_ptr<Engine> engine(new Engine(options, counters, clock));
  BW_RETURN_IF_ERROR(engine->OpenStores());
  engine->MakeParts();
  BW_RETURN_IF_ERROR(engine->Recover());
  if (engine->shared_ != nullptr) {
    engine->shared_->SetLost(
        [partitions = engine->partitions()](uint32_t partition) { partitions->FencePartition(partition); });
  }
  return engine;
}

absl::Status Engine::OpenStores() {
  BW_ASSIGN_OR_RETURN(admission_, RunAdmission::Create(AdmissionOf(options_), counters_));
  if (const absl::Status made = FileSystem::Real()->MakeDirectory(options_.storage_path); !made.ok()) {
    return absl::UnavailableError(absl::StrCat("storage.path: ", std::string(made.message())));
  }
  std::error_code error;
  std::filesystem::permissions(options_.storage_path, std::filesystem::perms::owner_all, error);
  Database::Options database = options_.database;
  database.directory = options_.storage_path + "/db";
  if (options_.open_shared_log != nullptr) {
    const auto on_durable = [this](uint32_t lane, Lsn durable) { OnDurable(lane, durable); };
    BW_ASSIGN_OR_RETURN(std::unique_ptr<SharedLog> shared, options_.open_shared_log(on_durable));
    database.shared = shared_ = shared.get();
    for (uint32_t lane = 0; lane < shared->lanes(); ++lane) {
      savers_.push_back(std::make_unique<WorkPool>(kSavers, static_cast<size_t>(options_.shards) * Shard::kSavesMax));
    }
    wal_ = std::move(shared);
    // Not the folder of a server that is alone: one line of the configuration must not
    // remove its data.
    database.directory = options_.storage_path + "/cluster-cache";
    std::filesystem::remove_all(database.directory, error);
  }
  BW_ASSIGN_OR_RETURN(database_, Database::Open(database));
  series_ = SeriesStore::Create(options_.series, database_.get());
  alerts_ = std::make_unique<AlertStore>(database_.get(), counters_);
  BW_RETURN_IF_ERROR(alerts_->Load());
  actions_ = std::make_unique<ActionStore>(database_.get());
  CountActions();
  baselines_ = std::make_unique<Baselines>(options_.baselines, database_.get(), counters_);
  BW_RETURN_IF_ERROR(baselines_->Load());
  if (wal_ == nullptr) {
    Wal::Options wal = options_.wal;
    wal.directory = options_.storage_path + "/wal";
    BW_ASSIGN_OR_RETURN(wal_, Wal::Open(wal, [this](Lsn durable) { OnDurable(0, durable); }));
  }
  return absl::OkStatus();
}

void Engine::MakeParts() {
  const auto hand_over = [this](RunId run, uint32_t rank, const Action& action) {
    return ingest_->HandOver(run, rank, action);
  };
  parts_ = {.rules = &rules_,
            .policy = &policy_,
            .actions = actions_.get(),
            .database = database_.get(),
            .series = series_.get(),
            .alerts = alerts_.get(),
            .table = &table_,
            .wal = wal_.get(),
            .counters = counters_,
            .clock = clock_,
            .bank = options_.bank,
            .baselines = baselines_.get(),
            .spectra = spectra_.get(),
            .savers = savers_.empty() ? nullptr : &savers_,
            .hand_over = hand_over,
            .events_max = options_.events_per_run_max,
            .attached = [this](RunId run) { return ingest_->IsAttached(run); }};
  registry_ = std::make_unique<RunRegistry>(parts_, options_.limits, ownership_);
  const LogReplay::Options replay{.limits = options_.limits,
                                  .storage_path = options_.storage_path,
                                  .repair = options_.wal.repair,
                                  .left_messages_max = options_.shard.queue_messages_max / 2};
  replay_ = std::make_unique<LogReplay>(replay, &parts_, &shards_, registry_.get());
  ingest_ = std::make_unique<IngestCoordinator>(IngestCoordinator::Parts{.runs = &parts_,
                                                                         .shards = &shards_,
                                                                         .registry = registry_.get(),
                                                                         .ownership = ownership_,
                                                                         .admission = admission_.get(),
                                                                         .replay = replay_.get()});
  control_ = std::make_unique<RunController>(RunController::Parts{.runs = &parts_,
                                                                  .shards = &shards_,
                                                                  .ownership = ownership_,
                                                                  .replay = replay_.get(),
                                                                  .registry = registry_.get(),
                                                                  .imports = ingest_.get(),
                                                                  .limits = options_.limits});
  const LogTruncator::Options truncator{.wal_bytes_max = options_.wal_bytes_flush, .interval_ms = options_.flush_ms};
  truncator_ = std::make_unique<LogTruncator>(truncator, &parts_, &shards_, replay_.get());
  if (shared_ != nullptr) {
    partitions_ = std::make_unique<PartitionHandover>(PartitionHandover::Parts{.runs = &parts_,
                                                                               .shards = &shards_,
                                                                               .registry = registry_.get(),
                                                                               .ownership = ownership_,
                                                                               .ingest = ingest_.get(),
                                                                               .truncator = truncator_.get(),
                                                                               .log = shared_,
                                                                               .limits = options_.limits});
  }
  learner_ = std::make_unique<BaselineLearner>(options_.learner, BaselineLearnerParts{.runs = &table_,
                                                                                      .series = series_.get(),
                                                                                      .alerts = alerts_.get(),
                                                                                      .database = database_.get(),
                                                                                      .baselines = baselines_.get(),
                                                                                      .counters = counters_,
                                                                                      .clock = clock_});
  retention_ =
      std::make_unique<Retention>(options_.retention, &table_, database_.get(), series_.get(), counters_, clock_);
  const DiskGuard::Options disk{.path = options_.storage_path,
                                .free_bytes_min = options_.free_bytes_min,
                                .free_ratio_min = options_.free_ratio_min};
  const auto give_back = [this] {
    if (replay_->done()) truncator_->TruncateAll();
  };
  disk_guard_ = std::make_unique<DiskGuard>(disk, wal_.get(), give_back, counters_);
}

absl::Status Engine::Recover() {
  shards_.Start(options_.shards, options_.shard, parts_, ownership_);
  spectra_->Start([this](RunId run, const SpectraMessage& answers) {
    if (!ownership_->Serves(run)) return true;  // The run's new owner computes them.
    if (shards_.Of(run).AppendSpectra(run, answers)) return true;
    // A log that failed for good takes nothing more: the answers are dropped.
    const absl::Status health = wal_->LogOf(run)->health();
    return !health.ok() && !absl::IsResourceExhausted(health);
  });
  ingest_->Start();
  BW_RETURN_IF_ERROR(replay_->Load());
  acknowledging_ = true;
  replay_->Start([this] {
    // A cluster's retention waits for the cluster's time.
    if (shared_ == nullptr) retention_->Start();
    learner_->Start();  // Not before: the log may reopen a run that had ended.
  });
  return replay_->WaitFor(absl::Milliseconds(options_.apply_ms_max));
}

void Engine::CountActions() {
  actions_->Subscribe([this](RunId, const Action& action, size_t fresh) {
    for (size_t i = action.history.size() - fresh; i < action.history.size(); ++i) {
      const Labels labels = {{"kind", NameOf(action.kind)}, {"result", NameOf(action.history[i].state)}};
      counters_->counter("bellwether_actions_total", labels)->Add();
    }
  });
}

void Engine::OnDurable(uint32_t lane, Lsn durable) {
  if (acknowledging_) ingest_->OnDurable(lane, durable);
}

absl::Status Engine::Maintain() {
  std::vector<double> seconds;
  wal_->TakeSyncSeconds(&seconds);
  for (const double second : seconds) fsync_seconds_->Observe(second);
  wal_bytes_->Set(static_cast<double>(wal_->bytes()));
  log_degraded_->Set(wal_->health().ok() ? 0 : 1);
  disk_guard_->Check();
  ingest_->RequestDeeperHeads();
  return replay_->status();
}

void Engine::Upkeep() {
  const bool stored = alerts_->StoreWaiting().ok();
  const bool told = alerts_->NotifyForeign().ok();
  database_degraded_->Set(stored && told ? 0 : 1);
  ReturnMemory(admission_->Show(table_.List(), clock_->UnixNanos()));
  truncator_->TruncateIfDue();
}

// What waited for saves in a storm is freed between what lives on: 1.9 of 5.3 GB, with 100 runs of
// 10,000 tensors.
void Engine::ReturnMemory(int64_t counted) {
  const int64_t now_ns = clock_->MonotonicNanos();
  if (now_ns - memory_returned_ns_ < kReturnNanos || ResidentBytes() < counted + kReturnBytesMin) return;
  memory_returned_ns_ = now_ns;
  ReturnFreedMemory();
}

void Engine::StartRetention(std::function<int64_t()> unix_nanos) {
  const auto whole = [this](RunId run) { return wal_->LogOf(run)->health().ok() && ownership_->HasWhole(run); };
  retention_->Share({.whole = whole, .unix_nanos = std::move(unix_nanos)});
  retention_->Start();
}

absl::Status Engine::WriteCheckpoint(const std::string& directory) {
  if (shared_ != nullptr) {
    return absl::FailedPreconditionError(
        "this server's runs are in PostgreSQL: back that up instead (docs/operate/cluster.md)");
  }
  if (!replay_->done()) return absl::FailedPreconditionError("the server still applies what its log holds: try again");
  // The database first: the log holds whatever is newer, as long as it is not truncated.
  absl::MutexLock lane(&truncator_->lane_mutex(0));  // A server alone has one lane.
  std::error_code error;
  if (!std::filesystem::create_directory(directory, error)) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, ": ", error ? error.message() : std::string("exists already")));
  }
  std::filesystem::permissions(directory, std::filesystem::perms::owner_all, error);
  BW_RETURN_IF_ERROR(database_->CopyTo(directory + "/db"));
  return wal_->CopyTo(directory + "/wal");
}

absl::Status Engine::Close() {
  if (closed_.exchange(true) || wal_ == nullptr) return absl::OkStatus();
  if (ingest_ == nullptr) return wal_->Close();  // Open() failed early.
  ingest_->Close();
  control_->Close();
  replay_->Stop();               // Before the learner, which it starts.
  learner_->Stop();              // The next start continues its work.
  retention_->Stop();            // The next start continues its work.
  wal_->Hold(absl::OkStatus());  // What was taken is written if there is any room.
  absl::Status status = wal_->Sync(wal_->last_lsn());
  spectra_->Stop();
  const std::vector<Lsn> keep = truncator_->SaveAll();
  for (const auto& shard : shards_) shard->Stop();
  // The database holds everything: the next start need not read the log again.
  if (status.ok()) status = truncator_->DropBelow(keep);
  const absl::Status closed = wal_->Close();
  return status.ok() ? closed : status;
}

}  // namespace bellwether::server
