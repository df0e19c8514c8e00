#include "server/http/json_gateway.h"

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace bellwether::server {
namespace {

absl::StatusOr<nlohmann::json> ToValue(const std::string& name, const std::string& text) {
  if (text == "true") return nlohmann::json(true);
  if (text == "false") return nlohmann::json(false);
  if (text.empty() || (text.front() != '{' && text.front() != '[')) return nlohmann::json(text);
  nlohmann::json value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) return absl::InvalidArgumentError(absl::StrCat("parameter ", name, ": not JSON"));
  return value;
}

}  // namespace

absl::StatusOr<std::string> ParametersToJson(const std::multimap<std::string, std::string>& parameters) {
  nlohmann::json object = nlohmann::json::object();
  for (auto it = parameters.begin(); it != parameters.end();) {
    const auto end = parameters.upper_bound(it->first);
    const std::string& name = it->first;
    const bool is_list = std::next(it) != end;
    for (; it != end; ++it) {
      absl::StatusOr<nlohmann::json> value = ToValue(name, it->second);
      if (!value.ok()) return value.status();
      if (is_list) {
        object[name].push_back(*std::move(value));
      } else {
        object[name] = *std::move(value);
      }
    }
  }
  // Bytes that are no UTF-8 become U+FFFD: the call refuses them by name.
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

bool IsReadMethod(std::string_view method) {
  const absl::string_view name(method.data(), method.size());
  return absl::StartsWith(name, "Get") || absl::StartsWith(name, "List") || name == "TopHeads" || name == "CompareRuns";
}

int HttpStatus(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
      return 409;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kUnimplemented:
      return 501;
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

std::string ErrorJson(const absl::Status& status) {
  const nlohmann::json error = {{"code", absl::StatusCodeToString(status.code())},
                                {"message", std::string(status.message())}};
  return error.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace bellwether::server
