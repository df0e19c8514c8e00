// policy_dry_run.h: what a policy would have done in a recorded run, and when.
//
// The run is judged and its alerts followed by the server's own code.  Every
// action counts as applied at the next step, by a trainer that allows all of
// them.  Its effect cannot be known.  The recording goes on as it was, so the
// verdicts are about a run that nothing helped or hurt.
//
// Pure functions of the recording; safe from any thread.

#ifndef BELLWETHER_SERVER_OFFLINE_POLICY_DRY_RUN_H_
#define BELLWETHER_SERVER_OFFLINE_POLICY_DRY_RUN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/act/policy.h"
#include "server/detect/judge_options.h"
#include "server/model/action.h"
#include "server/offline/recorded_run.h"

namespace bellwether::server {

struct DryRun {
  std::string run;
  PolicyMode mode = PolicyMode::kObserve;
  int64_t last_step = -1;
  int64_t alerts = 0;           // That opened.
  std::vector<Action> actions;  // Oldest first, with their histories.

  // Of the first action that was applied; -1: none was.
  int64_t first_applied_step() const;
};

// A proposal of mode propose is taken for approved at once.  INVALID_ARGUMENT:
// damaged or not a recording.
absl::StatusOr<DryRun> DryRunPolicy(const RunWalk& walk, const PolicyPtr& policy, const JudgeOptions& judge);

// Sentences, a line each.
std::string DryRunText(const DryRun& run);
// One object on a line.
std::string DryRunJson(const DryRun& run);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_POLICY_DRY_RUN_H_
