// The part of LiveRun that acts: what people, policies and trainers say about
// actions, through the engine and into the audit.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/act/action_kinds.h"
#include "server/engine/live_run.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Between two tries to store what could not be.
constexpr int64_t kPostRetryNanos = 1'000'000'000;

const char* NameOf(ActionRequest::Verb verb) {
  switch (verb) {
    case ActionRequest::Verb::kPropose:
      return "propose";
    case ActionRequest::Verb::kApprove:
      return "approve";
    case ActionRequest::Verb::kReject:
      return "reject";
    case ActionRequest::Verb::kUndo:
      return "undo";
  }
  return "unknown";
}

}  // namespace

void LiveRun::ApplyActionResult(uint32_t rank, const ActionResultMessage& result) {
  const std::vector<Action> actions = engine_->actions();
  const bool known = std::any_of(actions.begin(), actions.end(), [&](const Action& a) { return a.id == result.id; });
  const std::vector<Action> due = engine_->Due(rank);
  const bool waited = std::any_of(due.begin(), due.end(), [&](const Action& a) { return a.id == result.id; });
  const char* const outcome = !known                                          ? "unknown"
                              : result.attempt != record_.description.attempt ? "other_attempt"
                              : !waited                                       ? "repeated"
                                                                              : "taken";
  parts_.counters->counter("bellwether_action_results_total", {{"result", outcome}})->Add();
  engine_->OnResult({.id = result.id,
                     .rank = rank,
                     .attempt = result.attempt,
                     .applied = result.applied,
                     .step = result.step,
                     .reason = result.reason},
                    now_, &changed_actions_);
}

void LiveRun::ApplyActionRequest(const ActionRequestMessage& message) {
  const ActionRequest& request = message.request;
  const size_t before = changed_actions_.size();
  absl::Status status = absl::OkStatus();
  if (!message.malformed.empty()) {
    status = absl::InvalidArgumentError(message.malformed);
  } else if (record_.ended && request.verb != ActionRequest::Verb::kReject) {
    status = absl::FailedPreconditionError(absl::StrCat("run ", record_.description.name, " has ended (",
                                                        record_.end_reason, "): nobody is there to act"));
  } else {
    status = engine_->OnRequest(request, now_, &changed_actions_);
  }
  if (status.ok()) {
    // What was asked for is the last that changed: approving one can put off another.
    if (message.outcome != nullptr && changed_actions_.size() > before) {
      message.outcome->action = changed_actions_.back();
      for (size_t i = before; i < changed_actions_.size(); ++i) {
        const Action& action = changed_actions_[i];
        if (action.id == request.id && request.verb != ActionRequest::Verb::kUndo) message.outcome->action = action;
      }
    }
    return;
  }
  std::string id = request.id;
  ActionKind kind = request.action.kind;
  for (const Action& action : engine_->actions()) {
    if (action.id == id) kind = action.kind;
  }
  parts_.counters->counter("bellwether_actions_total", {{"kind", NameOf(kind)}, {"result", "request_refused"}})->Add();
  Conclude(status,
           {.by = request.by,
            .what = NameOf(request.verb),
            .action_id = std::move(id),
            .kind = kind,
            .detail = request.reason},
           message.outcome.get());
}

absl::Status LiveRun::CheckPolicy(const PolicyMessage& message) const {
  if (!message.malformed.empty()) return absl::InvalidArgumentError(message.malformed);
  // Nobody makes himself an approver; the server's file is its operator's word.
  if (message.by != kServerName && !engine_->policy()->MayApprove(message.by)) {
    return absl::PermissionDeniedError(absl::StrCat("by = \"", message.by, "\": the policy in force lets only ",
                                                    absl::StrJoin(engine_->policy()->approvers, ", "), " change it"));
  }
  return absl::OkStatus();
}

void LiveRun::ApplyPolicy(const PolicyMessage& message) {
  coming_policy_ = nullptr;
  absl::Status status = CheckPolicy(message);
  if (status.ok()) {
    const auto policy =
        message.text->empty() ? absl::StatusOr<PolicyPtr>(DefaultPolicy()) : ParsePolicy(*message.text, "policy");
    status = policy.status();
    if (status.ok()) {
      policy_is_own_ = message.own;
      if ((*policy)->text == engine_->policy()->text) return;
      engine_->SetPolicy(*policy, message.by, now_, &changed_actions_);
    }
  }
  Conclude(status, {.by = message.by, .what = "set_policy", .detail = *message.text}, message.outcome.get());
}

void LiveRun::Conclude(const absl::Status& status, AuditEntry entry, ActionOutcome* outcome) {
  entry.time_unix_ns = now_.time_unix_ns;
  entry.step = now_.step;
  entry.refused = std::string(status.message());
  audit_.push_back(std::move(entry));
  if (outcome != nullptr) outcome->status = status;
}

void LiveRun::NotifyEngine() {
  if (transitions_told_ == transitions_.size()) return;
  const std::vector<AlertTransition> fresh(transitions_.begin() + static_cast<std::ptrdiff_t>(transitions_told_),
                                           transitions_.end());
  transitions_told_ = transitions_.size();
  engine_->OnTransitions(fresh, now_, &changed_actions_);
}

void LiveRun::PostActions() {
  const std::vector<AuditEntry> audit = std::exchange(audit_, {});
  if (parts_.actions == nullptr) return;
  outbox_.Add(changed_actions_, audit, last_lsn_);
  if (outbox_.empty() || actions_wait_) return;
  // A crash would take back what is not durable, and its id would be another's.
  const absl::Status posted = PostOutbox(parts_.wal->LogOf(record_.id)->Sync(outbox_.lsn()));
  if (posted.ok()) return;
  LogError("actions of run {} are not passed on before they can be stored: {}", record_.description.name,
           std::string(posted.message()));
}

void LiveRun::PostWaiting(int64_t now_ns) {
  if (!actions_wait_ || now_ns < next_post_ns_) return;
  const LogBackend& log = *parts_.wal->LogOf(record_.id);
  if (!log.health().ok() || log.durable_lsn() < outbox_.lsn()) return;
  if (PostOutbox(absl::OkStatus()).ok()) LogInfo("actions of run {} are stored again", record_.description.name);
}

absl::Status LiveRun::PostOutbox(const absl::Status& durable) {
  const absl::Status posted = durable.ok() ? outbox_.Post(record_.id, parts_.actions) : durable;
  actions_wait_ = !posted.ok();
  next_post_ns_ = parts_.clock->MonotonicNanos() + kPostRetryNanos;
  return posted;
}

std::vector<LiveRun::Errand> LiveRun::Errands() {
  std::vector<Errand> errands;
  if (due_seen_ == engine_->due_version()) return errands;
  due_seen_ = engine_->due_version();
  for (const auto& [rank, record] : ranks_) {
    const std::set<std::string>& handed = handed_[rank];
    for (Action& action : engine_->Due(rank)) {
      if (!handed.contains(action.id)) errands.push_back({rank, std::move(action)});
    }
  }
  return errands;
}

bool LiveRun::PolicyDiffers(const PolicyPtr& current) const {
  return !record_.ended && !policy_is_own_ && current != coming_policy_ && current->text != engine_->policy()->text;
}

void LiveRun::RestoreActions(std::string_view text, std::string_view state) {
  auto policy = text.empty() ? absl::StatusOr<PolicyPtr>(DefaultPolicy()) : ParsePolicy(text, "policy");
  if (!policy.ok()) {
    LogError("run {} goes on by the built-in policy: {}", record_.description.name,
             std::string(policy.status().message()));
    policy = DefaultPolicy();
  }
  engine_ = std::make_unique<ActionEngine>(record_.description, *policy);
  if (!engine_->Restore(state)) LogError("run {}: its actions begin afresh", record_.description.name);
}

}  // namespace bellwether::server
