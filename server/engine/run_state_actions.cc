// The part of RunState for actions: requests of people, results of trainers, and
// policies, through the action engine into the audit.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/act/action_kinds.h"
#include "server/engine/run_state.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

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

void RunState::ApplyActionResult(uint32_t rank, const ActionResultMessage& result) {
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
                    now_, &effects_.actions);
}

void RunState::ApplyActionRequest(const ActionRequestMessage& message) {
  const ActionRequest& request = message.request;
  const size_t before = effects_.actions.size();
  absl::Status status = absl::OkStatus();
  if (!message.malformed.empty()) {
    status = absl::InvalidArgumentError(message.malformed);
  } else if (record_.ended && request.verb != ActionRequest::Verb::kReject) {
    status = absl::FailedPreconditionError(absl::StrCat("run ", record_.description.name, " has ended (",
                                                        record_.end_reason, "): nobody is there to act"));
  } else {
    status = engine_->OnRequest(request, now_, &effects_.actions);
  }
  if (status.ok()) {
    // The requested action changed last: an approval can put off another action before.
    if (message.outcome != nullptr && effects_.actions.size() > before) {
      message.outcome->action = effects_.actions.back();
      for (size_t i = before; i < effects_.actions.size(); ++i) {
        const Action& action = effects_.actions[i];
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

absl::Status RunState::CheckPolicy(const PolicyMessage& message) const {
  if (!message.malformed.empty()) return absl::InvalidArgumentError(message.malformed);
  // Only an approver can name approvers; the server's file is the operator's.
  if (message.by != kServerName && !engine_->policy()->MayApprove(message.by)) {
    return absl::PermissionDeniedError(absl::StrCat("by = \"", message.by, "\": the policy in force lets only ",
                                                    absl::StrJoin(engine_->policy()->approvers, ", "), " change it"));
  }
  return absl::OkStatus();
}

void RunState::ApplyPolicy(const PolicyMessage& message) {
  absl::Status status = CheckPolicy(message);
  if (status.ok()) {
    const auto policy = parts_.policy->Find(*message.text);
    status = policy.status();
    if (status.ok()) {
      policy_is_own_ = message.own;
      if ((*policy)->text == engine_->policy()->text) return;
      engine_->SetPolicy(*policy, message.by, now_, &effects_.actions);
    }
  }
  Conclude(status, {.by = message.by, .what = "set_policy", .detail = *message.text}, message.outcome.get());
}

void RunState::Conclude(const absl::Status& status, AuditEntry entry, ActionOutcome* outcome) {
  entry.time_unix_ns = now_.time_unix_ns;
  entry.step = now_.step;
  entry.refused = std::string(status.message());
  effects_.audit.push_back(std::move(entry));
  if (outcome != nullptr) outcome->status = status;
}

void RunState::NotifyEngine() {
  const std::vector<AlertTransition>& all = effects_.transitions;
  if (transitions_notified_ == all.size()) return;
  const std::vector<AlertTransition> fresh(all.begin() + static_cast<std::ptrdiff_t>(transitions_notified_), all.end());
  transitions_notified_ = all.size();
  engine_->OnTransitions(fresh, now_, &effects_.actions);
}

bool RunState::PolicyDiffers(const PolicyPtr& current) const {
  return !record_.ended && !policy_is_own_ && current->text != engine_->policy()->text;
}

void RunState::RestoreActions(std::string_view text, std::string_view state) {
  auto policy = parts_.policy->Find(text);
  if (!policy.ok()) {
    LogError("run {} goes on by the built-in policy: {}", record_.description.name,
             std::string(policy.status().message()));
    policy = DefaultPolicy();
  }
  engine_ = std::make_unique<ActionEngine>(record_.description, *policy);
  if (!engine_->Restore(state)) LogError("run {}: its actions begin afresh", record_.description.name);
}

}  // namespace bellwether::server
