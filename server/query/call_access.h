// call_access.h: what each call of service Query wants of its caller; the one
// place where that is said, for gRPC and JSON alike.

#ifndef BELLWETHER_SERVER_QUERY_CALL_ACCESS_H_
#define BELLWETHER_SERVER_QUERY_CALL_ACCESS_H_

#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/access/access.h"
#include "server/query/query_engine.h"

namespace bellwether::server {

struct CallRule {
  Role role = Role::kAdmin;  // Also of a call that nobody thought of.
  bool changes = true;       // Stands in the audit when it was done.
};
CallRule RuleOf(std::string_view method);

// Whether the caller may make the call about these runs, as he names them; ""
// = about none in particular, which lists only what he may see.  A run that he
// may not see and one that there is not are refused in the same words.
// PERMISSION_DENIED, UNAUTHENTICATED; both stand in the audit.
absl::Status CheckCall(const QueryEngine& engine, const Grant* grant, const char* method,
                       std::initializer_list<std::string_view> runs);

// The call of the engine for this caller: checked, with his name as `by`, and
// in the audit.
template <typename Request, typename Response>
absl::StatusOr<Response> CallFor(const QueryEngine& engine, const char* method, Request request,
                                 const CallContext& context,
                                 absl::StatusOr<Response> (QueryEngine::*call)(const Request&, const CallContext&)
                                     const) {
  const Grant* const grant = context.grant.get();
  if (grant == nullptr) return (engine.*call)(request, context);
  std::string_view run, other;
  if constexpr (requires { request.run(); }) run = request.run();
  if constexpr (requires { request.baseline(); }) other = request.baseline();
  if (absl::Status allowed = CheckCall(engine, grant, method, {run, other}); !allowed.ok()) return allowed;
  // The identity's name, not the one that was claimed, which the audit keeps.
  std::string detail;
  if constexpr (requires { request.set_by(std::string()); }) {
    if (!grant->who().empty()) {
      if (request.by() != grant->who()) detail = "as " + request.by();
      request.set_by(grant->who());
    }
  }
  absl::StatusOr<Response> response = (engine.*call)(request, context);
  if constexpr (requires { request.id(); }) detail += (detail.empty() ? "" : ", ") + request.id();
  if constexpr (requires { request.key(); }) detail += (detail.empty() ? "" : ", ") + request.key();
  grant->Note(method, run, response.status(), RuleOf(method).changes, detail);
  return response;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_CALL_ACCESS_H_
