// json_api.h: Query's unary calls as JSON, and the JSON of a transition.
//
// The mapping is protobuf's, with the field names as in the .proto files
// (snake_case; camelCase is taken too).  Every field is present.  64-bit
// integers are strings, enums are names, bytes are base64.  "NaN", "Infinity"
// and "-Infinity" are strings.

#ifndef BELLWETHER_SERVER_QUERY_JSON_API_H_
#define BELLWETHER_SERVER_QUERY_JSON_API_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/alert_transition.h"
#include "server/query/query_engine.h"

namespace bellwether::server {

// Calls the method of service Query by its name ("GetRun"); an empty body is an
// empty request.  Thread-safe.
//
// UNIMPLEMENTED: no such method, or a streaming one.  INVALID_ARGUMENT: the
// body is not the request's JSON; unknown fields are refused.
// PERMISSION_DENIED, UNAUTHENTICATED: as CheckCall().  CANCELLED: `cancelled`
// returned true, so no reader waits; null = never.  Else as the engine answers.
//
// Null `grant`: no caller is asked for an identity.  `*memory` is the answer's
// share of the memory of queries.  Keep it until the answer is sent; null = it
// is given back at once.
absl::StatusOr<std::string> CallJson(const QueryEngine& engine, std::string_view method, std::string_view body,
                                     GrantPtr grant = nullptr, std::function<bool()> cancelled = nullptr,
                                     std::shared_ptr<const void>* memory = nullptr);

// Names that CallJson knows, in alphabetical order.
std::vector<std::string_view> JsonMethods();

// One line, without its newline:
//   {"run","step","state":"firing|resolved","severity":"info|warning|critical",
//    "stage","layer","head","heads":[[layer,head],...],"eta_steps",
//    "eta_lower_steps","eta_upper_steps","eta_seconds",
//    "evidence":{signal: value,...},"rule","key","k","first_step","summary",
//    "cause","heads_total","advice","tensors":[name,...],
//    "experts":[[layer,expert],...],"ranks":[...],"modules":[name,...],
//    "sequences"}
// layer and head are 0-based and null if there is none, what begins with eta_ is
// null if unknown, heads are strongest first, and a value that is not finite is null.
// Of several pieces of evidence on one signal the first, the strongest, counts.
// The places from "tensors" on are those of alert_places.h; "sequences" is null
// if none is named.
// `run_uuid`: of its run, which keeps it when it is renamed; "" = it is left out.
std::string TransitionToJson(const AlertTransition& transition, const std::string& run_uuid = "");

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_JSON_API_H_
