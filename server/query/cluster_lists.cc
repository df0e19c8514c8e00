// The lists of run_router.h: of all servers.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/query/run_router.h"
#include "server/query/sibling_view.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// What each of the others says; who says nothing that can be used is told of.
template <typename Response, typename Request, typename Missing>
std::map<std::string, Response> AskAll(Peers* peers, const Peers::Spread& spread, const char* method,
                                       const Request& request, const CallContext& context, Missing* unanswered) {
  std::map<std::string, Response> responses;
  const std::string seal = context.grant->PassOn(method);
  for (const Peers::Answer& answer :
       peers->CallAll(spread.others, method, request.SerializeAsString(), seal, context.deadline_monotonic_ns)) {
    Response response;
    if (answer.bytes.ok() && response.ParseFromString(*answer.bytes)) {
      responses[answer.server] = std::move(response);
    } else {
      *unanswered->Add() = answer.server;
    }
  }
  return responses;
}

template <typename Items>
void Cut(size_t limit, Items* items) {
  if (static_cast<size_t>(items->size()) > limit) {
    items->DeleteSubrange(static_cast<int>(limit), items->size() - static_cast<int>(limit));
  }
}

}  // namespace

absl::StatusOr<v1::ListRunsResponse> RunRouter::ListRuns(const QueryEngine& engine, const v1::ListRunsRequest& request,
                                                         const CallContext& context) {
  const Peers::Spread spread = peers_->spread();
  BW_ASSIGN_OR_RETURN(v1::ListRunsResponse own, engine.ListRuns(request, context));
  v1::ListRunsResponse response;
  response.set_partitions_unserved(spread.unserved);
  auto others =
      AskAll<v1::ListRunsResponse>(peers_, spread, "ListRuns", request, context, response.mutable_unanswered());
  others[""] = std::move(own);
  // One that is moving may be told of by both its owners: who heard from it last is right.
  std::map<std::string, v1::Run> runs;
  uint32_t total = 0;
  for (auto& [server, list] : others) {
    total += list.total();
    for (v1::Run& run : *list.mutable_runs()) {
      const auto [known, is_new] = runs.try_emplace(run.description().uuid(), run);
      if (is_new) continue;
      --total;
      if (run.last_report_unix_ns() > known->second.last_report_unix_ns()) known->second = std::move(run);
    }
  }
  for (auto& [uuid, run] : runs) *response.add_runs() = std::move(run);
  std::stable_sort(response.mutable_runs()->begin(), response.mutable_runs()->end(),
                   [](const v1::Run& a, const v1::Run& b) {
                     return std::tuple(a.ended(), -static_cast<int64_t>(a.stage()), -a.last_report_unix_ns()) <
                            std::tuple(b.ended(), -static_cast<int64_t>(b.stage()), -b.last_report_unix_ns());
                   });
  response.set_total(total);
  Cut(request.limit() == 0 ? 100 : request.limit(), response.mutable_runs());
  return response;
}

absl::StatusOr<v1::ListAlertsResponse> RunRouter::ListAlerts(const QueryEngine& engine,
                                                             const v1::ListAlertsRequest& request,
                                                             const CallContext& context) {
  BW_RETURN_IF_ERROR(engine.CheckRanges(request));
  v1::ListAlertsResponse response;
  const auto others = AskAll<v1::ListAlertsResponse>(peers_, peers_->spread(), "ListAlerts", request, context,
                                                     response.mutable_unanswered());
  const QueryStores& stores = engine.stores();
  std::map<RunId, std::vector<Action>> actions;
  for (const AlertView& alert : stores.alerts->List(/*run=*/0, request.firing_only())) {
    if (static_cast<int>(alert.last.severity) < request.severity_min() || !context.Sees(alert.last.run_name)) continue;
    const Peers::Owner owner = peers_->OwnerOfRun(alert.last.run);
    if (!owner.here && others.count(owner.address) > 0) continue;             // He knows it better.
    if (owner.here && stores.runs->Get(alert.last.run) == nullptr) continue;  // The run is deleted.
    v1::Alert* const shown = response.add_alerts();
    *shown = ToProto(alert, *stores.runs);
    HideSiblings(stores, context.grant.get(), alert.last.run, shown);
    // What waits is known where the run is.
    if (owner.here) BW_RETURN_IF_ERROR(engine.ShowActions(alert, context, &actions, shown));
  }
  for (const auto& [server, list] : others) response.mutable_alerts()->MergeFrom(list.alerts());
  std::stable_sort(response.mutable_alerts()->begin(), response.mutable_alerts()->end(),
                   [](const v1::Alert& a, const v1::Alert& b) {
                     const bool a_fires = a.last().state() == v1::ALERT_STATE_FIRING;
                     const bool b_fires = b.last().state() == v1::ALERT_STATE_FIRING;
                     return a_fires != b_fires ? a_fires : a.last().id() > b.last().id();
                   });
  Cut(request.limit() == 0 ? 100 : request.limit(), response.mutable_alerts());
  return response;
}

absl::StatusOr<v1::ListBaselinesResponse> RunRouter::ListBaselines(const QueryEngine& engine,
                                                                   const v1::ListBaselinesRequest& request,
                                                                   const CallContext& context) {
  BW_ASSIGN_OR_RETURN(v1::ListBaselinesResponse own, engine.ListBaselines(request, context));
  v1::ListBaselinesResponse response;
  auto all = AskAll<v1::ListBaselinesResponse>(peers_, peers_->spread(), "ListBaselines", request, context,
                                               response.mutable_unanswered());
  all[""] = std::move(own);
  std::map<std::string, v1::Baseline> kinds;
  for (auto& [server, list] : all) {
    for (v1::Baseline& baseline : *list.mutable_baselines()) {
      v1::Baseline& kind = kinds[baseline.kind()];
      kind.set_kind(baseline.kind());
      kind.mutable_runs()->MergeFrom(baseline.runs());
    }
  }
  for (auto& [name, kind] : kinds) {
    std::stable_sort(
        kind.mutable_runs()->begin(), kind.mutable_runs()->end(),
        [](const v1::BaselineRun& a, const v1::BaselineRun& b) { return a.learned_unix_ns() > b.learned_unix_ns(); });
    *response.add_baselines() = std::move(kind);
  }
  std::stable_sort(response.mutable_baselines()->begin(), response.mutable_baselines()->end(),
                   [](const v1::Baseline& a, const v1::Baseline& b) { return a.runs_size() > b.runs_size(); });
  return response;
}

}  // namespace bellwether::server
