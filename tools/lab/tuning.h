// tuning.h: how far the thresholds were fitted to the runs that they are scored
// on.
//
// Six thresholds move on a coarse grid, one after the other and again until
// none moves any more, to the least mean cost over the runs.  That is done once
// over all runs, and once for each run without it.  What is chosen without a
// run and scored on it is honest.  The difference to the first is what tuning
// flatters.
//
// Cost of a run:
//   fails            1 - min(lead, 3000) / 3000, or 2 if not warned in time;
//                    and 0.5 if it is lost to rounding (has a t_sigma) and was
//                    not critical before
//   quiet            1 for each false warning, 5 for each critical
//   neither          1 if it was not warned of; drifting: 5 for each critical

#ifndef BELLWETHER_TOOLS_LAB_TUNING_H_
#define BELLWETHER_TOOLS_LAB_TUNING_H_

#include <string>
#include <vector>

#include "server/detect/judge_options.h"
#include "tools/lab/run_set.h"

namespace bellwether::server {

struct Knob {
  const char* name;
  double& (*field)(JudgeOptions*);
  std::vector<double> values;  // To try besides the one that it has.
};
const std::vector<Knob>& TuningKnobs();

double CostOf(const RunScore& score);

struct Tuning {
  struct Fold {
    std::vector<double> values;  // By knob: the best without this run.
    RunScore before, after;      // With the thresholds given, and with those.
  };
  std::vector<double> given, best;                          // By knob; best: on all runs.
  double given_cost = 0, best_cost = 0, left_out_cost = 0;  // Means over runs.
  std::vector<Fold> folds;                                  // By run.
};

// `runs` has at least one.  Seconds to minutes: some hundred times all runs.
Tuning Tune(const RunSet& runs, const JudgeOptions& options, const Progress& progress);

std::string ToTable(const Tuning& tuning);  // Markdown.

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_TUNING_H_
