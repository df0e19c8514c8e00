// ListActions, ProposeAction, ApproveAction, RejectAction, UndoAction, GetPolicy,
// SetPolicy.
//
// A request that is not even legal is passed on with the reason, for the audit:
// whoever sends such things to a run is of interest to those who look after it.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/model/ranges.h"
#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint32_t kModeBytesMax = 32;

// At most `bytes_max` bytes without control characters; what was wrong is told
// by the reason, not by the text.
std::string Clipped(const std::string& text, size_t bytes_max) {
  std::string clipped;
  for (const char c : text.substr(0, bytes_max)) clipped += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return clipped;
}

bool FitsInt32(uint32_t value) { return value <= static_cast<uint32_t>(std::numeric_limits<int32_t>::max()); }

absl::Status ReadScope(const v1::ActionScope& proto, ActionScope* scope) {
  if (static_cast<size_t>(proto.layers_size()) > kScopeLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("action.scope.layers: ", proto.layers_size(), " of them: at most ", kScopeLayersMax));
  }
  if (static_cast<size_t>(proto.heads_size()) > kScopeHeadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("action.scope.heads: ", proto.heads_size(), " of them: at most ", kScopeHeadsMax));
  }
  for (const uint32_t layer : proto.layers()) {
    if (!FitsInt32(layer))
      return absl::InvalidArgumentError(absl::StrCat("action.scope.layers: there is no layer ", layer));
    scope->layers.push_back(static_cast<int32_t>(layer));
  }
  for (const v1::LayerHead& head : proto.heads()) {
    if (!FitsInt32(head.layer()) || !FitsInt32(head.head())) {
      return absl::InvalidArgumentError(
          absl::StrCat("action.scope.heads: there is no layer ", head.layer(), " head ", head.head()));
    }
    scope->heads.push_back({static_cast<int32_t>(head.layer()), static_cast<int32_t>(head.head())});
  }
  return absl::OkStatus();
}

// Who asks.  Names of what is no person would make the audit lie.
absl::Status CheckAsker(const std::string& by) {
  if (by.empty()) return absl::InvalidArgumentError("by \"\": must name who asks");
  if (by == kServerName || by == kPolicyName || absl::StartsWith(by, "rank ")) {
    return absl::InvalidArgumentError(absl::StrCat("by \"", by, "\": must be a person's name"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::ListActionsResponse> QueryEngine::ListActions(const v1::ListActionsRequest& request,
                                                                 const CallContext&) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_ASSIGN_OR_RETURN(const std::vector<Action> actions, stores_.actions->List(run->record.id));
  BW_ASSIGN_OR_RETURN(const std::vector<AuditEntry> audit, stores_.actions->Audit(run->record.id));
  v1::ListActionsResponse response;
  for (const Action& action : actions) *response.add_actions() = ToProto(action, run->record.description.uuid);
  for (const AuditEntry& entry : audit) *response.add_audit() = ToProto(entry);
  return response;
}

absl::StatusOr<v1::Action> QueryEngine::Act(const std::string& name, ActionRequest request,
                                            std::string malformed) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(name));
  absl::Status status = absl::OkStatus();
  const auto check = [&status](const absl::Status& next) { status.Update(next); };
  check(Text("by", request.by, options_.name_bytes_max));
  check(Text("reason", request.reason, options_.text_bytes_max));
  check(Text("id", request.id, kActionIdBytesMax));
  check(CheckAsker(request.by));
  if (malformed.empty() && !status.ok()) malformed = std::string(status.message());
  if (!malformed.empty()) {
    request.by = Clipped(request.by, options_.name_bytes_max);
    request.reason = Clipped(request.reason, options_.text_bytes_max);
    request.id = Clipped(request.id, kActionIdBytesMax);
    request.action = Action{.kind = request.action.kind};
  }
  BW_ASSIGN_OR_RETURN(const Action action, stores_.control->Act(run->record.id, request, malformed));
  return ToProto(action, run->record.description.uuid);
}

absl::StatusOr<v1::Action> QueryEngine::ProposeAction(const v1::ProposeActionRequest& request,
                                                      const CallContext&) const {
  const v1::Action& proto = request.action();
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  ActionRequest asked{.verb = ActionRequest::Verb::kPropose, .by = request.by(), .reason = request.reason()};
  Action& action = asked.action;
  absl::Status status = absl::OkStatus();
  const std::string uuid(reinterpret_cast<const char*>(run->record.description.uuid.data()),
                         run->record.description.uuid.size());
  if (!proto.run_uuid().empty() && proto.run_uuid() != uuid) {
    status.Update(absl::InvalidArgumentError("action.run_uuid: is that of another run"));
  }
  status.Update(Range("action.kind", proto.kind(), 1, kActionKindEnd - 1));
  if (status.ok()) action.kind = static_cast<ActionKind>(proto.kind());
  status.Update(ReadScope(proto.scope(), &action.scope));
  status.Update(Text("action.mode", proto.mode(), kModeBytesMax));
  status.Update(Text("action.alert_key", proto.alert_key(), options_.text_bytes_max));
  if (status.ok() && !proto.alert_key().empty()) {
    const auto alert = stores_.alerts->Get(run->record.id, proto.alert_key());
    if (!alert.ok()) {
      status.Update(absl::InvalidArgumentError(absl::StrCat("action.alert_key: ", alert.status().message())));
    } else if (alert->last.state == AlertState::kResolved) {
      status.Update(absl::InvalidArgumentError(absl::StrCat("action.alert_key: alert \"", proto.alert_key(),
                                                            "\" has resolved; leave it out to act all the same")));
    }
  }
  if (!std::isfinite(proto.value())) status.Update(absl::InvalidArgumentError("action.value: must be finite"));
  status.Update(Range("action.apply_at_step", proto.apply_at_step(), 0, kStepMax));
  status.Update(Range("action.expires_unix_ns", proto.expires_unix_ns(), 0, std::numeric_limits<int64_t>::max()));
  if (proto.expires_unix_ns() != 0 && proto.expires_unix_ns() <= stores_.clock->UnixNanos()) {
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("action.expires_unix_ns ", proto.expires_unix_ns(), ": has passed already")));
  }
  action.mode = proto.mode();
  action.value = proto.value();
  action.apply_at_step = proto.apply_at_step();
  action.expires_unix_ns = proto.expires_unix_ns();
  action.alert_key = proto.alert_key();
  if (request.approve()) action.state = ActionState::kApproved;
  return Act(request.run(), std::move(asked), std::string(status.message()));
}

absl::StatusOr<v1::Action> QueryEngine::Decide(ActionRequest::Verb verb, const v1::DecideActionRequest& request) const {
  return Act(request.run(), {.verb = verb, .id = request.id(), .by = request.by(), .reason = request.reason()}, "");
}

absl::StatusOr<v1::Action> QueryEngine::ApproveAction(const v1::DecideActionRequest& request,
                                                      const CallContext&) const {
  return Decide(ActionRequest::Verb::kApprove, request);
}

absl::StatusOr<v1::Action> QueryEngine::RejectAction(const v1::DecideActionRequest& request, const CallContext&) const {
  return Decide(ActionRequest::Verb::kReject, request);
}

absl::StatusOr<v1::Action> QueryEngine::UndoAction(const v1::DecideActionRequest& request, const CallContext&) const {
  return Decide(ActionRequest::Verb::kUndo, request);
}

namespace {

v1::Policy ToPolicy(const RunControl::PolicyView& view) {
  v1::Policy policy;
  policy.set_mode(static_cast<v1::Policy::Mode>(view.mode));
  policy.set_yaml(view.text);
  policy.set_own(view.own);
  return policy;
}

}  // namespace

absl::StatusOr<v1::Policy> QueryEngine::GetPolicy(const v1::GetPolicyRequest& request, const CallContext&) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_ASSIGN_OR_RETURN(const RunControl::PolicyView view, stores_.control->GetPolicy(run->record.id));
  return ToPolicy(view);
}

absl::StatusOr<v1::Policy> QueryEngine::SetPolicy(const v1::SetPolicyRequest& request, const CallContext&) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  std::string text = request.policy().yaml();
  absl::Status status = Range("policy.mode", request.policy().mode(), 0, v1::Policy::MODE_ENFORCE);
  status.Update(Text("by", request.by(), options_.name_bytes_max));
  status.Update(CheckAsker(request.by()));
  if (text.size() > kPolicyBytesMax) {
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("policy.yaml is ", text.size(), " bytes long: at most ", kPolicyBytesMax)));
    text.resize(options_.text_bytes_max);
  }
  if (request.policy().mode() != 0) {
    if (!text.empty()) {
      status.Update(absl::InvalidArgumentError("policy.mode: stands in policy.yaml where there is one"));
    } else if (status.ok()) {
      static constexpr const char* kModes[] = {"", "observe", "propose", "enforce"};
      text = absl::StrCat("mode: ", kModes[request.policy().mode()], "\n");
    }
  }
  BW_ASSIGN_OR_RETURN(const RunControl::PolicyView view,
                      stores_.control->SetPolicy(run->record.id, text, Clipped(request.by(), options_.name_bytes_max),
                                                 std::string(status.message())));
  return ToPolicy(view);
}

}  // namespace bellwether::server
