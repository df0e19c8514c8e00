#include "server/commands/command_result.h"

#include <algorithm>
#include <cstdio>
#include <string>

namespace bellwether::server {

int Report(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.code() == absl::StatusCode::kInvalidArgument ? kCommandFindings : kCommandFailed;
}

int ForEachFile(const std::vector<std::string>& files, const std::string& what,
                const std::function<absl::Status(const std::string& file)>& work) {
  int code = kCommandOk;
  size_t bad = 0;
  for (const std::string& file : files) {
    const absl::Status done = work(file);
    std::fflush(stdout);  // What follows on standard error is behind it.
    if (done.ok()) continue;
    ++bad;
    code = std::max(code, Report(done));
  }
  if (bad > 0 && files.size() > 1) std::fprintf(stderr, "%zu of %zu files %s\n", bad, files.size(), what.c_str());
  return code;
}

}  // namespace bellwether::server
