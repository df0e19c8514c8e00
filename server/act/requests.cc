// What people ask of the actions of a run.

#include "absl/strings/str_cat.h"
#include "server/act/engine_state.h"

namespace bellwether::server {
namespace {

constexpr int64_t kTimeToLiveMax = 7 * 24 * 3600 * kSecondNanos;
constexpr size_t kNameBytesMax = 128;
constexpr size_t kKeyBytesMax = 256;
constexpr int64_t kTrialStepsOfPeople = 1000;

absl::Status TooLong(const char* field, size_t bytes, size_t bytes_max) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", bytes, " bytes long: at most ", bytes_max));
}

// Why another one must not begin.
absl::Status InTheWay(const Tracked& other) {
  const Action& action = other.action;
  if (!other.on_trial) {
    return absl::FailedPreconditionError(
        absl::StrCat("action ", action.id, " (", ActionText(action), ") is ", NameOf(action.state), ": one at a time"));
  }
  return absl::FailedPreconditionError(absl::StrCat("action ", action.id, " (", ActionText(action),
                                                    ") is on trial until step ", other.trial_end(),
                                                    ": wait, or undo it"));
}

absl::Status WrongState(const Action& action, const char* verb, const char* needs) {
  return absl::FailedPreconditionError(
      absl::StrCat("action ", action.id, " is ", NameOf(action.state), ": ", verb, " needs ", needs));
}

// The trainer would only answer that it may not.
absl::Status Disallowed(const Action& action, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat(ActionText(action), ": ", why));
}

std::string ReasonOr(const std::string& reason, const char* otherwise) { return reason.empty() ? otherwise : reason; }

}  // namespace

absl::Status ActionEngine::State::Request(const ActionRequest& request, const Now& now, Changed* changed) {
  if (request.by.empty() || request.by.size() > kNameBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("by is ", request.by.size(), " bytes long: must be 1 to ", kNameBytesMax));
  }
  if (request.reason.size() > kReasonBytesMax) return TooLong("reason", request.reason.size(), kReasonBytesMax);
  const bool decides = request.verb != ActionRequest::Verb::kPropose || request.action.state == ActionState::kApproved;
  if (decides && !policy->MayApprove(request.by)) {
    return absl::PermissionDeniedError(absl::StrCat(request.by, " is not among the policy's approvers"));
  }
  switch (request.verb) {
    case ActionRequest::Verb::kPropose:
      return Propose(request, now, changed);
    case ActionRequest::Verb::kApprove:
      return ApproveById(request, now, changed);
    case ActionRequest::Verb::kReject:
      return Reject(request, now, changed);
    case ActionRequest::Verb::kUndo:
      return Undo(request, now, changed);
  }
  return absl::InvalidArgumentError(absl::StrCat("verb = ", static_cast<int>(request.verb), ": must be 1 to 4"));
}

absl::Status ActionEngine::State::Propose(const ActionRequest& request, const Now& now, Changed* changed) {
  const Action& asked = request.action;
  if (absl::Status legal = CheckAction(asked, run.layout); !legal.ok()) return legal;
  if (asked.alert_key.size() > kKeyBytesMax) return TooLong("alert_key", asked.alert_key.size(), kKeyBytesMax);
  if (const AlertCase* const of = FindCase(asked.alert_key); of != nullptr && !of->firing) {
    return absl::FailedPreconditionError(
        absl::StrCat("alert_key = ", asked.alert_key, ": this alert has resolved; leave it out to act all the same"));
  }
  if (asked.kind == ActionKind::kCenterK && asked.value == 1 && run.attention.softcap != 0) {
    return absl::FailedPreconditionError(absl::StrCat("attention.center_k: softcap = ", run.attention.softcap,
                                                      ", under which softmax feels the mean key: must be 0"));
  }
  if (asked.apply_at_step != 0 && asked.apply_at_step <= now.step) {
    return absl::InvalidArgumentError(
        absl::StrCat("apply_at_step = ", asked.apply_at_step, ": must be 0 or above the run's newest step ", now.step));
  }
  const int64_t expires = asked.expires_unix_ns;
  if (expires != 0 && (expires <= now.time_unix_ns || expires - now.time_unix_ns > kTimeToLiveMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("expires_unix_ns = ", expires, ": must be 0 or within 7 days after ", now.time_unix_ns));
  }
  if (actions.size() >= kActionsMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("the run has ", actions.size(), " actions: at most ", kActionsMax));
  }
  const bool at_once = asked.state == ActionState::kApproved;
  if (at_once && asked.kind == ActionKind::kRollbackSuggest) {
    return absl::FailedPreconditionError("rollback.suggest is advice: a person does it");
  }
  if (const Tracked* const other = Busy(); at_once && other != nullptr) return InTheWay(*other);
  if (const std::string why = NotAllowed(asked).value_or(""); at_once && !why.empty()) return Disallowed(asked, why);
  Action action;
  action.kind = asked.kind;
  action.scope = asked.scope;
  action.mode = asked.mode;
  action.value = asked.value;
  action.apply_at_step = asked.apply_at_step;
  action.expires_unix_ns = expires;
  action.alert_key = asked.alert_key;
  const ActionKindInfo& info = *FindActionKind(asked.kind);
  action.expected_effect = info.effect;
  action.cost = info.cost;
  Tracked* const tracked = Create(std::move(action), request.by, request.reason, now, changed);
  tracked->expires_given = expires != 0;
  tracked->step_given = asked.apply_at_step != 0;
  tracked->trial_steps = info.on_trial ? kTrialStepsOfPeople : 0;
  if (at_once) {
    tracked->person_approved = true;
    Approve(tracked, request.by, ReasonOr(request.reason, "proposed and approved"), now, changed);
  }
  return absl::OkStatus();
}

absl::Status ActionEngine::State::ApproveById(const ActionRequest& request, const Now& now, Changed* changed) {
  Tracked* const tracked = Find(request.id);
  if (tracked == nullptr) return absl::NotFoundError(absl::StrCat("no action ", request.id, " in this run"));
  if (tracked->action.state != ActionState::kProposed) return WrongState(tracked->action, "approving", "proposed");
  if (tracked->action.kind == ActionKind::kRollbackSuggest) {
    return absl::FailedPreconditionError("rollback.suggest is advice: a person does it");
  }
  const Tracked* const other = Busy(tracked);
  if (other != nullptr && other->action.id != tracked->action.undoes) return InTheWay(*other);
  if (const std::string why = NotAllowed(tracked->action).value_or(""); !why.empty()) {
    return Disallowed(tracked->action, why);
  }
  if (tracked->step_given && tracked->action.apply_at_step <= now.step) {
    return absl::FailedPreconditionError(absl::StrCat("apply_at_step = ", tracked->action.apply_at_step,
                                                      " has passed: the run's newest step is ", now.step));
  }
  tracked->person_approved = true;
  Approve(tracked, request.by, ReasonOr(request.reason, "approved"), now, changed);
  return absl::OkStatus();
}

absl::Status ActionEngine::State::Reject(const ActionRequest& request, const Now& now, Changed* changed) {
  Tracked* const tracked = Find(request.id);
  if (tracked == nullptr) return absl::NotFoundError(absl::StrCat("no action ", request.id, " in this run"));
  if (tracked->action.state != ActionState::kProposed) return WrongState(tracked->action, "rejecting", "proposed");
  Fail(tracked, ActionState::kRefused, request.by, ReasonOr(request.reason, "rejected"), false, now, changed);
  return absl::OkStatus();
}

absl::Status ActionEngine::State::Undo(const ActionRequest& request, const Now& now, Changed* changed) {
  Tracked* const of = Find(request.id);
  if (of == nullptr) return absl::NotFoundError(absl::StrCat("no action ", request.id, " in this run"));
  if (!of->info().holds || of->is_undo()) {
    return absl::FailedPreconditionError(
        absl::StrCat(of->is_undo() ? "an undo" : NameOf(of->action.kind), " cannot be undone"));
  }
  if (!of->in_force || of->restoring) return WrongState(of->action, "undoing", "an action in force");
  for (Tracked& other : actions) {
    if (other.action.undoes != of->action.id) continue;
    if (other.on_its_way()) return InTheWay(other);
  }
  const Tracked* const other = Busy();
  if (other != nullptr && other != of) return InTheWay(*other);
  if (actions.size() >= 2 * kActionsMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("the run has ", actions.size(), " actions: too many to undo one"));
  }
  // The policy's own proposal to undo it, if it waits, is this one.
  Tracked* undo = nullptr;
  for (Tracked& waiting : actions) {
    if (waiting.action.undoes == of->action.id && waiting.action.state == ActionState::kProposed) undo = &waiting;
  }
  if (undo == nullptr) undo = MakeUndo(of, request.by, request.reason, now, changed);
  if (undo == nullptr) return absl::FailedPreconditionError("it cannot be undone");
  undo->person_approved = true;
  Approve(undo, request.by, ReasonOr(request.reason, "undo"), now, changed);
  return absl::OkStatus();
}

}  // namespace bellwether::server
