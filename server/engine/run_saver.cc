#include "server/engine/run_saver.h"

#include <utility>

#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint64_t kSaveSteps = 256;
// Of a run with many tensors fewer steps wait: some 10 MB, compressed.
constexpr uint64_t kSaveValues = uint64_t{1} << 22;
constexpr size_t kSaveEvents = 256;
constexpr int64_t kSaveNanosMin = 2'000'000'000;
constexpr int64_t kSaveNanosMax = 30'000'000'000;

}  // namespace

Lsn RunSaver::needed_lsn() const {
  // Below the oldest open step there are closed steps that no saved state has.
  return dirty_ ? state_.record().applied_lsn + 1 : state_.merge().oldest_open_lsn();
}

bool RunSaver::IsDue(int64_t now_ns) const {
  // No saved state has a goodbye that waits: the log keeps it.
  if (!dirty_ || state_.has_waiting_byes()) return false;
  const int64_t age = now_ns - saved_ns_;
  return state_.record().ended || age >= kSaveNanosMax || state_.new_events().size() >= kSaveEvents ||
         ((state_.unsaved_steps() >= kSaveSteps || state_.unsaved_values() >= kSaveValues) && age >= kSaveNanosMin);
}

absl::Status RunSaver::Save() {
  // The database must never be ahead of the log.
  BW_RETURN_IF_ERROR(parts_.wal->LogOf(state_.record().id)->Sync(state_.last_lsn()));
  BW_ASSIGN_OR_RETURN(RunSave save, Begin());
  return End(std::move(save), absl::OkStatus());
}

absl::StatusOr<RunSave> RunSaver::Begin() {
  RunSave save;
  save.batch = parts_.database->NewBatch();
  BW_RETURN_IF_ERROR(state_.Write(&save));
  saving_ = true;
  closing_ = state_.record().ended;
  return save;
}

absl::Status RunSaver::Share(const LiveRunParts& parts, RunId run, RunSave* save) {
  BW_RETURN_IF_ERROR(parts.wal->LogOf(run)->health());              // It may have gone silent while others were saved.
  BW_RETURN_IF_ERROR(parts.wal->LogOf(run)->Sync(save->last_lsn));  // As in Save().
  return parts.database->ShareBatch(save->batch.get());
}

absl::Status RunSaver::End(RunSave save, const absl::Status& shared) {
  saving_ = false;
  BW_RETURN_IF_ERROR(shared);
  BW_RETURN_IF_ERROR(parts_.database->Commit(std::move(save.batch)));
  state_.RecordSaved(save, /*closed=*/closing_);
  saved_ns_ = parts_.clock->MonotonicNanos();
  dirty_ = state_.last_lsn() != save.last_lsn;
  return absl::OkStatus();
}

}  // namespace bellwether::server
