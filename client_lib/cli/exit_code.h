// exit_code.h: what the exit code of `bellwether` says.

#ifndef BELLWETHER_CLI_EXIT_CODE_H_
#define BELLWETHER_CLI_EXIT_CODE_H_

namespace bellwether::cli {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,       // Negative or failed: no such run, damaged file, ...
  kUsage = 2,        // The command line, or a value in it, is not legal.
  kFindings = 3,     // Lint, or alerts firing with --exit-code.
  kUnreachable = 4,  // No server answers.
  kDenied = 5,       // It answers, but not to us.
};

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_EXIT_CODE_H_
