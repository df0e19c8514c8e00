#include "server/engine/run_reporter.h"

#include <string>
#include <utility>

#include "server/act/proposals.h"
#include "server/engine/siblings.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

// Between two tries to store actions.
constexpr int64_t kRetryNanos = 1'000'000'000;

}  // namespace

void RunReporter::Store(RunEffects effects, int64_t arrived_ns) {
  StoreActions(effects);
  StoreAlerts(&effects, arrived_ns);
}

void RunReporter::StoreActions(const RunEffects& effects) {
  if (parts_.actions == nullptr) return;
  outbox_.Add(effects.actions, effects.audit, state_.last_lsn());
  if (outbox_.empty() || actions_failed_) return;
  // A crash would take back what is not durable, and give its id to another action.
  const absl::Status stored = StoreOutbox(parts_.wal->LogOf(state_.record().id)->Sync(outbox_.lsn()));
  if (stored.ok()) return;
  LogError("actions of run {} are not passed on before they can be stored: {}", state_.record().description.name,
           std::string(stored.message()));
}

void RunReporter::StoreWaiting(int64_t now_ns) {
  if (!actions_failed_ || now_ns < next_try_ns_) return;
  const RunRecord& record = state_.record();
  const LogBackend& log = *parts_.wal->LogOf(record.id);
  if (!log.health().ok() || log.durable_lsn() < outbox_.lsn()) return;
  if (StoreOutbox(absl::OkStatus()).ok()) LogInfo("actions of run {} are stored again", record.description.name);
}

absl::Status RunReporter::StoreOutbox(const absl::Status& durable) {
  const absl::Status stored = durable.ok() ? outbox_.Post(state_.record().id, parts_.actions) : durable;
  actions_failed_ = !stored.ok();
  next_try_ns_ = parts_.clock->MonotonicNanos() + kRetryNanos;
  return stored;
}

void RunReporter::StoreAlerts(RunEffects* effects, int64_t arrived_ns) {
  if (effects->transitions.empty()) return;
  const RunRecord& record = state_.record();
  // A crash must not take back an alert that people were notified of.  A failed log does
  // not silence alerts: they go on from memory.
  if (const absl::Status status = parts_.wal->LogOf(record.id)->Sync(state_.last_lsn()); !status.ok()) {
    LogWarning("alerts of run {} go out before they are durable: {}", record.description.name,
               std::string(status.message()));
  }
  for (AlertTransition& transition : effects->transitions) {
    transition.run = record.id;
    transition.run_name = record.description.name;
    transition.time_unix_ns = parts_.clock->UnixNanos();
    // A proposal that is not stored cannot be approved.  Of a false alarm there is none.
    const bool is_acted_on = !state_.action_engine().IsFalseAlarm(transition.key);
    if (!actions_failed_ && is_acted_on) AddProposals(effects->actions, *state_.policy(), &transition);
    // A run of two kinds has no siblings.
    if (parts_.baselines != nullptr && !record.kind_changed)
      AddSiblings(*parts_.baselines, record.description, state_.rows().get(), &transition);
    const auto posted = parts_.alerts->Post(std::move(transition));
    if (!posted.ok()) LogError("an alert is told unstored: {}", std::string(posted.status().message()));
    if (arrived_ns > 0) {
      alert_seconds_->Observe(static_cast<double>(parts_.clock->MonotonicNanos() - arrived_ns) * 1e-9);
    }
  }
}

}  // namespace bellwether::server
