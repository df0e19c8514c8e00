// The part of the Pipeline that shares its runs with other servers: takes a
// partition up from the shared log, and lets it go.

#include <algorithm>
#include <memory>
#include <utility>

#include "server/engine/pipeline.h"
#include "server/engine/pipeline_session.h"
#include "server/ingest/log_records.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// The rows of database.h's kinds by what they are needed for: all but chunks (s)
// and their summaries (m) before the first message, those behind it.
constexpr std::pair<std::string_view, std::string_view> kNeededAtOnce[] = {{"A", "m"}, {"n", "s"}, {"t", "\x7f"}};
constexpr std::pair<std::string_view, std::string_view> kHistory[] = {{"m", "n"}, {"s", "t"}};

}  // namespace

absl::Status Pipeline::AdmitRun(const RunUuid& uuid) {
  std::string address;
  absl::Status here = ownership_->Admit(uuid, &address);
  return address.empty() ? here : MovedTo(address);
}

bool Pipeline::HasWhole(RunId run) { return wal_->LogOf(run)->health().ok() && ownership_->HasWhole(run); }

void Pipeline::StartRetention(std::function<int64_t()> unix_nanos) {
  retention_->Share({.whole = [this](RunId run) { return HasWhole(run); }, .unix_nanos = std::move(unix_nanos)});
  retention_->Start();
}

absl::Status Pipeline::TakePartition(uint32_t partition, uint64_t epoch) {
  // The lane is not shortened meanwhile: what it keeps for runs that are half here
  // nobody would ask for.
  absl::ReaderMutexLock flush(&flush_mutexes_[DatabaseOf(partition)]);
  absl::Status taken = TakeUp(partition, epoch);
  if (!taken.ok()) {
    LetGo(partition, /*save=*/false);
  } else if (taken_ != nullptr) {
    taken_(FirstRunOf(partition), FirstRunOf(partition + 1));
  }
  return taken;
}

absl::Status Pipeline::TakeUp(uint32_t partition, uint64_t epoch) {
  BW_RETURN_IF_ERROR(shared_->Own(partition, epoch));
  const RunId first = FirstRunOf(partition), end = FirstRunOf(partition + 1);
  BW_RETURN_IF_ERROR(database_->ForgetRuns(first, end));
  for (const auto& [from, to] : kNeededAtOnce) {
    BW_RETURN_IF_ERROR(shared_->ReadRows(partition, from, to, [this](const std::vector<SharedRow>& rows) {
      return database_->TakeUpRows(rows, /*only_missing=*/false);
    }));
  }
  std::map<RunId, std::unique_ptr<LiveRun>> live;
  BW_ASSIGN_OR_RETURN(const std::vector<RunRecord> records, database_->ListRuns(first, end));
  std::map<RunId, Lsn> applied;
  {
    absl::MutexLock registry(&registry_mutex_);
    ownership_->BeginPartition(partition);
    for (const RunRecord& record : records) {
      BW_RETURN_IF_ERROR(LoadRun(record));
      applied[record.id] = record.applied_lsn;
      if (record.ended) continue;
      auto run = std::make_unique<LiveRun>(Parts(), record);
      BW_RETURN_IF_ERROR(run->Load());
      live[record.id] = std::move(run);
    }
  }
  // Applied here, before a shard has them: nothing that comes in can get between.
  BW_RETURN_IF_ERROR(
      shared_->ReadRecords(partition, [&](const WalRecord& record) { return TakeRecord(record, applied, &live); }));
  for (auto& [id, run] : live) {
    run->Publish();
    Adopt(std::move(run));
  }
  for (const auto& shard : shards_) shard->Expect(first, end);
  {
    absl::MutexLock registry(&registry_mutex_);
    ownership_->ServePartition(partition);
  }
  for (const auto& shard : shards_) shard->SubmitUnanswered(first, end);
  return absl::OkStatus();
}

absl::Status Pipeline::TakeRecord(const WalRecord& record, const std::map<RunId, Lsn>& applied,
                                  std::map<RunId, std::unique_ptr<LiveRun>>* live) {
  const auto take_up = [&](const RunRecord& fresh) -> absl::Status {
    registry_mutex_.AssertHeld();
    auto run = std::make_unique<LiveRun>(Parts(), fresh);
    BW_RETURN_IF_ERROR(run->Load());
    LiveRun::PublishRecord(fresh, Parts());
    (*live)[fresh.id] = std::move(run);
    return absl::OkStatus();
  };
  BW_RETURN_IF_ERROR(LoadRank(record, take_up));
  const auto known = applied.find(record.run);
  if (known != applied.end() && record.lsn <= known->second) return absl::OkStatus();
  std::unique_ptr<LiveRun>& run = (*live)[record.run];
  if (run == nullptr) {  // It had ended, and goes on.
    BW_ASSIGN_OR_RETURN(const RunRecord stored, database_->GetRun(record.run));
    run = std::make_unique<LiveRun>(Parts(), stored);
    BW_RETURN_IF_ERROR(run->Load());
  }
  BW_ASSIGN_OR_RETURN(IngestMessage message, DecodeRecord(record, &run->record().description.layout, options_.limits));
  run->Apply({record.lsn, record.run, record.rank, record.epoch, record.time_unix_ms, std::move(message)}, 0);
  return absl::OkStatus();
}

absl::Status Pipeline::TakeHistory(uint32_t partition, const std::function<bool()>& is_wanted) {
  for (const auto& [from, to] : kHistory) {
    const auto take = [&](const std::vector<SharedRow>& rows) -> absl::Status {
      if (!is_wanted() || !ownership_->Serves(FirstRunOf(partition))) {
        return absl::CancelledError("it is given to another server");
      }
      return database_->TakeUpRows(rows, /*only_missing=*/true);
    };
    BW_RETURN_IF_ERROR(shared_->ReadRows(partition, from, to, take));
  }
  absl::MutexLock registry(&registry_mutex_);
  // Nobody takes it up again meanwhile: that is the caller's to do, too.
  ownership_->CompletePartition(partition);
  return absl::OkStatus();
}

void Pipeline::FencePartition(uint32_t partition) {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    absl::MutexLock registry(&registry_mutex_);
    ownership_->FencePartition(partition);
    for (auto it = runs_by_id_.lower_bound(FirstRunOf(partition));
         it != runs_by_id_.end() && it->first < FirstRunOf(partition + 1); ++it) {
      RunEntry* const run = it->second;
      absl::MutexLock lock(&shards_[run->shard]->mutex());
      std::erase_if(PendingAcks(*run), [run](const PendingAck& ack) { return ack.session->run() == run; });
      for (const auto& [rank, slot] : run->ranks) {
        ++slot->epoch;  // Of whoever holds a session: its next message is refused.
        if (auto session = slot->session.lock()) sessions.push_back(std::move(session));
        slot->session.reset();
      }
    }
  }
  const std::string owner = ownership_->OwnerAddress(partition);
  for (const auto& session : sessions) {
    session->Tell([&owner](SessionOwner* held) { held->OnMoved(owner); });
  }
}

Lsn Pipeline::DropPartition(uint32_t partition, bool save) {
  // Nor is it shortened between the runs' end here and the partition's: what they
  // could not save nobody would ask for.
  absl::ReaderMutexLock flush(&flush_mutexes_[DatabaseOf(partition)]);
  return LetGo(partition, save);
}

Lsn Pipeline::LetGo(uint32_t partition, bool save) {
  const bool served = ownership_->Serves(FirstRunOf(partition));
  FencePartition(partition);
  const RunId first = FirstRunOf(partition), end = FirstRunOf(partition + 1);
  // Whatever has an LSN below is in a shard's queue before its Drop is.
  Lsn keep = wal_->last_lsn() + 1;
  for (const auto& shard : shards_) keep = std::min(keep, shard->Drop(first, end, save));
  shared_->Disown(partition);
  std::vector<RunId> gone;
  {
    absl::MutexLock registry(&registry_mutex_);
    for (auto it = runs_by_id_.lower_bound(first); it != runs_by_id_.end() && it->first < end;) {
      gone.push_back(it->first);
      ForgetRun((it++)->second);
    }
  }
  for (const RunId run : gone) table_.Remove(run);
  if (const absl::Status status = database_->ForgetRuns(first, end); !status.ok()) {
    LogWarning("partition {}: its rows stay in the cache: {}", partition, std::string(status.message()));
  }
  return served && save ? keep : 0;
}

}  // namespace bellwether::server
