#include "server/engine/shards.h"

#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

void Shards::Start(int count, const Shard::Options& options, const LiveRunParts& parts, const Ownership* ownership) {
  log_ = parts.wal;
  clock_ = parts.clock;
  ownership_ = ownership;
  for (int i = 0; i < count; ++i) {
    shards_.push_back(std::make_unique<Shard>(options, parts, i));
    shards_.back()->BeginRecovery();
    {
      absl::MutexLock lock(&shards_.back()->mutex());
      shards_.back()->SetReplayMode(Shard::ReplayMode::kReadBack);
    }
    shards_.back()->Start();
  }
}

void Shards::Adopt(std::unique_ptr<LiveRun> run) const {
  Shard& shard = Of(run->record().id);
  absl::MutexLock lock(&shard.mutex());
  shard.Adopt(std::move(run));
}

absl::Status Shards::LogAndApply(WalRecord record, IngestMessage message) const {
  const RunId run = record.run;
  record.time_unix_ms = clock_->UnixMillis();
  Shard& shard = Of(run);
  Lsn lsn = 0;
  {
    absl::MutexLock lock(&shard.mutex());
    BW_ASSIGN_OR_RETURN(lsn, shard.Append(std::move(record), std::move(message)));
  }
  BW_RETURN_IF_ERROR(log_->LogOf(run)->Sync(lsn));
  // Sync() also ends when another server's commits made this record void.
  if (!ownership_->Serves(run)) {
    return absl::UnavailableError("another server took the run over meanwhile: look, and ask again");
  }
  shard.PublishApplied(run);
  return absl::OkStatus();
}

}  // namespace bellwether::server
