#include "server/engine/log_truncator.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int64_t kIntervalNanosMin = 5'000'000'000;
constexpr Lsn kAll = std::numeric_limits<Lsn>::max();

}  // namespace

absl::Status AnyLaneHealth(LogBackend* log) {
  absl::Status first;
  for (uint32_t i = 0; i < log->lanes(); ++i) {
    absl::Status health = log->lane(i)->health();
    if (health.ok()) return health;
    if (i == 0) first = std::move(health);
  }
  return first;
}

LogTruncator::LogTruncator(const Options& options, const LiveRunParts* runs, const Shards* shards,
                           const LogReplay* replay)
    : options_(options),
      runs_(*runs),
      shards_(*shards),
      replay_(*replay),
      log_(runs->wal),
      store_bytes_(runs->counters->gauge("bellwether_store_bytes", {{"kind", "database"}})),
      truncated_ns_(runs->clock->MonotonicNanos()) {}

Lsn LogTruncator::SaveLane(uint32_t lane, Lsn end) {
  Lsn keep = log_->last_lsn() + 1;
  for (const auto& shard : shards_) keep = std::min(keep, shard->CommitBefore(lane, end));
  return keep;
}

absl::Status LogTruncator::Drop(uint32_t lane, Lsn keep) {
  BW_RETURN_IF_ERROR(runs_.database->Flush());
  if (!replay_.done()) return absl::OkStatus();  // What is not applied yet must be read again.
  return log_->lane(lane)->Truncate(keep);
}

absl::Status LogTruncator::TruncateLane(uint32_t lane, Lsn end) {
  absl::MutexLock lock(&lane_mutexes_[lane]);
  return Drop(lane, SaveLane(lane, end));
}

void LogTruncator::Truncate(Lsn end) {
  truncated_ns_ = runs_.clock->MonotonicNanos();
  store_bytes_->Set(static_cast<double>(runs_.database->bytes()));
  for (uint32_t lane = 0; lane < log_->lanes(); ++lane) {
    if (log_->lanes() > 1 && !log_->lane(lane)->health().ok()) continue;  // The lane has logged that itself.
    const absl::Status status = TruncateLane(lane, end);
    if (!status.ok()) LogError("the log could not be shortened: {}", std::string(status.message()));
  }
}

void LogTruncator::TruncateAll() { Truncate(kAll); }

void LogTruncator::TruncateIfDue() {
  if (!replay_.done() || !AnyLaneHealth(log_).ok()) return;
  const int64_t age_ns = runs_.clock->MonotonicNanos() - truncated_ns_;
  const bool too_long = log_->bytes() >= options_.wal_bytes_max;
  if (age_ns < (too_long ? kIntervalNanosMin : options_.interval_ms * 1'000'000)) return;
  // Runs are saved in turn, each in its time.  All at once they would be written several
  // times as often, and messages would wait for them.
  Truncate(too_long ? log_->TailBegin(options_.wal_bytes_max / 2) : 0);
}

std::vector<Lsn> LogTruncator::SaveAll() {
  std::vector<Lsn> keep;
  for (uint32_t lane = 0; lane < log_->lanes(); ++lane) keep.push_back(SaveLane(lane, kAll));
  return keep;
}

absl::Status LogTruncator::DropBelow(const std::vector<Lsn>& keep) {
  absl::Status first;
  for (uint32_t lane = 0; lane < keep.size(); ++lane) {
    if (keep.size() > 1 && !log_->lane(lane)->health().ok()) continue;
    absl::Status dropped = Drop(lane, keep[lane]);
    if (first.ok()) first = std::move(dropped);
  }
  return first;
}

}  // namespace bellwether::server
