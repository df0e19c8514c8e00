// synthetic_scorecard.h: how often the judge is wrong about runs in which
// nothing happens, over as many steps as it takes to say so.

#ifndef BELLWETHER_TOOLS_LAB_SYNTHETIC_SCORECARD_H_
#define BELLWETHER_TOOLS_LAB_SYNTHETIC_SCORECARD_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/lab/scorecard.h"
#include "tools/lab/synthetic_run.h"

namespace bellwether::server {

struct SyntheticSet {
  int64_t runs = 5;      // Of each kind; every second one reports the key-gradient leak.
  SyntheticOptions run;  // Kind, key_leak are set for each; seed, seed + 1, ... of a kind's runs.
  JudgeOptions judge;
  Progress progress;
};

// Of all runs of a kind.
struct SyntheticScore {
  SyntheticKind kind = SyntheticKind::kAsRecorded;
  int64_t runs = 0, run_steps = 0;
  int64_t warnings = 0, criticals = 0;                                     // All of them wrong.
  std::map<std::string, int64_t> warned_by, warned_rules, critical_rules;  // As RunScore.
  double judge_seconds = 0;
};

std::vector<SyntheticScore> ScoreSynthetic(const SyntheticSet& set);

std::string ToTable(const std::vector<SyntheticScore>& scores);      // Markdown.
std::string ToJsonLines(const std::vector<SyntheticScore>& scores);  // One object a kind, then the bars.

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_SYNTHETIC_SCORECARD_H_
