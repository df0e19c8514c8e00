// run_set.h: recorded runs in memory, to be judged with many options.
//
// About 1 KiB a step, and 40 bytes a head and sampled step.  Const calls from
// any number of threads.

#ifndef BELLWETHER_TOOLS_LAB_RUN_SET_H_
#define BELLWETHER_TOOLS_LAB_RUN_SET_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/lab/scorecard.h"

namespace bellwether::server {

class RunSet {
 public:
  // Errors as OpenRunFolder.
  static absl::StatusOr<RunSet> Read(const std::string& folder, const std::string& labels, const Progress& progress);
  RunSet(RunSet&&) noexcept;
  RunSet& operator=(RunSet&&) noexcept;
  ~RunSet();

  size_t size() const;
  // Files that could not be read, as in Scorecard.
  const std::vector<std::string>& failures() const { return failures_; }
  // Without the rules of others.
  RunScore Score(size_t run, const JudgeOptions& options) const;

 private:
  struct Kept;
  RunSet();

  std::vector<std::unique_ptr<Kept>> runs_;
  std::vector<std::string> failures_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_RUN_SET_H_
