// The part of the Pipeline that looks after its disk: shortens the log, keeps a
// floor free, copies what is durable, closes.

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/pipeline.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// This much more than the floor must be free before acknowledgements go on.
constexpr double kFloorHysteresis = 1.1;
constexpr int64_t kFlushNanosMin = 5'000'000'000;
constexpr Lsn kAll = std::numeric_limits<Lsn>::max();

}  // namespace

void Pipeline::GuardDisk() {
  std::error_code unknown;
  std::filesystem::space_info space = std::filesystem::space(options_.storage_path, unknown);
  if (unknown) return;
  const double floor = std::min(static_cast<double>(options_.free_bytes_min),
                                options_.free_ratio_min * static_cast<double>(space.capacity));
  if (!disk_low_ && static_cast<double>(space.available) < floor) {
    wal_->FreeRoom();  // That alone may be enough.
    space = std::filesystem::space(options_.storage_path, unknown);
    if (unknown) return;
  }
  const auto free = static_cast<double>(space.available);
  store_free_bytes_->Set(free);
  const bool low = free < (disk_low_ ? floor * kFloorHysteresis : floor);
  if (low == disk_low_) return;
  disk_low_ = low;
  disk_degraded_->Set(low ? 1 : 0);
  if (!low) {
    wal_->Hold(absl::OkStatus());
    LogInfo("{} has {} bytes free: acknowledgements go on", options_.storage_path, space.available);
    return;
  }
  const absl::Status why = absl::ResourceExhaustedError(
      absl::StrCat("storage.path ", options_.storage_path, ": ", space.available, " bytes are free, fewer than ",
                   static_cast<int64_t>(floor), " (storage.free_bytes_min, storage.free_ratio_min)"));
  LogError("{}; nothing more is acknowledged until there is room, alerts go on", std::string(why.message()));
  // What the log need not hold any more is given back first.
  if (recovered_) ShortenLog(kAll);
  wal_->FreeRoom();
  wal_->Hold(why);
}

Lsn Pipeline::CommitShards(uint32_t lane, Lsn end) {
  Lsn keep = wal_->last_lsn() + 1;
  for (const auto& shard : shards_) keep = std::min(keep, shard->CommitBefore(lane, end));
  return keep;
}

absl::Status Pipeline::Forget(uint32_t lane, Lsn keep) {
  BW_RETURN_IF_ERROR(database_->Flush());
  if (!recovered_) return absl::OkStatus();  // What is not applied yet must be read again.
  return wal_->lane(lane)->Truncate(keep);
}

absl::Status Pipeline::LogHealth() const {
  absl::Status first;
  for (uint32_t i = 0; i < wal_->lanes(); ++i) {
    absl::Status health = wal_->lane(i)->health();
    if (health.ok()) return health;
    if (i == 0) first = std::move(health);
  }
  return first;
}

absl::Status Pipeline::ShortenLane(uint32_t lane, Lsn end) {
  absl::MutexLock flush(&flush_mutexes_[lane]);
  return Forget(lane, CommitShards(lane, end));
}

void Pipeline::ShortenLog(Lsn end) {
  flushed_ns_ = clock_->MonotonicNanos();
  store_bytes_->Set(static_cast<double>(database_->bytes()));
  for (uint32_t lane = 0; lane < wal_->lanes(); ++lane) {
    if (wal_->lanes() > 1 && !wal_->lane(lane)->health().ok()) continue;  // Said already.
    const absl::Status status = ShortenLane(lane, end);
    if (!status.ok()) LogError("the log could not be shortened: {}", std::string(status.message()));
  }
}

absl::Status Pipeline::Maintain() {
  std::vector<double> seconds;
  wal_->TakeSyncSeconds(&seconds);
  for (const double second : seconds) fsync_seconds_->Observe(second);
  wal_bytes_->Set(static_cast<double>(wal_->bytes()));
  degraded_->Set(wal_->health().ok() ? 0 : 1);
  GuardDisk();
  AskForDeeper();
  absl::MutexLock lock(&apply_mutex_);
  return apply_status_;
}

void Pipeline::Upkeep() {
  const bool stored = alerts_->StoreWaiting().ok();
  const bool told = alerts_->NotifyForeign().ok();
  database_degraded_->Set(stored && told ? 0 : 1);
  admission_->Show(table_.List(), clock_->UnixNanos());
  if (!recovered_ || !LogHealth().ok()) return;
  const int64_t age_ns = clock_->MonotonicNanos() - flushed_ns_;
  const bool too_long = wal_->bytes() >= options_.wal_bytes_flush;
  if (age_ns < (too_long ? kFlushNanosMin : options_.flush_ms * 1'000'000)) return;
  // Runs are saved in turn, each in its time: saved all at once they would be
  // written several times as often, and everything else would wait.
  ShortenLog(too_long ? wal_->TailBegin(options_.wal_bytes_flush / 2) : 0);
}

absl::Status Pipeline::WriteCheckpoint(const std::string& directory) {
  if (shared_ != nullptr) {
    return absl::FailedPreconditionError(
        "this server's runs are in PostgreSQL: back that up instead (docs/operate/cluster.md)");
  }
  if (!recovered_) return absl::FailedPreconditionError("the server still applies what its log holds: try again");
  // The database first: the log holds whatever is newer, as long as it is not shortened.
  absl::MutexLock flush(&flush_mutexes_[0]);  // A server alone has one lane.
  std::error_code error;
  if (!std::filesystem::create_directory(directory, error)) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, ": ", error ? error.message() : std::string("exists already")));
  }
  std::filesystem::permissions(directory, std::filesystem::perms::owner_all, error);
  BW_RETURN_IF_ERROR(database_->CopyTo(directory + "/db"));
  return wal_->CopyTo(directory + "/wal");
}

absl::Status Pipeline::Close() {
  if (closing_.exchange(true) || wal_ == nullptr) return absl::OkStatus();
  if (apply_thread_.joinable()) apply_thread_.join();  // It starts the learner.
  if (learner_ != nullptr) learner_->Stop();           // The next start goes on with it.
  if (retention_ != nullptr) retention_->Stop();       // What it has not done is done then, too.
  wal_->Hold(absl::OkStatus());                        // What was taken is written if there is any room.
  absl::Status status = wal_->Sync(wal_->last_lsn());
  spectra_->Stop();
  std::vector<Lsn> keep;
  for (uint32_t lane = 0; lane < wal_->lanes(); ++lane) keep.push_back(CommitShards(lane, kAll));
  for (const auto& shard : shards_) shard->Stop();
  // The database holds it all: the next start need not read it again.
  const bool synced = status.ok();
  for (uint32_t lane = 0; synced && lane < keep.size(); ++lane) {
    if (keep.size() > 1 && !wal_->lane(lane)->health().ok()) continue;
    absl::Status forgot = Forget(lane, keep[lane]);
    if (status.ok()) status = std::move(forgot);
  }
  const absl::Status closed = wal_->Close();
  return status.ok() ? closed : status;
}

}  // namespace bellwether::server
