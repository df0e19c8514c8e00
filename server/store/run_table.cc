#include "server/store/run_table.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "server/util/await_for.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

JudgedBy JudgedByOf(const RunRecord& run) {
  const int32_t layers = run.description.layout.layers;
  const bool known = !run.coverage.missed.empty();
  const RunCoverage coverage =
      known ? run.coverage : RunCoverage::Of(run.signals, layers, run.description.attempt, run.step);
  return coverage.At(run.step, layers, run.steps_recorded);
}

void RunTable::Publish(RunSnapshotPtr snapshot) {
  absl::MutexLock lock(&mutex_);
  const RunId run = snapshot->record.id;
  runs_[run] = std::move(snapshot);
  ++version_;
}

void RunTable::Remove(RunId run) {
  absl::MutexLock lock(&mutex_);
  runs_.erase(run);
  ++version_;
}

RunSnapshotPtr RunTable::Find(std::string_view name_or_uuid) const {
  absl::MutexLock lock(&mutex_);
  RunUuid uuid;
  const bool is_uuid = ParseUuid(name_or_uuid, &uuid);
  // The newest by when it began: of a cluster's runs the ids do not say.
  RunSnapshotPtr found;
  for (auto it = runs_.rbegin(); it != runs_.rend(); ++it) {
    const RunRecord& run = it->second->record;
    if (is_uuid && run.description.uuid == uuid) return it->second;
    if (run.description.name != name_or_uuid) continue;
    if (found == nullptr || run.started_unix_ns > found->record.started_unix_ns) found = it->second;
  }
  return found;
}

RunSnapshotPtr RunTable::Get(RunId run) const {
  absl::MutexLock lock(&mutex_);
  const auto found = runs_.find(run);
  return found == runs_.end() ? nullptr : found->second;
}

std::vector<RunSnapshotPtr> RunTable::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<RunSnapshotPtr> runs;
  runs.reserve(runs_.size());
  for (const auto& [id, run] : runs_) runs.push_back(run);
  return runs;
}

uint64_t RunTable::version() const {
  absl::MutexLock lock(&mutex_);
  return version_;
}

uint64_t RunTable::AwaitChange(uint64_t seen, int64_t timeout_ms) const {
  absl::MutexLock lock(&mutex_);
  const auto changed = [this, seen]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return version_ > seen; };
  AwaitFor(&mutex_, absl::Condition(&changed), absl::Milliseconds(timeout_ms));
  return version_;
}

absl::StatusOr<std::shared_ptr<const RunRows>> RowsOf(const RunSnapshot& snapshot, const Database& database) {
  if (snapshot.rows != nullptr) return snapshot.rows;
  BW_ASSIGN_OR_RETURN(RunRows rows, database.GetRows(snapshot.record.id));
  return std::make_shared<const RunRows>(std::move(rows));
}

std::string_view RowName(const SignalInfo& signal, int32_t row, const RunRows& rows) {
  if (!OfNamedRows(signal.granularity)) return {};
  const std::vector<std::string>& names = rows.of(signal.granularity).names();
  return row >= 0 && static_cast<size_t>(row) < names.size() ? std::string_view(names[static_cast<size_t>(row)])
                                                             : std::string_view();
}

absl::StatusOr<uint64_t> CountEventsOf(const RunSnapshot& snapshot, const Database& database) {
  if (snapshot.events_stored != UINT64_MAX) {
    return snapshot.events_stored + (snapshot.events_new == nullptr ? 0 : snapshot.events_new->size());
  }
  return database.CountEvents(snapshot.record.id);
}

absl::StatusOr<std::vector<RunEvent>> EventsOf(const RunSnapshot& snapshot, const Database& database, uint64_t skip,
                                               size_t count) {
  std::vector<RunEvent> events;
  // What was stored since the snapshot is among its new ones.
  const uint64_t stored = snapshot.events_stored;
  if (skip < stored) {
    BW_ASSIGN_OR_RETURN(events,
                        database.ListEvents(snapshot.record.id, skip, std::min<uint64_t>(count, stored - skip)));
  }
  if (snapshot.events_new == nullptr) return events;
  for (uint64_t i = std::max(skip, stored) - stored; i < snapshot.events_new->size() && events.size() < count; ++i) {
    events.push_back((*snapshot.events_new)[i]);
  }
  return events;
}

absl::StatusOr<const RunEvent*> EventReader::Peek() {
  constexpr size_t kPage = 256;
  if (at_ == begin_ + page_.size()) {
    begin_ = at_;
    BW_ASSIGN_OR_RETURN(page_, EventsOf(*snapshot_, *database_, at_, kPage));
    if (page_.empty()) return nullptr;
  }
  return &page_[at_ - begin_];
}

std::string FormatUuid(const RunUuid& uuid) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(uuid.data()), uuid.size()));
}

bool ParseUuid(std::string_view text, RunUuid* uuid) {
  if (text.size() != 2 * uuid->size()) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return false;
    uint8_t& byte = (*uuid)[i / 2];
    byte = static_cast<uint8_t>(i % 2 == 0 ? digit << 4 : byte | digit);
  }
  return true;
}

RunUuid UuidOfName(std::string_view name) {
  RunUuid uuid{};
  for (size_t half = 0; half < 2; ++half) {
    uint64_t hash = 14695981039346656037ull + half * 0x9e3779b97f4a7c15ull;  // FNV-1a
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    for (size_t i = 0; i < 8; ++i) uuid[half * 8 + i] = static_cast<uint8_t>(hash >> (8 * i));
  }
  return uuid;
}

}  // namespace bellwether::server
