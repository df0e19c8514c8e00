// Any address and any body of a JSON call are a request or an error; and tokens,
// cookies and hosts of any bytes are compared without harm.
//
// The input is lines: the first ones `key=value` of the address, what follows an
// empty line the body.

#include <google/protobuf/util/json_util.h>

#include <map>
#include <string>

#include "bellwether/v1/query.pb.h"
#include "server/http/access.h"
#include "server/http/gzip.h"
#include "server/http/json_gateway.h"
#include "tests/fuzz/fuzz.h"

namespace {

template <typename Request>
void Parse(const std::string& json) {
  Request request;
  if (!google::protobuf::util::JsonStringToMessage(json, &request).ok()) return;
  std::string back;
  (void)google::protobuf::util::MessageToJsonString(request, &back);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::multimap<std::string, std::string> parameters;
  while (!rest.empty() && rest.front() != '\n' && parameters.size() < 64) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    const size_t equals = std::min(line.find('='), line.size());
    parameters.emplace(line.substr(0, equals), line.substr(std::min(equals + 1, line.size())));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
  }
  const auto json = server::ParametersToJson(parameters);
  for (const std::string& body : {json.ok() ? *json : std::string(), std::string(rest)}) {
    Parse<v1::GetSeriesRequest>(body);
    Parse<v1::ListAlertsRequest>(body);
    Parse<v1::ProposeActionRequest>(body);
    (void)server::IsReadMethod(body);
  }
  if (!json.ok()) (void)server::ErrorJson(json.status());
  return 0;
}
