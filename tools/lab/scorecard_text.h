// scorecard_text.h: a scorecard as a table and as JSON, and what it adds up to.

#ifndef BELLWETHER_TOOLS_LAB_SCORECARD_TEXT_H_
#define BELLWETHER_TOOLS_LAB_SCORECARD_TEXT_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/lab/scorecard.h"

namespace bellwether::server {

// A rate per 1,000 steps with its 95 % interval (exact, of a Poisson count).
struct Rate {
  int64_t count = 0, steps = 0;
  double value = 0, lower = 0, upper = 0;  // NaN without steps.
};
Rate MakeRate(int64_t count, int64_t steps);

struct RuleTotals {
  std::string rule;                         // "bellwether", or a peer's.
  int64_t failing = 0, warned_in_time = 0;  // Runs; in time = before failed_at().
  int64_t quiet = 0, quiet_warned = 0;      // Runs.
  std::optional<double> median_lead;        // Steps from the warning to failed_at(), of those.
  Rate false_warnings;                      // Over the quiet runs.
  double ns_per_step = 0;
};

struct ScorecardTotals {
  std::vector<RuleTotals> rules;  // Ours first.
  // Of ours, over all failing runs; a lead of 0 is too late.
  double mean_lead = 0, mean_critical_lead = 0;
  int64_t critical_in_time = 0;
  // Runs of a failure with known heads: how many have one of them among the
  // first and the first three named heads, and the layer right.
  int64_t with_heads = 0, first_right = 0, first_three_right = 0, layer_right = 0;
  int64_t etas_known = 0, etas_within_35_percent = 0, etas_asked = 0;
  int64_t false_criticals = 0;
  Rate false_criticals_rate;
  double ns_per_value = 0;
};
ScorecardTotals AddUp(const std::vector<RunScore>& scores);

// "0.010 (0.000 to 0.056)"
std::string RateText(const Rate& rate);

// Markdown, readable in a terminal.
std::string ToTable(const Scorecard& card, const ScorecardTotals& totals);
// One object a line: every run, then one with "run": null for the set.
std::string ToJsonLines(const Scorecard& card, const ScorecardTotals& totals);

std::string StepText(int64_t step);  // "-" where a step is unknown, which is negative.

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_SCORECARD_TEXT_H_
