// command_result.h: how the commands that read people's files end.

#ifndef BELLWETHER_SERVER_COMMANDS_COMMAND_RESULT_H_
#define BELLWETHER_SERVER_COMMANDS_COMMAND_RESULT_H_

#include "absl/status/status.h"

namespace bellwether::server {

// Exit codes.
inline constexpr int kCommandOk = 0;
inline constexpr int kCommandFailed = 1;
inline constexpr int kCommandFindings = 3;  // In the file: all of them were told.

// Says on standard error what is wrong; the exit code.
int Report(const absl::Status& status);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_COMMANDS_COMMAND_RESULT_H_
