#include "server/engine/log_replay.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/run_deletion.h"
#include "server/ingest/log_records.h"
#include "server/util/await_for.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// How long a person or a script waits for the log to be applied.
constexpr absl::Duration kAwait = absl::Seconds(20);
constexpr absl::Duration kLogStuckRetry = absl::Milliseconds(100);

}  // namespace

LogReplay::LogReplay(const Options& options, const LiveRunParts* runs, const Shards* shards, RunRegistry* registry)
    : options_(options),
      runs_(*runs),
      shards_(*shards),
      registry_(*registry),
      log_(runs->wal),
      unapplied_(runs->counters->gauge("bellwether_wal_unapplied_frames")) {}

absl::Status LogReplay::Load() {
  BW_RETURN_IF_ERROR(LoadRuns());
  BW_RETURN_IF_ERROR(log_->ReadHeads([this](const WalRecord& record) {
    return registry_.LoadRank(record, [this](const RunRecord& fresh) { return Adopt(fresh); });
  }));
  unapplied_->Set(static_cast<double>(log_->recovery().records));
  return absl::OkStatus();
}

absl::Status LogReplay::LoadRuns() {
  BW_ASSIGN_OR_RETURN(const std::vector<RunRecord> records, runs_.database->ListRuns());
  Lsn saved = 0;
  std::string saved_run;
  const auto record_saved = [&saved, &saved_run](Lsn lsn, const RunRecord& record) {
    if (lsn <= saved) return;
    saved = lsn;
    saved_run = record.description.name;
  };
  {
    absl::MutexLock registry(&registry_.mutex());
    for (const RunRecord& record : records) {
      if (record.deleted) {
        registry_.PassOver(record.id);
        BW_RETURN_IF_ERROR(DeleteStored(runs_, record));  // What a crash has left of it.
        applied_lsn_[record.id] = std::numeric_limits<Lsn>::max();
        continue;
      }
      BW_RETURN_IF_ERROR(registry_.Load(record));
      applied_lsn_[record.id] = record.applied_lsn;
      record_saved(record.applied_lsn, record);
      if (record.ended) continue;  // Its shard loads it when a message of it comes.
      BW_ASSIGN_OR_RETURN(std::unique_ptr<LiveRun> run, LiveRun::Load(runs_, record));
      record_saved(run->state().saved_lsn(), record);
      shards_.Adopt(std::move(run));
    }
  }
  return ContinueAboveSaved(saved, saved_run);
}

// A record that is given an LSN up to `saved` again would count as saved.
absl::Status LogReplay::ContinueAboveSaved(Lsn saved, const std::string& run) {
  const Lsn last = log_->recovery().last_lsn;
  if (saved <= last) return absl::OkStatus();
  if (!options_.repair) {
    return absl::DataLossError(absl::StrCat(
        "the log ends at record ", last, ", but run ", run, " was applied up to ", saved, ": segments of ",
        options_.storage_path, "/wal are missing; put them back, or go on without them with --storage.repair"));
  }
  LogWarning(
      "the log ends at record {}, but run {} was applied up to {}: it goes on above that, and what else was there is "
      "lost",
      last, run, saved);
  return log_->GoOnAbove(saved);
}

absl::Status LogReplay::Adopt(const RunRecord& fresh) {
  BW_ASSIGN_OR_RETURN(std::unique_ptr<LiveRun> run, LiveRun::Load(runs_, fresh));
  RunPublisher::PublishRecord(fresh, runs_);
  shards_.Adopt(std::move(run));
  return absl::OkStatus();
}

void LogReplay::Start(std::function<void()> then) {
  then_ = std::move(then);
  const Lsn first = log_->recovery().first_lsn;
  thread_ = std::thread([this, from = first == 0 ? 1 : first] { Apply(from); });
}

void LogReplay::Stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

absl::Status LogReplay::ApplyRecord(const WalRecord& record) {
  if (stopping_) return absl::CancelledError("closing");
  const auto applied = applied_lsn_.find(record.run);
  if (applied != applied_lsn_.end() && record.lsn <= applied->second) return absl::OkStatus();
  std::shared_ptr<RunEntry> entry;
  {
    absl::MutexLock registry(&registry_.mutex());
    entry = registry_.Find(record.run);
  }
  if (entry == nullptr) return absl::DataLossError(absl::StrCat("log record ", record.lsn, " is of no known run"));
  BW_ASSIGN_OR_RETURN(IngestMessage message, DecodeRecord(record, &entry->description.layout, options_.limits));
  Shard& shard = shards_.Of(record.run);
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

absl::Status LogReplay::ApplyUntil(Lsn from, Lsn until) {
  return log_->Read(from, until, [this, until](const WalRecord& record) {
    unapplied_->Set(static_cast<double>(until - record.lsn + 1));
    return ApplyRecord(record);
  });
}

absl::Status LogReplay::ApplyAll(Lsn from, Lsn* end) {
  absl::Status status;
  // New messages are behind in the log and are read from there, until few are left.
  for (Lsn until = log_->durable_lsn(); status.ok() && until >= from; until = log_->durable_lsn()) {
    status = ApplyUntil(from, until);
    const bool little_left = log_->last_lsn() - until < options_.left_messages_max;
    from = until + 1;
    if (little_left) break;
  }
  // From one point of the log on the shards keep new messages themselves.
  for (const auto& shard : shards_) shard->mutex().Lock();
  for (const auto& shard : shards_) {
    shard->mutex().AssertHeld();
    shard->SetReplayMode(Shard::ReplayMode::kKeepBack);
  }
  const Lsn until = *end = log_->last_lsn();
  for (const auto& shard : shards_) shard->mutex().Unlock();
  while (status.ok() && !log_->Sync(until).ok()) {
    // Only what is on disk can be read back; a full disk may get room again.
    if (stopping_) status = absl::CancelledError("closing");
    if (const absl::Status health = log_->health(); !absl::IsResourceExhausted(health)) status = health;
    absl::SleepFor(kLogStuckRetry);
  }
  if (status.ok() && until >= from) status = ApplyUntil(from, until);
  return status;
}

void LogReplay::Apply(Lsn from) {
  Lsn end = 0;
  const absl::Status status = ApplyAll(from, &end);
  if (status.ok()) {
    for (const auto& shard : shards_) {
      absl::MutexLock lock(&shard->mutex());
      shard->SetReplayMode(Shard::ReplayMode::kLive);
    }
    for (const auto& shard : shards_) {
      shard->EndRecovery();
      shard->CommitAll();
    }
    if (end >= from) LogInfo("the log is applied up to record {}", end);
    done_ = true;
    then_();
  } else if (!absl::IsCancelled(status)) {
    LogError("the log could not be applied: {}", std::string(status.message()));
  }
  unapplied_->Set(0);
  absl::MutexLock lock(&mutex_);
  if (!absl::IsCancelled(status)) status_ = status;
  ended_ = true;
}

absl::Status LogReplay::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

absl::Status LogReplay::WaitFor(absl::Duration time) const {
  absl::MutexLock lock(&mutex_);
  AwaitFor(&mutex_, absl::Condition(&ended_), time);
  return status_;
}

absl::Status LogReplay::Await() const {
  if (done_) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  if (AwaitFor(&mutex_, absl::Condition(&ended_), kAwait)) return status_;
  return absl::UnavailableError("the server still applies what its log holds: try again in a moment");
}

}  // namespace bellwether::server
