// command_result.h: how the commands that read people's files end.

#ifndef BELLWETHER_SERVER_COMMANDS_COMMAND_RESULT_H_
#define BELLWETHER_SERVER_COMMANDS_COMMAND_RESULT_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace bellwether::server {

// Exit codes.
inline constexpr int kCommandOk = 0;
inline constexpr int kCommandFailed = 1;
inline constexpr int kCommandFindings = 3;  // In the file: all of them were told.

// Says on standard error what is wrong; the exit code.
int Report(const absl::Status& status);

// Calls `work` for each file: one that is bad is reported and not in the way of
// the others.  The worst exit code.  Of several the bad ones are counted at the
// end, on standard error, as `what` ("are no good rules").
int ForEachFile(const std::vector<std::string>& files, const std::string& what,
                const std::function<absl::Status(const std::string& file)>& work);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_COMMANDS_COMMAND_RESULT_H_
