// call_access.h: the rights that each call of service Query needs; the one
// place with them, for gRPC and JSON alike.

#ifndef BELLWETHER_SERVER_QUERY_CALL_ACCESS_H_
#define BELLWETHER_SERVER_QUERY_CALL_ACCESS_H_

#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/access/access.h"
#include "server/query/query_engine.h"
#include "server/query/run_router.h"

namespace bellwether::server {

struct CallRule {
  Role role = Role::kAdmin;  // Also the role of a call that is missing in the table.
  bool changes = true;       // Stands in the audit when it was done.
};
CallRule RuleOf(std::string_view method);

// Whether the caller may make the call about this run, as the caller names it.
// "" = about no particular run, which lists only what the caller may see.  A
// run that the caller may not see and a run that does not exist are refused in
// the same words.  PERMISSION_DENIED, UNAUTHENTICATED; both stand in the audit.
absl::Status CheckCall(const QueryEngine& engine, const Grant* grant, const char* method, const std::string& run);

// Where the runs of a call are, and whether its caller may make it about them.
struct CallPlaces {
  RunRouter* router = nullptr;     // Null: here, whatever it is about.
  RunRouter::Location run, other;  // Of names that were given.
};
// `other` is a second run, "" = none.  Errors as CheckCall() and
// RunRouter::Find(), which may ask other servers; gRPC's threads ask
// MayAskOthers() first.
absl::StatusOr<CallPlaces> PlaceCall(const QueryEngine& engine, const Grant* grant, const char* method,
                                     const std::string& run, const std::string& other, int64_t deadline_monotonic_ns);

// Whether CallFor() may have to wait for other servers.
template <typename Request>
bool MayAskOthers(const QueryEngine& engine, const Grant* grant, const Request& request) {
  RunRouter* const router = engine.stores().router;
  if (router == nullptr || grant == nullptr || grant->passed_on()) return false;
  const auto may_be_remote = [router](const std::string& run) {
    const auto known = router->Known(run);
    return !known.has_value() || !known->server.empty();
  };
  if constexpr (requires { request.baseline(); }) {
    if (!request.baseline().empty() && may_be_remote(request.baseline())) return true;
  }
  if constexpr (requires { request.run(); }) {
    if (!request.run().empty()) return may_be_remote(request.run());
  }
  return std::is_same_v<Request, v1::ListRunsRequest> || std::is_same_v<Request, v1::ListAlertsRequest> ||
         std::is_same_v<Request, v1::ListBaselinesRequest>;
}

// The answer of the engine, here or at the run's owner.  Two runs of different
// owners are compared here, from the answers of both.
template <typename Request, typename Response>
absl::StatusOr<Response> AnswerFrom(const QueryEngine& engine, const char* method, Request* request,
                                    const CallContext& context, const CallPlaces& places,
                                    absl::StatusOr<Response> (QueryEngine::*call)(const Request&, const CallContext&)
                                        const) {
  RunRouter* const router = places.router;
  if constexpr (std::is_same_v<Request, v1::ListRunsRequest>) {
    if (router != nullptr) return router->ListRuns(engine, *request, context);
  } else if constexpr (std::is_same_v<Request, v1::ListBaselinesRequest>) {
    if (router != nullptr) return router->ListBaselines(engine, *request, context);
  } else if constexpr (std::is_same_v<Request, v1::ListAlertsRequest>) {
    if (router != nullptr && request->run().empty()) return router->ListAlerts(engine, *request, context);
  } else if constexpr (std::is_same_v<Request, v1::CompareRunsRequest>) {
    const bool both_known = !places.run.uuid.empty() && !places.other.uuid.empty();
    if (router != nullptr && both_known && places.run.server != places.other.server) {
      return router->CompareRuns(engine, *request, places.run, places.other, context);
    }
  }
  if constexpr (requires { request->set_run(std::string()); }) {
    if (router != nullptr && !places.run.uuid.empty()) {
      // Of several runs of that name the one that was found.
      request->set_run(places.run.uuid);
      if constexpr (requires { request->set_baseline(std::string()); }) {
        if (!places.other.uuid.empty()) request->set_baseline(places.other.uuid);
      }
      if (!places.run.server.empty()) {
        return router->Call<Request, Response>(places.run.server, method, *request, *context.grant,
                                               context.deadline_monotonic_ns);
      }
    }
  }
  return (engine.*call)(*request, context);
}

// The call of the engine for this caller: checked, with its name as `by`, and
// in the audit.  In a cluster the server that serves the run makes it.
template <typename Request, typename Response>
absl::StatusOr<Response> CallFor(const QueryEngine& engine, const char* method, Request request,
                                 const CallContext& context,
                                 absl::StatusOr<Response> (QueryEngine::*call)(const Request&, const CallContext&)
                                     const) {
  const Grant* const grant = context.grant.get();
  if (grant == nullptr) return (engine.*call)(request, context);
  std::string run, other;
  if constexpr (requires { request.run(); }) run = request.run();
  if constexpr (requires { request.baseline(); }) other = request.baseline();
  absl::StatusOr<CallPlaces> places = PlaceCall(engine, grant, method, run, other, context.deadline_monotonic_ns);
  if (!places.ok()) return places.status();
  // The identity's name, not the one that was claimed, which the audit keeps.
  std::string detail;
  if constexpr (requires { request.set_by(std::string()); }) {
    if (!grant->who().empty()) {
      if (request.by() != grant->who()) detail = "as " + request.by();
      request.set_by(grant->who());
    }
  }
  absl::StatusOr<Response> response = AnswerFrom(engine, method, &request, context, *places, call);
  // The run may have moved a moment ago: it was not found, or its server did
  // not answer.  A change without an answer may have been made, so it is not
  // asked for again.
  const bool changes = RuleOf(method).changes;
  if (places->router != nullptr && !run.empty() &&
      (absl::IsNotFound(response.status()) || (!changes && absl::IsUnavailable(response.status())))) {
    places->router->Forget(run);
    if (!other.empty()) places->router->Forget(other);
    const absl::StatusOr<CallPlaces> now = PlaceCall(engine, grant, method, run, other, context.deadline_monotonic_ns);
    const bool moved = now.ok() && (now->run.server != places->run.server || now->other.server != places->other.server);
    if (moved) {
      response = AnswerFrom(engine, method, &request, context, *now, call);
    }
  }
  if constexpr (requires { request.id(); }) detail += (detail.empty() ? "" : ", ") + request.id();
  if constexpr (requires { request.key(); }) detail += (detail.empty() ? "" : ", ") + request.key();
  if constexpr (requires { request.undo(); }) detail += request.undo() ? ", undo" : "";
  grant->Note(method, run, response.status(), changes, detail);
  return response;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_CALL_ACCESS_H_
