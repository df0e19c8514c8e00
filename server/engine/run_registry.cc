#include "server/engine/run_registry.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "server/ingest/log_records.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

std::shared_ptr<RunEntry> RunRegistry::Find(const RunUuid& uuid) const {
  const auto found = by_uuid_.find(uuid);
  return found == by_uuid_.end() ? nullptr : found->second;
}

std::shared_ptr<RunEntry> RunRegistry::Find(RunId run) const {
  const auto found = by_id_.find(run);
  return found == by_id_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<RunEntry>> RunRegistry::List(RunId first, RunId end) const {
  std::vector<std::shared_ptr<RunEntry>> runs;
  for (auto it = by_id_.lower_bound(first); it != by_id_.end() && it->first < end; ++it) runs.push_back(it->second);
  return runs;
}

std::shared_ptr<RunEntry> RunRegistry::Add(const RunRecord& record) {
  auto entry = std::make_shared<RunEntry>();
  entry->id = record.id;
  entry->description = record.description;
  entry->launches.Begin(record.description.launch_unix_ms, record.description.attempt);
  ownership_->RecordRun(record.id);
  by_id_[record.id] = entry;
  by_uuid_[record.description.uuid] = entry;
  return entry;
}

void RunRegistry::Forget(const RunEntry& run) {
  parts_.series->Forget(run.id);
  const RunId id = run.id;
  const RunUuid uuid = run.description.uuid;
  by_uuid_.erase(uuid);
  by_id_.erase(id);
}

void RunRegistry::PassOver(RunId deleted) {
  ownership_->RecordRun(deleted);  // Its number is given to no other run.
  deleted_.insert(deleted);
}

absl::Status RunRegistry::Load(const RunRecord& record) {
  const std::shared_ptr<RunEntry> entry = Add(record);
  BW_ASSIGN_OR_RETURN(const std::vector<RankRecord> ranks, parts_.database->ListRanks(record.id));
  for (const RankRecord& rank : ranks) {
    auto slot = std::make_unique<RankSlot>();
    slot->epoch = rank.epoch;
    slot->last_seq = rank.durable_seq;
    slot->attempt = record.description.attempt;
    entry->ranks[rank.rank] = std::move(slot);
  }
  RunPublisher::PublishRecord(record, parts_);
  return absl::OkStatus();
}

absl::Status RunRegistry::LoadRank(const WalRecord& record,
                                   const std::function<absl::Status(const RunRecord& fresh)>& adopt) {
  absl::MutexLock lock(&mutex_);
  if (deleted_.contains(record.run)) return absl::OkStatus();
  std::shared_ptr<RunEntry> entry = Find(record.run);
  if (record.kind == WalKind::kHello) {
    BW_ASSIGN_OR_RETURN(const IngestMessage message,
                        DecodeRecord(record, entry == nullptr ? nullptr : &entry->description.layout, limits_));
    const auto* const hello = std::get_if<HelloMessage>(&message.body);
    if (hello == nullptr) return absl::DataLossError(absl::StrCat("log record ", record.lsn, " is no hello"));
    if (entry == nullptr) {
      RunRecord fresh;
      fresh.id = record.run;
      fresh.description = hello->run;
      fresh.import_of = hello->import_of;
      fresh.import_notifies = hello->import_notifies;
      fresh.started_unix_ns = record.time_unix_ms * 1'000'000;
      // The run is adopted before any of its records: none of them counts as saved.
      fresh.applied_lsn = record.lsn - 1;
      entry = Add(fresh);
      if (!adopt(fresh).ok()) {
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

}  // namespace bellwether::server
