#include "server/engine/partition_handover.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/rank_session.h"
#include "server/engine/run_deletion.h"
#include "server/ingest/log_records.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// The ranges of database.h's keys: all rows but chunks (s) and their summaries (m) are
// needed before the first message, those after it.
constexpr std::pair<std::string_view, std::string_view> kNeededAtOnce[] = {{"A", "m"}, {"n", "s"}, {"t", "\x7f"}};
constexpr std::pair<std::string_view, std::string_view> kHistory[] = {{"m", "n"}, {"s", "t"}};

}  // namespace

PartitionHandover::PartitionHandover(const Parts& parts)
    : runs_(*parts.runs),
      shards_(*parts.shards),
      registry_(*parts.registry),
      ownership_(parts.ownership),
      ingest_(parts.ingest),
      truncator_(parts.truncator),
      log_(parts.log),
      limits_(parts.limits) {}

absl::Status PartitionHandover::AcquirePartition(uint32_t partition, uint64_t epoch) {
  absl::ReaderMutexLock lane(&truncator_->lane_mutex(DatabaseOf(partition)));
  absl::Status recovered = Recover(partition, epoch);
  if (!recovered.ok()) {
    Forget(partition, /*save=*/false);
  } else if (acquired_ != nullptr) {
    acquired_(FirstRunOf(partition), FirstRunOf(partition + 1));
  }
  return recovered;
}

absl::Status PartitionHandover::Recover(uint32_t partition, uint64_t epoch) {
  BW_RETURN_IF_ERROR(log_->AcquirePartition(partition, epoch));
  const RunId first = FirstRunOf(partition), end = FirstRunOf(partition + 1);
  BW_RETURN_IF_ERROR(runs_.database->ForgetRuns(first, end));
  for (const auto& [from, to] : kNeededAtOnce) {
    BW_RETURN_IF_ERROR(log_->ReadRows(partition, from, to, [this](const std::vector<SharedRow>& rows) {
      return runs_.database->TakeUpRows(rows, /*only_missing=*/false);
    }));
  }
  BW_RETURN_IF_ERROR(runs_.alerts->LoadNotes(first, end));
  std::map<RunId, std::unique_ptr<LiveRun>> live;
  BW_ASSIGN_OR_RETURN(const std::vector<RunRecord> records, runs_.database->ListRuns(first, end));
  std::map<RunId, Lsn> applied;
  {
    absl::MutexLock registry(&registry_.mutex());
    ownership_->BeginPartition(partition);
    for (const RunRecord& record : records) {
      if (record.deleted) {
        registry_.PassOver(record.id);
        BW_RETURN_IF_ERROR(DeleteStored(runs_, record));  // What a crash has left of it.
        applied[record.id] = std::numeric_limits<Lsn>::max();
        continue;
      }
      BW_RETURN_IF_ERROR(registry_.Load(record));
      applied[record.id] = record.applied_lsn;
      if (record.ended) continue;
      BW_ASSIGN_OR_RETURN(live[record.id], LiveRun::Load(runs_, record));
    }
  }
  // The records are applied here, before a shard has the runs: no new message can come
  // in between.
  BW_RETURN_IF_ERROR(
      log_->ReadRecords(partition, [&](const WalRecord& record) { return ApplyRecord(record, applied, &live); }));
  for (auto& [id, run] : live) {
    run->Publish();
    shards_.Adopt(std::move(run));
  }
  for (const auto& shard : shards_) shard->Expect(first, end);
  {
    absl::MutexLock registry(&registry_.mutex());
    ownership_->ServePartition(partition);
  }
  for (const auto& shard : shards_) shard->SubmitUnanswered(first, end);
  return absl::OkStatus();
}

absl::Status PartitionHandover::ApplyRecord(const WalRecord& record, const std::map<RunId, Lsn>& applied,
                                            std::map<RunId, std::unique_ptr<LiveRun>>* live) {
  const auto adopt = [&](const RunRecord& fresh) -> absl::Status {
    BW_ASSIGN_OR_RETURN((*live)[fresh.id], LiveRun::Load(runs_, fresh));
    RunPublisher::PublishRecord(fresh, runs_);
    return absl::OkStatus();
  };
  BW_RETURN_IF_ERROR(registry_.LoadRank(record, adopt));
  const auto known = applied.find(record.run);
  if (known != applied.end() && record.lsn <= known->second) return absl::OkStatus();
  std::unique_ptr<LiveRun>& run = (*live)[record.run];
  if (run == nullptr) {  // The run had ended, and this record reopens it.
    BW_ASSIGN_OR_RETURN(const RunRecord stored, runs_.database->GetRun(record.run));
    BW_ASSIGN_OR_RETURN(run, LiveRun::Load(runs_, stored));
  }
  BW_ASSIGN_OR_RETURN(IngestMessage message, DecodeRecord(record, &run->record().description.layout, limits_));
  run->Apply({record.lsn, record.run, record.rank, record.epoch, record.time_unix_ms, std::move(message)}, 0);
  return absl::OkStatus();
}

absl::Status PartitionHandover::LoadHistory(uint32_t partition, const std::function<bool()>& is_wanted) {
  for (const auto& [from, to] : kHistory) {
    const auto load = [&](const std::vector<SharedRow>& rows) -> absl::Status {
      if (!is_wanted() || !ownership_->Serves(FirstRunOf(partition))) {
        return absl::CancelledError("it is given to another server");
      }
      return runs_.database->TakeUpRows(rows, /*only_missing=*/true);
    };
    BW_RETURN_IF_ERROR(log_->ReadRows(partition, from, to, load));
  }
  absl::MutexLock registry(&registry_.mutex());
  // The caller ensures that the partition is not acquired again meanwhile.
  ownership_->CompletePartition(partition);
  return absl::OkStatus();
}

void PartitionHandover::FencePartition(uint32_t partition) {
  std::vector<std::shared_ptr<RankSession>> sessions;
  {
    absl::MutexLock registry(&registry_.mutex());
    ownership_->FencePartition(partition);
    sessions = ingest_->Fence(FirstRunOf(partition), FirstRunOf(partition + 1));
  }
  const std::string owner = ownership_->OwnerAddress(partition);
  for (const auto& session : sessions) {
    session->Notify([&owner](SessionOwner* held) { held->OnMoved(owner); });
  }
}

Lsn PartitionHandover::ReleasePartition(uint32_t partition, bool save) {
  absl::ReaderMutexLock lane(&truncator_->lane_mutex(DatabaseOf(partition)));
  return Forget(partition, save);
}

Lsn PartitionHandover::Forget(uint32_t partition, bool save) {
  const bool served = ownership_->Serves(FirstRunOf(partition));
  FencePartition(partition);
  const RunId first = FirstRunOf(partition), end = FirstRunOf(partition + 1);
  // A message with an LSN below this is in its shard's queue before Drop() is.
  Lsn keep = log_->last_lsn() + 1;
  for (const auto& shard : shards_) keep = std::min(keep, shard->Drop(first, end, save));
  log_->ReleasePartition(partition);
  std::vector<std::shared_ptr<RunEntry>> gone;
  {
    absl::MutexLock registry(&registry_.mutex());
    gone = registry_.List(first, end);
    for (const std::shared_ptr<RunEntry>& run : gone) registry_.Forget(*run);
  }
  for (const std::shared_ptr<RunEntry>& run : gone) runs_.table->Remove(run->id);
  if (const absl::Status status = runs_.database->ForgetRuns(first, end); !status.ok()) {
    LogWarning("partition {}: its rows stay in the cache: {}", partition, std::string(status.message()));
  }
  return served && save ? keep : 0;
}

}  // namespace bellwether::server
