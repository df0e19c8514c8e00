// The part of the Pipeline that acts: requests into the log, actions to the
// streams.

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/act/action_kinds.h"
#include "server/engine/pipeline.h"
#include "server/engine/pipeline_session.h"
#include "server/ingest/log_records.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

void Pipeline::CountActions() {
  actions_->Subscribe([this](RunId, const Action& action, size_t fresh) {
    for (size_t i = action.history.size() - fresh; i < action.history.size(); ++i) {
      const Labels labels = {{"kind", NameOf(action.kind)}, {"result", NameOf(action.history[i].state)}};
      counters_->counter("bellwether_actions_total", labels)->Add();
    }
  });
}

void Pipeline::AppendPolicy(const RunEntry& run, int64_t time_unix_ms) {
  const PolicyPtr policy = policy_.current();
  if (policy->text == DefaultPolicy()->text) return;
  const PolicyMessage message = ServerPolicy(policy);
  WalRecord record;
  record.kind = WalKind::kPolicy;
  record.run = run.id;
  record.attempt = run.launches.newest_attempt();
  record.time_unix_ms = time_unix_ms;
  record.payload = EncodePolicy(message);
  Shard& shard = *shards_[run.shard];
  shard.mutex().AssertHeld();
  (void)shard.Append(std::move(record), {0, message});  // If it fails, the shard will see that the policies differ.
}

bool Pipeline::HandOver(RunId run, uint32_t rank, const Action& action) {
  std::shared_ptr<Session> session;
  {
    absl::MutexLock registry(&registry_mutex_);
    const auto entry = runs_by_id_.find(run);
    if (entry == runs_by_id_.end()) return false;
    absl::MutexLock lock(&shards_[entry->second->shard]->mutex());
    const auto slot = entry->second->ranks.find(rank);
    if (slot == entry->second->ranks.end() || slot->second == nullptr) return false;
    session = slot->second->session.lock();
  }
  if (session == nullptr) return false;
  bool taken = false;
  session->Tell([&](SessionOwner* owner) {
    owner->OnAction(action);
    taken = true;
  });
  return taken;
}

bool Pipeline::IsAttached(RunId run) {
  absl::MutexLock registry(&registry_mutex_);
  const auto entry = runs_by_id_.find(run);
  if (entry == runs_by_id_.end()) return false;
  absl::MutexLock lock(&shards_[entry->second->shard]->mutex());
  return std::any_of(entry->second->ranks.begin(), entry->second->ranks.end(), [](const auto& rank) {
    const auto session = rank.second == nullptr ? nullptr : rank.second->session.lock();
    return session != nullptr && session->attached();
  });
}

absl::Status Pipeline::Ask(RunId run, WalKind kind, std::string payload, IngestMessage message) {
  if (closing_) return absl::UnavailableError("the server is draining; come back");
  BW_RETURN_IF_ERROR(AwaitRecovered());
  const RunSnapshotPtr snapshot = table_.Get(run);
  if (snapshot == nullptr) return absl::NotFoundError("no such run");
  WalRecord record;
  record.kind = kind;
  record.run = run;
  record.attempt = snapshot->record.description.attempt;
  record.payload = std::move(payload);
  return LogAndApply(std::move(record), std::move(message));
}

absl::Status Pipeline::LogAndApply(WalRecord record, IngestMessage message) {
  const RunId run = record.run;
  record.time_unix_ms = clock_->UnixMillis();
  Shard& shard = *shards_[static_cast<size_t>(run) % shards_.size()];
  Lsn lsn = 0;
  {
    absl::MutexLock lock(&shard.mutex());
    BW_ASSIGN_OR_RETURN(lsn, shard.Append(std::move(record), std::move(message)));
  }
  BW_RETURN_IF_ERROR(wal_->LogOf(run)->Sync(lsn));
  // What nobody waits for any more, because another server's commits made ours void, is
  // over, too.
  if (!ownership_->Serves(run)) {
    return absl::UnavailableError("another server took the run over meanwhile: look, and ask again");
  }
  shard.PublishApplied(run);
  return absl::OkStatus();
}

absl::StatusOr<Action> Pipeline::Act(RunId run, const ActionRequest& request, const std::string& malformed) {
  ActionRequestMessage message{.request = request, .malformed = malformed};
  message.outcome = std::make_shared<ActionOutcome>();
  const std::shared_ptr<ActionOutcome> outcome = message.outcome;
  std::string payload = EncodeActionRequest(message);
  BW_RETURN_IF_ERROR(Ask(run, WalKind::kActionRequest, std::move(payload), {0, std::move(message)}));
  BW_RETURN_IF_ERROR(outcome->status);
  return outcome->action;
}

absl::StatusOr<RunControl::PolicyView> Pipeline::GetPolicy(RunId run) {
  BW_RETURN_IF_ERROR(AwaitRecovered());  // The log may hold another one.
  absl::StatusOr<PolicyView> view = absl::NotFoundError("no such run");
  if (!ownership_->Serves(run)) view = absl::UnavailableError("another server takes the run over: ask again");
  shards_[static_cast<size_t>(run) % shards_.size()]->WithRun(run, [&view](const LiveRun* live) {
    if (live == nullptr) return;
    view = PolicyView{static_cast<uint8_t>(live->policy()->mode), live->policy()->text, live->policy_is_own()};
  });
  return view;
}

absl::StatusOr<RunControl::PolicyView> Pipeline::SetPolicy(RunId run, const std::string& text, const std::string& by,
                                                           const std::string& malformed) {
  PolicyMessage message{.own = !text.empty(), .by = by, .malformed = malformed};
  message.text = std::make_shared<const std::string>(text.empty() ? policy_.current()->text : text);
  message.outcome = std::make_shared<ActionOutcome>();
  const std::shared_ptr<ActionOutcome> outcome = message.outcome;
  std::string payload = EncodePolicy(message);
  BW_RETURN_IF_ERROR(Ask(run, WalKind::kPolicy, std::move(payload), {0, std::move(message)}));
  BW_RETURN_IF_ERROR(outcome->status);
  return GetPolicy(run);
}

}  // namespace bellwether::server
