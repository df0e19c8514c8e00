#include "server/query/json_api.h"

#include <google/protobuf/util/json_util.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/model/alert_places.h"
#include "server/query/call_access.h"
#include "server/query/json_text.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// An answer as a message and as text, for each byte of the wire's: numbers take up to
// four times as many, and their message may be twice as large as on the wire.
constexpr int64_t kTextAndMessage = 6;

using Handler = absl::StatusOr<std::string> (*)(const QueryEngine&, const char* name, std::string_view body,
                                                CallContext);

template <typename Request, typename Response,
          absl::StatusOr<Response> (QueryEngine::*method)(const Request&, const CallContext&) const>
absl::StatusOr<std::string> Call(const QueryEngine& engine, const char* name, std::string_view body,
                                 CallContext context) {
  Request request;
  if (!body.empty()) {
    const auto parsed = google::protobuf::util::JsonStringToMessage(
        google::protobuf::StringPiece(body.data(), static_cast<ptrdiff_t>(body.size())), &request);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("body: not a ", Request::descriptor()->name(),
                       " in JSON: ", absl::string_view(parsed.message().data(), parsed.message().size())));
    }
  }
  const absl::StatusOr<Response> response = CallFor(engine, name, std::move(request), context, method);
  if (!response.ok()) return response.status();
  const auto bytes = static_cast<int64_t>(response->ByteSizeLong());
  BW_RETURN_IF_ERROR(context.memory->GrowTo(bytes * kTextAndMessage));
  std::string json = ToJsonText(*response);
  context.memory->ShrinkTo(static_cast<int64_t>(json.size()));
  return json;
}

#define BW_METHOD(name, request, response) \
  { #name, &Call < v1::request, v1::response, &QueryEngine::name> }

const std::map<std::string_view, Handler>& Methods() {
  static const auto* const methods = new std::map<std::string_view, Handler>{
      BW_METHOD(ListRuns, ListRunsRequest, ListRunsResponse),
      BW_METHOD(GetRun, GetRunRequest, Run),
      BW_METHOD(GetSeries, GetSeriesRequest, GetSeriesResponse),
      BW_METHOD(GetMatrix, GetMatrixRequest, GetMatrixResponse),
      BW_METHOD(TopHeads, TopHeadsRequest, TopHeadsResponse),
      BW_METHOD(CompareRuns, CompareRunsRequest, CompareRunsResponse),
      BW_METHOD(ListBaselines, ListBaselinesRequest, ListBaselinesResponse),
      BW_METHOD(GetBaseline, GetBaselineRequest, GetBaselineResponse),
      BW_METHOD(ListAlerts, ListAlertsRequest, ListAlertsResponse),
      BW_METHOD(GetAlert, GetAlertRequest, GetAlertResponse),
      BW_METHOD(AcknowledgeAlert, AcknowledgeAlertRequest, Alert),
      BW_METHOD(SilenceAlert, SilenceAlertRequest, Alert),
      BW_METHOD(MarkFalseAlarm, MarkFalseAlarmRequest, Alert),
      BW_METHOD(Annotate, AnnotateRequest, AnnotateResponse),
      BW_METHOD(ListEvents, ListEventsRequest, ListEventsResponse),
      BW_METHOD(ListActions, ListActionsRequest, ListActionsResponse),
      BW_METHOD(ProposeAction, ProposeActionRequest, Action),
      BW_METHOD(ApproveAction, DecideActionRequest, Action),
      BW_METHOD(RejectAction, DecideActionRequest, Action),
      BW_METHOD(UndoAction, DecideActionRequest, Action),
      BW_METHOD(GetPolicy, GetPolicyRequest, Policy),
      BW_METHOD(SetPolicy, SetPolicyRequest, Policy),
      BW_METHOD(DeleteRun, DeleteRunRequest, DeleteRunResponse),
      BW_METHOD(RenameRun, RenameRunRequest, Run),
      BW_METHOD(GetServerInfo, GetServerInfoRequest, ServerInfo),
  };
  return *methods;
}

#undef BW_METHOD

const char* Name(AlertState state) { return state == AlertState::kFiring ? "firing" : "resolved"; }

const char* Name(Severity severity) {
  switch (severity) {
    case Severity::kCritical:
      return "critical";
    case Severity::kWarning:
      return "warning";
    case Severity::kInfo:
    case Severity::kNone:
      break;
  }
  return "info";
}

nlohmann::ordered_json Index(int32_t index) {
  return index < 0 ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(index);
}

nlohmann::ordered_json Number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

absl::StatusOr<std::string> CallJson(const QueryEngine& engine, std::string_view method, std::string_view body,
                                     GrantPtr grant, std::function<bool()> cancelled,
                                     std::shared_ptr<const void>* memory) {
  const auto found = Methods().find(method);
  if (found == Methods().end()) {
    return absl::UnimplementedError(
        absl::StrCat("method \"", absl::string_view(method.data(), method.size()), "\": Query has no such unary call"));
  }
  const int64_t start_ns = engine.stores().clock->MonotonicNanos();
  CallContext context = engine.NewContext(std::move(grant));
  context.as_text = true;
  std::shared_ptr<const void> use = context.memory;
  context.cancelled = std::move(cancelled);
  // Names are literals, with their zeros.
  absl::StatusOr<std::string> response = found->second(engine, found->first.data(), body, std::move(context));
  engine.CountCall(found->first.data(), start_ns);
  if (memory != nullptr && response.ok()) *memory = std::move(use);
  return response;
}

std::vector<std::string_view> JsonMethods() {
  std::vector<std::string_view> names;
  for (const auto& [name, handler] : Methods()) names.push_back(name);
  return names;
}

std::string TransitionToJson(const AlertTransition& transition, const std::string& run_uuid) {
  nlohmann::ordered_json heads = nlohmann::ordered_json::array();
  for (const Head& head : transition.heads) heads.push_back({Index(head.layer), Index(head.head)});
  nlohmann::ordered_json evidence = nlohmann::ordered_json::object();
  for (const Evidence& item : transition.evidence) {
    if (!evidence.contains(item.signal)) evidence[item.signal] = Number(item.value);
  }
  nlohmann::ordered_json json;
  json["run"] = transition.run_name;
  if (!run_uuid.empty()) json["run_uuid"] = run_uuid;
  json["step"] = transition.step;
  json["state"] = Name(transition.state);
  json["severity"] = Name(transition.severity);
  json["stage"] = transition.stage;
  json["layer"] = Index(transition.strongest.layer);
  json["head"] = Index(transition.strongest.head);
  json["heads"] = std::move(heads);
  json["eta_steps"] = transition.eta.known ? Number(transition.eta.steps) : nlohmann::ordered_json(nullptr);
  const Eta& eta = transition.eta;
  const double seconds = eta.steps * eta.step_seconds;
  const auto known = [&eta](double value) { return eta.known ? Number(value) : nlohmann::ordered_json(nullptr); };
  json["eta_lower_steps"] = known(eta.lower_steps);
  json["eta_upper_steps"] = known(eta.upper_steps);
  json["eta_seconds"] = eta.known && seconds > 0 ? Number(seconds) : nlohmann::ordered_json(nullptr);
  json["evidence"] = std::move(evidence);
  json["rule"] = transition.rule;
  json["key"] = transition.key;
  json["k"] = transition.k;
  json["first_step"] = transition.first_step;
  json["summary"] = transition.summary;
  json["cause"] = transition.cause;
  json["heads_total"] = transition.heads_total;
  json["advice"] = transition.advice;
  const AlertPlaces places = PlacesOf(transition.evidence);
  json["tensors"] = places.tensors;
  json["experts"] = nlohmann::ordered_json::array();
  for (const Head& expert : places.experts) json["experts"].push_back({Index(expert.layer), Index(expert.head)});
  json["ranks"] = places.ranks;
  json["modules"] = places.modules;
  json["sequences"] =
      places.sequences.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(places.sequences);
  // Names come from clients: what is not UTF-8 must not throw here.
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace bellwether::server
