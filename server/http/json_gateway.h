// json_gateway.h: HTTP's side of the JSON calls.
//
// POST /api/v1/<Method> carries the request's JSON.  GET takes it from the
// address: ?run=llama&limit=10.  A parameter is a JSON string (which protobuf
// takes for numbers too), true and false are booleans, and what begins with {
// or [ is JSON itself; a parameter that comes twice is a list.

#ifndef BELLWETHER_SERVER_HTTP_JSON_GATEWAY_H_
#define BELLWETHER_SERVER_HTTP_JSON_GATEWAY_H_

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

// INVALID_ARGUMENT: a parameter that begins like JSON and is none.
absl::StatusOr<std::string> ParametersToJson(const std::multimap<std::string, std::string>& parameters);

// True for calls that change nothing: GET may make these only.
bool IsReadMethod(std::string_view method);

// As gRPC's transcoding: NOT_FOUND 404, INVALID_ARGUMENT 400, and so on.
int HttpStatus(absl::StatusCode code);

// {"code": "NOT_FOUND", "message": "..."}
std::string ErrorJson(const absl::Status& status);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_JSON_GATEWAY_H_
