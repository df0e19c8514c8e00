#include "server/engine/live_run.h"

#include <utility>
#include <variant>

#include "server/util/status_macros.h"

namespace bellwether::server {

LiveRun::LiveRun(const LiveRunParts& parts, const RunRecord& record)
    : parts_(parts),
      state_(&parts_, record),
      deadlines_(parts.clock->MonotonicNanos()),
      saver_(&parts_, &state_),
      publisher_(&parts_, &state_),
      reporter_(&parts_, &state_) {}

absl::StatusOr<std::unique_ptr<LiveRun>> LiveRun::Load(const LiveRunParts& parts, const RunRecord& record) {
  std::unique_ptr<LiveRun> run(new LiveRun(parts, record));
  BW_ASSIGN_OR_RETURN(const bool restored, run->state_.Load());
  // The record of a run that had ended is shown already.
  if (restored && !run->ended()) run->publisher_.MarkChanged();
  return run;
}

void LiveRun::Apply(const LoggedMessage& message, int64_t arrived_ns) {
  if (arrived_ns > 0 && message.epoch > 0) deadlines_.RecordHeard(message.rank, arrived_ns);
  const bool is_new = message.lsn > state_.saved_lsn();
  if (is_new && std::holds_alternative<PolicyMessage>(message.message.body)) coming_policy_ = nullptr;
  saver_.RecordApplied();
  publisher_.MarkChanged();
  RunEffects effects = state_.Apply(message, /*is_live=*/arrived_ns > 0);
  deadlines_.RecordEffects(effects);
  deliveries_.RecordEffects(effects);
  reporter_.Store(std::move(effects), arrived_ns);
}

bool LiveRun::SilenceChanged(int64_t now_ns, int64_t silence_ns_min, SilenceMessage* silence) {
  if (!deadlines_.SilenceChanged(state_, now_ns, silence_ns_min, silence)) return false;
  publisher_.MarkChanged();
  return true;
}

absl::Status LiveRun::EndSave(RunSave save, const absl::Status& shared) {
  const absl::Status ended = saver_.End(std::move(save), shared);
  if (ended.ok()) publisher_.MarkChanged();
  return ended;
}

absl::Status LiveRun::Save() {
  BW_RETURN_IF_ERROR(saver_.Save());
  publisher_.MarkChanged();
  return absl::OkStatus();
}

}  // namespace bellwether::server
