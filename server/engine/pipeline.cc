#include "server/engine/pipeline.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/pipeline_session.h"
#include "server/ingest/log_records.h"
#include "server/ingest/run_import.h"
#include "server/store/file_system.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Of Sampling.deeper.
constexpr size_t kDeeperHeadsMax = 64;
// Threads that wait for saves to be with the other servers of a cluster, for each of its
// databases: one fewer than the connections for rows (server/cluster/postgres_log.cc).
constexpr int kSavers = 4;
// What the server takes of memory beside its cache, the windows' budget and its runs: code,
// write buffers, queues as they usually are.
constexpr int64_t kOwnBytes = int64_t{256} << 20;

// The furthest first.
std::vector<Head> DeeperHeads(const RunSnapshot& run) {
  const Layout& layout = run.record.description.layout;
  std::vector<std::pair<int, Head>> found;  // -stage, head
  for (size_t i = 0; i < run.head_stage.size(); ++i) {
    if (run.head_stage[i] == 0) continue;
    found.push_back(
        {-int{run.head_stage[i]}, {static_cast<int32_t>(i) / layout.heads, static_cast<int32_t>(i) % layout.heads}});
  }
  std::sort(found.begin(), found.end());
  if (found.size() > kDeeperHeadsMax) found.resize(kDeeperHeadsMax);
  std::vector<Head> heads;
  for (const auto& [stage, head] : found) heads.push_back(head);
  return heads;
}

}  // namespace

Pipeline::Pipeline(const Options& options, Counters* counters, Clock* clock)
    : options_(options),
      counters_(counters),
      clock_(clock),
      rules_(options.judge),
      ownership_(options.ownership != nullptr ? options.ownership : &always_here_),
      gaps_(counters->counter("bellwether_ingest_seq_gaps_total")),
      ack_seconds_(counters->histogram("bellwether_ack_seconds")),
      fsync_seconds_(counters->histogram("bellwether_wal_fsync_seconds")),
      wal_bytes_(counters->gauge("bellwether_wal_bytes")),
      store_bytes_(counters->gauge("bellwether_store_bytes", {{"kind", "database"}})),
      store_free_bytes_(counters->gauge("bellwether_store_free_bytes")),
      unapplied_(counters->gauge("bellwether_wal_unapplied_frames")),
      disk_degraded_(counters->gauge("bellwether_degraded", {{"reason", "disk"}})),
      database_degraded_(counters->gauge("bellwether_degraded", {{"reason", "database"}})),
      degraded_(counters->gauge("bellwether_degraded", {{"reason", "log"}})) {
  rules_.Set(options.rules);
  policy_.Set(options.policy);
  spectra_ = std::make_unique<SpectraWorker>(options.spectra, options.spectra_bank, counters, clock);
}

Pipeline::~Pipeline() { (void)Close(); }

LiveRunParts Pipeline::Parts() {
  return {.rules = &rules_,
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
          .hand_over = [this](RunId run, uint32_t rank, const Action& action) { return HandOver(run, rank, action); },
          .events_max = options_.events_per_run_max,
          .attached = [this](RunId run) { return IsAttached(run); }};
}

RunAdmission::Options Pipeline::AdmissionOf(const Options& options) {
  RunAdmission::Options admission = options.admission;
  admission.own_bytes = kOwnBytes + options.database.cache_bytes + options.series.window_bytes_max;
  return admission;
}

absl::StatusOr<std::unique_ptr<Pipeline>> Pipeline::Open(const Options& options, Counters* counters, Clock* clock) {
  std::unique_ptr<Pipeline> pipeline(new Pipeline(options, counters, clock));
  BW_ASSIGN_OR_RETURN(pipeline->admission_, RunAdmission::Create(AdmissionOf(options), counters));
  if (const absl::Status made = FileSystem::Real()->MakeDirectory(options.storage_path); !made.ok()) {
    return absl::UnavailableError(absl::StrCat("storage.path: ", std::string(made.message())));
  }
  std::error_code error;
  std::filesystem::permissions(options.storage_path, std::filesystem::perms::owner_all, error);
  Database::Options database = options.database;
  database.directory = options.storage_path + "/db";
  if (options.open_shared_log != nullptr) {
    const auto on_durable = [raw = pipeline.get()](uint32_t lane, Lsn durable) { raw->OnDurable(lane, durable); };
    BW_ASSIGN_OR_RETURN(std::unique_ptr<SharedLog> shared, options.open_shared_log(on_durable));
    database.shared = pipeline->shared_ = shared.get();
    for (uint32_t lane = 0; lane < shared->lanes(); ++lane) {
      pipeline->savers_.push_back(
          std::make_unique<WorkPool>(kSavers, static_cast<size_t>(options.shards) * Shard::kSavesMax));
    }
    pipeline->wal_ = std::move(shared);
    // Another folder than that of a server alone, whose data nobody may lose by
    // a line in the configuration.
    database.directory = options.storage_path + "/cluster-cache";
    std::filesystem::remove_all(database.directory, error);
  }
  BW_ASSIGN_OR_RETURN(pipeline->database_, Database::Open(database));
  pipeline->series_ = SeriesStore::Create(options.series, pipeline->database_.get());
  pipeline->alerts_ = std::make_unique<AlertStore>(pipeline->database_.get(), counters);
  BW_RETURN_IF_ERROR(pipeline->alerts_->Load());
  pipeline->actions_ = std::make_unique<ActionStore>(pipeline->database_.get());
  pipeline->CountActions();
  pipeline->baselines_ = std::make_unique<Baselines>(options.baselines, pipeline->database_.get(), counters);
  BW_RETURN_IF_ERROR(pipeline->baselines_->Load());
  if (pipeline->wal_ == nullptr) {
    Wal::Options wal = options.wal;
    wal.directory = options.storage_path + "/wal";
    BW_ASSIGN_OR_RETURN(pipeline->wal_,
                        Wal::Open(wal, [raw = pipeline.get()](Lsn durable) { raw->OnDurable(0, durable); }));
  }
  pipeline->learner_ =
      std::make_unique<BaselineLearner>(options.learner, BaselineLearnerParts{.runs = &pipeline->table_,
                                                                              .series = pipeline->series_.get(),
                                                                              .alerts = pipeline->alerts_.get(),
                                                                              .database = pipeline->database_.get(),
                                                                              .baselines = pipeline->baselines_.get(),
                                                                              .counters = counters,
                                                                              .clock = clock});
  pipeline->retention_ = std::make_unique<Retention>(options.retention, &pipeline->table_, pipeline->database_.get(),
                                                     pipeline->series_.get(), counters, clock);
  BW_RETURN_IF_ERROR(pipeline->Recover());
  if (pipeline->shared_ != nullptr) {
    pipeline->shared_->SetLost([raw = pipeline.get()](uint32_t partition) { raw->FencePartition(partition); });
  }
  return pipeline;
}

Pipeline::RunEntry* Pipeline::AddEntry(const RunRecord& record) {
  auto entry = std::make_shared<RunEntry>();
  entry->id = record.id;
  entry->description = record.description;
  entry->launches.Begin(record.description.launch_unix_ms, record.description.attempt);
  entry->shard = static_cast<size_t>(record.id) % shards_.size();
  ownership_->RecordRun(record.id);
  runs_by_id_[record.id] = entry.get();
  return (runs_[record.description.uuid] = std::move(entry)).get();
}

void Pipeline::ForgetRun(RunEntry* run) {
  series_->Forget(run->id);
  const RunUuid uuid = run->description.uuid;
  runs_by_id_.erase(run->id);
  runs_.erase(uuid);
}

void Pipeline::Adopt(std::unique_ptr<LiveRun> run) {
  Shard& shard = *shards_[static_cast<size_t>(run->record().id) % shards_.size()];
  absl::MutexLock lock(&shard.mutex());
  shard.Adopt(std::move(run));
}

absl::StatusOr<Pipeline::RunEntry*> Pipeline::FindOrCreate(const HelloMessage& hello, int64_t time_unix_ms) {
  const auto found = runs_.find(hello.run.uuid);
  if (found != runs_.end()) {
    RunEntry* entry = found->second.get();
    if (!(entry->description.layout == hello.run.layout)) {
      const Layout& known = entry->description.layout;
      return absl::FailedPreconditionError(
          absl::StrCat("hello.run.layout: run ", hello.run.name, " is known with ", known.layers, " layers x ",
                       known.heads, " heads (", known.kv_heads, " key heads); another model needs another run"));
    }
    return entry;
  }
  BW_RETURN_IF_ERROR(admission_->Admit(hello.run.layout, table_.List(), clock_->UnixNanos()));
  RunRecord record;
  record.id = ownership_->NextRun(hello.run.uuid);
  record.description = hello.run;
  record.import_of = hello.import_of;
  record.import_notifies = hello.import_notifies;
  record.started_unix_ns = time_unix_ms * 1'000'000;
  record.applied_lsn = wal_->last_lsn();
  auto run = std::make_unique<LiveRun>(Parts(), record);
  BW_RETURN_IF_ERROR(run->Load());
  RunEntry* entry = AddEntry(record);
  entry->unlogged = std::move(run);
  return entry;
}

absl::Status Pipeline::ResolveAttempt(int64_t time_unix_ms, HelloMessage* hello) const {
  RunDescription& run = hello->run;
  run.launch_unix_ms = Launches::Credible(run.launch_unix_ms, time_unix_ms);
  const auto found = runs_.find(run.uuid);
  if (found == runs_.end()) return absl::OkStatus();
  const std::optional<uint32_t> attempt = found->second->launches.AttemptOf(run.launch_unix_ms, run.attempt);
  if (!attempt.has_value()) {
    return absl::AbortedError(absl::StrCat("hello.run.launch_unix_ms = ", run.launch_unix_ms, ": attempt ",
                                           found->second->launches.newest_attempt(), " of run ", run.name,
                                           " was launched later"));
  }
  run.attempt = *attempt;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<IngestSession>> Pipeline::Open(const HelloMessage& told, std::string payload,
                                                              SessionOwner* owner) {
  if (closing_) return absl::UnavailableError("the server is draining; come back");
  HelloMessage hello = told;
  LogBackend& log = *wal_->lane(ownership_->LaneOf(hello.run.uuid));
  absl::MutexLock registry(&registry_mutex_);
  const int64_t time_unix_ms = clock_->UnixMillis();
  BW_RETURN_IF_ERROR(AdmitRun(hello.run.uuid));  // Where it is well, if not here.
  BW_RETURN_IF_ERROR(log.health());
  BW_RETURN_IF_ERROR(ResolveAttempt(time_unix_ms, &hello));
  BW_ASSIGN_OR_RETURN(RunEntry* const run, FindOrCreate(hello, time_unix_ms));
  const absl::Cleanup forget_unlogged = [this, run] {
    registry_mutex_.AssertHeld();
    if (run->unlogged != nullptr) ForgetRun(run);
  };
  Shard& shard = *shards_[run->shard];
  std::shared_ptr<Session> fenced;
  std::shared_ptr<Session> session;
  {
    absl::MutexLock lock(&shard.mutex());
    const bool is_new = run->ranks.empty();
    std::unique_ptr<RankSlot>& slot = run->ranks[hello.rank];
    if (slot == nullptr) slot = std::make_unique<RankSlot>();
    // The sender of a trainer that died must not push out the one that came after
    // it, whichever of them finds a restarted server first.
    if (hello.run.attempt < slot->attempt) {
      return absl::AbortedError(absl::StrCat("hello.run.attempt = ", hello.run.attempt, ": attempt ", slot->attempt,
                                             " of run ", hello.run.name, " has begun at rank ", hello.rank));
    }
    // A recording pushes nobody out, neither a trainer nor another import.
    const std::shared_ptr<Session> held = slot->session.lock();
    if (!hello.import_of.empty() && held != nullptr && held->attached()) {
      return absl::AbortedError(
          absl::StrCat("run ", hello.run.name, " is written to by somebody else just now; come back in a moment"));
    }
    WalRecord record;
    record.kind = WalKind::kHello;
    record.run = run->id;
    record.rank = hello.rank;
    record.attempt = hello.run.attempt;
    record.epoch = slot->epoch + 1;
    record.time_unix_ms = time_unix_ms;
    record.payload = std::move(payload);
    const size_t bytes = record.payload.size();
    const auto adopt = [this, run, &shard] {
      shard.mutex().AssertHeld();
      if (run->unlogged == nullptr) return;
      LiveRun::PublishRecord(run->unlogged->record(), Parts());
      shard.Adopt(std::move(run->unlogged));
    };
    BW_ASSIGN_OR_RETURN(const Lsn lsn, shard.Append(std::move(record), {0, hello}, bytes, adopt));
    ++slot->epoch;
    slot->attempt = hello.run.attempt;
    run->launches.Begin(hello.run.launch_unix_ms, hello.run.attempt);
    slot->deeper.clear();  // The new session was asked for nothing yet.
    fenced = slot->session.lock();
    session = std::make_shared<Session>(this, run, slot.get(), hello, owner);
    slot->session = session;
    if (is_new) {
      AppendRules(*run, time_unix_ms);
      AppendPolicy(*run, time_unix_ms);
    }
    PendingAcks(*run).push_back({lsn, PendingAck::Of::kHello, slot->last_seq, clock_->MonotonicNanos(), session});
  }
  if (fenced != nullptr) fenced->Tell([](SessionOwner* old) { old->OnFenced(); });
  // The log may have become durable before the entry above was there.
  OnDurable(wal_->LaneOf(run->id), log.durable_lsn());
  return session;
}

void Pipeline::AppendRules(const RunEntry& run, int64_t time_unix_ms) {
  const RuleSetPtr rules = rules_.current();
  if (rules->text.empty()) return;
  WalRecord record;
  record.kind = WalKind::kRules;
  record.run = run.id;
  record.attempt = run.launches.newest_attempt();
  record.time_unix_ms = time_unix_ms;
  record.payload = rules->text;
  Shard& shard = *shards_[run.shard];
  shard.mutex().AssertHeld();
  const RulesMessage message{std::make_shared<const std::string>(rules->text)};
  (void)shard.Append(std::move(record), {0, message});  // If it fails, the shard will see that the rules differ.
}

// One seq that is far off would leave no number for what comes after it.  A rank of
// which this server knows nothing goes on with the numbers that its client has.
absl::Status Pipeline::CheckRise(const Session& session, uint64_t seq) const {
  constexpr uint64_t kRiseMax = uint64_t{1} << 32;  // Messages that were lost in between.
  constexpr uint64_t kFirstMax = uint64_t{1} << 53;
  const uint64_t last = session.slot()->last_seq;
  const uint64_t from = last != 0 ? last : std::min(std::max<uint64_t>(session.first_unacked_seq(), 1) - 1, kFirstMax);
  if (seq - from <= kRiseMax || seq < from) return absl::OkStatus();
  counters_->counter("bellwether_ingest_limit_refused_total", {{"limit", "seq"}})->Add();
  return absl::InvalidArgumentError(
      absl::StrCat("seq = ", seq, ": must be in [", last + 1, ", ", from + kRiseMax, "]: ", last, " was the last one"));
}

absl::StatusOr<IngestSession::Taken> Pipeline::Put(Session* session, IngestMessage& message, std::string& payload) {
  if (closing_) return absl::UnavailableError("the server is draining; come back");
  RunEntry* const run = session->run();
  Shard& shard = *shards_[run->shard];
  Lsn lsn = 0;
  {
    absl::MutexLock lock(&shard.mutex());
    RankSlot& slot = *session->slot();
    if (slot.epoch != session->epoch()) return IngestSession::Taken::kFenced;
    if (message.seq <= slot.last_seq) {
      // Durable with whatever is the log's last record now.
      PendingAcks(*run).push_back({wal_->last_lsn(), PendingAck::Of::kMessage, message.seq, clock_->MonotonicNanos(),
                                   session->shared_from_this()});
      lsn = wal_->last_lsn();
    } else {
      BW_RETURN_IF_ERROR(CheckRise(*session, message.seq));
      const size_t bytes = payload.size();
      const auto wait_for_room = [&] {
        shard.CallWhenRoom([waiting = session->weak_from_this()] {
          if (const auto alive = waiting.lock()) alive->Tell([](SessionOwner* owner) { owner->OnRoom(); });
        });
        return IngestSession::Taken::kBusy;
      };
      if (!shard.HasRoom(bytes)) return wait_for_room();
      WalRecord record;
      record.kind = WalKind::kMessage;
      record.run = run->id;
      record.rank = session->rank();
      record.epoch = session->epoch();
      record.seq = message.seq;
      record.time_unix_ms = clock_->UnixMillis();
      record.payload = std::move(payload);
      const uint64_t seq = message.seq;
      const auto appended = shard.Append(record, std::move(message), bytes);
      if (!appended.ok()) {
        if (!absl::IsResourceExhausted(appended.status())) return appended.status();
        payload = std::move(record.payload);
        return wait_for_room();
      }
      if (seq != slot.last_seq + 1) gaps_->Add();
      slot.last_seq = seq;
      lsn = *appended;
      PendingAcks(*run).push_back(
          {lsn, PendingAck::Of::kMessage, seq, clock_->MonotonicNanos(), session->shared_from_this()});
      return IngestSession::Taken::kTaken;
    }
  }
  OnDurable(wal_->LaneOf(run->id), wal_->LogOf(run->id)->durable_lsn());
  return IngestSession::Taken::kDuplicate;
}

void Pipeline::OnDurable(uint32_t lane, Lsn durable) {
  if (!serving_) return;  // Nobody waits yet, and the shards are being made.
  const int64_t now_ns = clock_->MonotonicNanos();
  for (size_t i = 0; i < shards_.size(); ++i) {
    std::vector<PendingAck> ready;
    {
      absl::MutexLock lock(&shards_[i]->mutex());
      std::deque<PendingAck>& pending = PendingAcks(i, lane);
      while (!pending.empty() && pending.front().lsn <= durable) {
        ready.push_back(std::move(pending.front()));
        pending.pop_front();
      }
    }
    // One word per session: its highest.
    std::map<Session*, const PendingAck*> last;
    for (const PendingAck& ack : ready) {
      if (ack.of == PendingAck::Of::kBye) continue;
      ack_seconds_->Observe(static_cast<double>(now_ns - ack.since_ns) * 1e-9);
      if (ack.of == PendingAck::Of::kHello) {
        ack.session->Tell([&](SessionOwner* owner) { owner->OnOpen(ack.seq); });
      } else {
        last[ack.session.get()] = &ack;
      }
    }
    for (const auto& [session, ack] : last) {
      session->Tell([&](SessionOwner* owner) { owner->OnDurable(ack->seq); });
    }
    for (const PendingAck& ack : ready) {  // The last word of each.
      if (ack.of == PendingAck::Of::kBye) ack.session->Tell([](SessionOwner* owner) { owner->OnGoodbye(); });
    }
  }
}

void Pipeline::AwaitApplied(RunId run) {
  (void)AwaitRecovered();
  Shard& shard = *shards_[static_cast<size_t>(run) % shards_.size()];
  shard.Barrier([] {});  // Its Gram matrices are with the worker.
  spectra_->AwaitIdle();
  shard.CommitAll();
}

void Pipeline::EndUnheard(RunId run) {
  AwaitApplied(run);
  shards_[static_cast<size_t>(run) % shards_.size()]->PublishApplied(run);
  const RunSnapshotPtr snapshot = table_.Get(run);
  if (snapshot == nullptr || snapshot->record.ended) return;
  const RunSilentMessage silent{snapshot->record.last_report_unix_ns / 1'000'000};
  WalRecord record;
  record.kind = WalKind::kRunSilent;
  record.run = run;
  record.attempt = snapshot->record.description.attempt;
  record.payload = EncodeRunSilent(silent);
  if (const absl::Status ended = LogAndApply(std::move(record), {0, silent}); !ended.ok()) {
    LogWarning("run {} stays open until it has been silent for long enough: {}", snapshot->record.description.name,
               std::string(ended.message()));
  }
}

void Pipeline::AskForDeeper() {
  absl::MutexLock registry(&registry_mutex_);
  for (const auto& [uuid, run] : runs_) {
    const RunSnapshotPtr snapshot = table_.Get(run->id);
    if (snapshot == nullptr || snapshot->record.ended) continue;
    const std::vector<Head> deeper = DeeperHeads(*snapshot);
    std::vector<std::shared_ptr<Session>> ask;
    {
      absl::MutexLock lock(&shards_[run->shard]->mutex());
      for (const auto& [rank, slot] : run->ranks) {
        auto session = slot->session.lock();
        if (session == nullptr || slot->deeper == deeper) continue;
        slot->deeper = deeper;
        ask.push_back(std::move(session));
      }
    }
    for (const auto& session : ask) {
      session->Tell([&](SessionOwner* owner) { owner->OnDeeper(deeper); });
    }
  }
}

absl::Status Pipeline::Annotate(RunId run, const RunEvent& event) {
  BW_RETURN_IF_ERROR(AwaitRecovered());
  const RunSnapshotPtr snapshot = table_.Get(run);
  if (snapshot == nullptr) return absl::NotFoundError("no such run");
  BW_ASSIGN_OR_RETURN(const uint64_t events, CountEventsOf(*snapshot, *database_));
  // Whoever writes it finds it; the last place is for the note that there are no more.
  if (events + 1 >= options_.events_per_run_max) {
    return absl::ResourceExhaustedError(absl::StrCat("events of run ", snapshot->record.description.name, " = ", events,
                                                     ": at most ", options_.events_per_run_max,
                                                     " are kept (limits.events_per_run_max)"));
  }
  WalRecord record;
  record.kind = WalKind::kMessage;
  record.run = run;
  record.attempt = event.attempt;
  record.payload = EncodeEvent(event);
  return LogAndApply(std::move(record), {0, event});
}

absl::Status Pipeline::NoteAlert(RunId run, const std::string& key, const Database::AlertNote& note) {
  BW_RETURN_IF_ERROR(wal_->LogOf(run)->health());  // Known to be silent: no further one waits for it.
  return alerts_->Annotate(run, key, note);
}

std::unique_ptr<RunImport> Pipeline::StartImport(const std::string& as_name, bool notify) {
  return ImportRecording(this, &table_, options_.limits, as_name, notify);
}

absl::Status Pipeline::Export(RunId run, const std::function<bool(std::string_view)>& sink) {
  const RunSnapshotPtr snapshot = table_.Get(run);
  if (snapshot == nullptr) return absl::NotFoundError("no such run");
  EventReader events(snapshot.get(), database_.get());
  return ExportRecording(snapshot->record, &events, *series_, sink);
}

RunControl::Info Pipeline::GetInfo() const {
  Info info = options_.info;
  info.grpc_address = grpc_address_;
  info.http_address = http_address_;
  info.limits["memory_max"] = static_cast<double>(admission_->memory_max());  // As shipped it is what is there.
  for (const auto& entry : counters_->List()) {
    if (entry.histogram != nullptr) continue;
    std::string name = entry.name;
    for (const auto& [label, value] : entry.labels) absl::StrAppend(&name, "{", label, "=", value, "}");
    info.counters[name] = entry.counter != nullptr ? entry.counter->value() : entry.gauge->value();
  }
  return info;
}

absl::Status Pipeline::Ready() const {
  if (closing_) return absl::UnavailableError("draining");
  return LogHealth();
}

}  // namespace bellwether::server
