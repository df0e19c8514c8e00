// scorecard_command.h: `bellwetherd scorecard` in its four forms.

#ifndef BELLWETHER_TOOLS_LAB_SCORECARD_COMMAND_H_
#define BELLWETHER_TOOLS_LAB_SCORECARD_COMMAND_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "server/detect/judge_options.h"

namespace bellwether::server {

struct ScorecardCommand {
  std::string folder, labels;  // As OpenRunFolder; not for synthetic.
  JudgeOptions judge;
  bool json = false;  // Not for ablate and tune.
  // At most one of these; none: the scorecard itself.
  bool ablate = false, tune = false, synthetic = false;
  int64_t synthetic_runs = 5;  // Of each kind, 25,000 steps each; 1..10000.
  uint64_t seed = 1;           // Of the first of each kind.
};

// Prints to standard output, how far it is to standard error if that is a
// terminal, and there each file that cannot be read.  Errors as OpenRunFolder.
// DATA_LOSS: all is printed, but files could not be read.
absl::Status RunScorecard(const ScorecardCommand& command);

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_SCORECARD_COMMAND_H_
