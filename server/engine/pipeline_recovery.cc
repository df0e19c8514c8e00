// The part of the Pipeline that starts: from what the database and the log hold
// to a server that takes more.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/pipeline.h"
#include "server/engine/pipeline_session.h"
#include "server/ingest/log_records.h"
#include "server/util/await_for.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// What a person or a script waits for the log to be applied.
constexpr absl::Duration kAwaitRecovered = absl::Seconds(20);
constexpr absl::Duration kLogStuckRetry = absl::Milliseconds(100);

}  // namespace

absl::Status Pipeline::Recover() {
  for (int i = 0; i < options_.shards; ++i) {
    shards_.push_back(std::make_unique<Shard>(options_.shard, Parts(), i));
    shards_.back()->BeginRecovery();
    {
      absl::MutexLock lock(&shards_.back()->mutex());
      shards_.back()->SetFeed(Shard::Feed::kReadBack);
    }
    shards_.back()->Start();
  }
  spectra_->Start([this](RunId run, const SpectraMessage& answers) {
    if (!ownership_->Serves(run)) return true;  // Its new owner computes them.
    if (shards_[static_cast<size_t>(run) % shards_.size()]->AppendSpectra(run, answers)) return true;
    // A log that has failed for good takes nothing more, of nobody.
    const absl::Status health = wal_->LogOf(run)->health();
    return !health.ok() && !absl::IsResourceExhausted(health);
  });
  pending_acks_.resize(shards_.size() * wal_->lanes());
  BW_RETURN_IF_ERROR(LoadRuns());
  flushed_ns_ = clock_->MonotonicNanos();
  unapplied_->Set(static_cast<double>(wal_->recovery().records));
  serving_ = true;
  const Lsn first = wal_->recovery().first_lsn;
  apply_thread_ = std::thread([this, from = first == 0 ? 1 : first] { ApplyLog(from); });
  absl::MutexLock lock(&apply_mutex_);
  AwaitFor(&apply_mutex_, absl::Condition(&apply_ended_), absl::Milliseconds(options_.apply_ms_max));
  return apply_status_;
}

absl::Status Pipeline::LoadRuns() {
  BW_ASSIGN_OR_RETURN(const std::vector<RunRecord> records, database_->ListRuns());
  Lsn saved = 0;
  std::string saved_run;
  const auto note_saved = [&saved, &saved_run](Lsn lsn, const RunRecord& record) {
    if (lsn <= saved) return;
    saved = lsn;
    saved_run = record.description.name;
  };
  {
    absl::MutexLock registry(&registry_mutex_);
    for (const RunRecord& record : records) {
      BW_RETURN_IF_ERROR(LoadRun(record));
      applied_lsn_[record.id] = record.applied_lsn;
      note_saved(record.applied_lsn, record);
      if (record.ended) continue;  // Its shard takes it up again if it goes on.
      auto run = std::make_unique<LiveRun>(Parts(), record);
      BW_RETURN_IF_ERROR(run->Load());
      note_saved(run->saved_lsn(), record);
      Adopt(std::move(run));
    }
  }
  BW_RETURN_IF_ERROR(GoOnAboveSaved(saved, saved_run));
  return wal_->ReadHeads([this](const WalRecord& record) {
    return LoadRank(record, [this](const RunRecord& fresh) { return AdoptNewRun(fresh); });
  });
}

// Whole segments that are gone from the log's end leave no trace in it.  Their LSNs must
// not be given again: what has one up to `saved` would be taken for saved.
absl::Status Pipeline::GoOnAboveSaved(Lsn saved, const std::string& run) {
  const Lsn last = wal_->recovery().last_lsn;
  if (saved <= last) return absl::OkStatus();
  if (!options_.wal.repair) {
    return absl::DataLossError(absl::StrCat(
        "the log ends at record ", last, ", but run ", run, " was applied up to ", saved, ": segments of ",
        options_.storage_path, "/wal are missing; put them back, or go on without them with --storage.repair"));
  }
  LogWarning(
      "the log ends at record {}, but run {} was applied up to {}: it goes on above that, and what else was there is "
      "lost",
      last, run, saved);
  return wal_->GoOnAbove(saved);
}

absl::Status Pipeline::LoadRun(const RunRecord& record) {
  RunEntry* const entry = AddEntry(record);
  BW_ASSIGN_OR_RETURN(const std::vector<RankRecord> ranks, database_->ListRanks(record.id));
  for (const RankRecord& rank : ranks) {
    auto slot = std::make_unique<RankSlot>(RankSlot{rank.epoch, rank.durable_seq, {}});
    slot->attempt = record.description.attempt;
    entry->ranks[rank.rank] = std::move(slot);
  }
  LiveRun::PublishRecord(record, Parts());
  return absl::OkStatus();
}

absl::Status Pipeline::LoadRank(const WalRecord& record,
                                const std::function<absl::Status(const RunRecord& fresh)>& take_up) {
  absl::MutexLock registry(&registry_mutex_);
  const auto found = runs_by_id_.find(record.run);
  RunEntry* entry = found == runs_by_id_.end() ? nullptr : found->second;
  if (record.kind == WalKind::kHello) {
    BW_ASSIGN_OR_RETURN(const IngestMessage message,
                        DecodeRecord(record, entry == nullptr ? nullptr : &entry->description.layout, options_.limits));
    const auto* const hello = std::get_if<HelloMessage>(&message.body);
    if (hello == nullptr) return absl::DataLossError(absl::StrCat("log record ", record.lsn, " is no hello"));
    if (entry == nullptr) {
      RunRecord fresh;
      fresh.id = record.run;
      fresh.description = hello->run;
      fresh.import_of = hello->import_of;
      fresh.import_notifies = hello->import_notifies;
      fresh.started_unix_ns = record.time_unix_ms * 1'000'000;
      // Adopted before any of its records: nothing of them counts as saved.
      fresh.applied_lsn = record.lsn - 1;
      entry = AddEntry(fresh);
      if (!take_up(fresh).ok()) {
        return absl::DataLossError(absl::StrCat("run ", hello->run.name, " cannot be taken up"));
      }
    }
    entry->launches.Begin(hello->run.launch_unix_ms, hello->run.attempt);
  }
  if (entry == nullptr) {
    return absl::DataLossError(absl::StrCat("log record ", record.lsn, " is of run ", record.run,
                                            ", which neither the database nor an earlier record knows"));
  }
  if (record.epoch == 0) return absl::OkStatus();
  std::unique_ptr<RankSlot>& slot = entry->ranks[record.rank];
  if (slot == nullptr) slot = std::make_unique<RankSlot>();
  slot->epoch = std::max(slot->epoch, record.epoch);
  slot->last_seq = std::max(slot->last_seq, record.seq);
  if (record.kind == WalKind::kHello) slot->attempt = std::max(slot->attempt, record.attempt);
  return absl::OkStatus();
}

absl::Status Pipeline::AdoptNewRun(const RunRecord& fresh) {
  auto run = std::make_unique<LiveRun>(Parts(), fresh);
  BW_RETURN_IF_ERROR(run->Load());
  LiveRun::PublishRecord(fresh, Parts());
  Adopt(std::move(run));
  return absl::OkStatus();
}

absl::Status Pipeline::ApplyRecord(const WalRecord& record) {
  if (closing_) return absl::CancelledError("closing");
  const auto applied = applied_lsn_.find(record.run);
  if (applied != applied_lsn_.end() && record.lsn <= applied->second) return absl::OkStatus();
  const RunEntry* entry = nullptr;
  {
    absl::MutexLock registry(&registry_mutex_);
    const auto found = runs_by_id_.find(record.run);
    if (found != runs_by_id_.end()) entry = found->second;
  }
  if (entry == nullptr) return absl::DataLossError(absl::StrCat("log record ", record.lsn, " is of no known run"));
  BW_ASSIGN_OR_RETURN(IngestMessage message, DecodeRecord(record, &entry->description.layout, options_.limits));
  Shard& shard = *shards_[entry->shard];
  const size_t bytes = record.payload.size();
  for (;;) {
    {
      absl::MutexLock lock(&shard.mutex());
      if (shard.HasRoomForRecovered(bytes)) {
        shard.PushRecovered(
            {record.lsn, record.run, record.rank, record.epoch, record.time_unix_ms, std::move(message)}, bytes);
        return absl::OkStatus();
      }
    }
    shard.Barrier([] {});
  }
}

absl::Status Pipeline::ApplyLogUntil(Lsn from, Lsn until) {
  return wal_->Read(from, until, [this, until](const WalRecord& record) {
    unapplied_->Set(static_cast<double>(until - record.lsn + 1));  // 0 once all of it is applied.
    return ApplyRecord(record);
  });
}

void Pipeline::ApplyLog(Lsn from) {
  const Lsn begin = from;
  absl::Status status;
  // What comes in meanwhile is behind it in the log and is read from there, until
  // the rest is small.
  for (Lsn until = wal_->durable_lsn(); status.ok() && until >= from; until = wal_->durable_lsn()) {
    status = ApplyLogUntil(from, until);
    const bool little_left = wal_->last_lsn() - until < options_.shard.queue_messages_max / 2;
    from = until + 1;
    if (little_left) break;
  }
  // From one point of the log on the shards keep for themselves what comes.
  Lsn until = 0;
  for (const auto& shard : shards_) shard->mutex().Lock();
  for (const auto& shard : shards_) {
    shard->mutex().AssertHeld();
    shard->SetFeed(Shard::Feed::kKeepBack);
  }
  until = wal_->last_lsn();
  for (const auto& shard : shards_) shard->mutex().Unlock();
  while (status.ok() && !wal_->Sync(until).ok()) {
    // Only what is on disk can be read back; a disk that is full gets room again.
    if (closing_) status = absl::CancelledError("closing");
    if (const absl::Status health = wal_->health(); !absl::IsResourceExhausted(health)) status = health;
    absl::SleepFor(kLogStuckRetry);
  }
  if (status.ok() && until >= from) status = ApplyLogUntil(from, until);
  if (status.ok()) {
    for (const auto& shard : shards_) {
      absl::MutexLock lock(&shard->mutex());
      shard->SetFeed(Shard::Feed::kLive);
    }
    for (const auto& shard : shards_) {
      shard->EndRecovery();
      shard->CommitAll();
    }
    if (until >= begin) LogInfo("the log is applied up to record {}", until);
    recovered_ = true;
    if (shared_ == nullptr) retention_->Start();  // Of a cluster once the others' time is known.
    learner_->Start();                            // Not before: a run that had ended may go on in the log.
  } else if (!absl::IsCancelled(status)) {
    LogError("the log could not be applied: {}", std::string(status.message()));
  }
  unapplied_->Set(0);
  absl::MutexLock lock(&apply_mutex_);
  if (!absl::IsCancelled(status)) apply_status_ = status;
  apply_ended_ = true;
}

absl::Status Pipeline::AwaitRecovered() const {
  if (recovered_) return absl::OkStatus();
  absl::MutexLock lock(&apply_mutex_);
  if (AwaitFor(&apply_mutex_, absl::Condition(&apply_ended_), kAwaitRecovered)) return apply_status_;
  return absl::UnavailableError("the server still applies what its log holds: try again in a moment");
}

}  // namespace bellwether::server
