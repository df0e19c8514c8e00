#include "server/commands/command_result.h"

#include <cstdio>
#include <string>

namespace bellwether::server {

int Report(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.code() == absl::StatusCode::kInvalidArgument ? kCommandFindings : kCommandFailed;
}

}  // namespace bellwether::server
