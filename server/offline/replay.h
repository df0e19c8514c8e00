// replay.h: judges a recorded run offline, with the server's own detectors.

#ifndef BELLWETHER_SERVER_OFFLINE_REPLAY_H_
#define BELLWETHER_SERVER_OFFLINE_REPLAY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/detect/detector_bank.h"
#include "server/detect/judge_options.h"

namespace bellwether::server {

struct ReplayOptions {
  std::string file;         // .bwrun
  bool headed = false;      // Sentences begin with a line that names the file.
  bool json = false;        // One object a line per transition; else sentences.
  int64_t until_step = -1;  // Stop after this step; -1 = to the end.
  JudgeOptions judge;
  DetectorBank* bank = nullptr;  // Null = the CPU's.
};

// Prints to standard output, and to standard error what the run was judged by if that is
// not all.  INVALID_ARGUMENT: damaged or not a recording.
absl::Status Replay(const ReplayOptions& options);

// `paths` with the *.bwrun of a folder in its place, by their names; one without
// any stays.
std::vector<std::string> RecordingsAt(const std::vector<std::string>& paths);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_REPLAY_H_
