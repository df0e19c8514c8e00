// ablation.h: what each test of the judge is worth on recorded runs.

#ifndef BELLWETHER_TOOLS_LAB_ABLATION_H_
#define BELLWETHER_TOOLS_LAB_ABLATION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"
#include "tools/lab/run_set.h"
#include "tools/lab/scorecard_text.h"

namespace bellwether::server {

struct Ablated {
  std::optional<Builtin> off;  // Nothing: all tests are on.
  ScorecardTotals totals;
  int64_t runs_changed = 0;  // Another first warning or critical, or another number of them.
};

// The runs with all of `options`' tests, then with one more of them off at a
// time.
std::vector<Ablated> Ablate(const RunSet& runs, const JudgeOptions& options, const Progress& progress);

// Markdown.  Tests that change no run share a line at the end.
std::string ToTable(const std::vector<Ablated>& rows);

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_ABLATION_H_
