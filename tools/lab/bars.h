// bars.h: what a scorecard is held to, and whether it gets there.
//
// Of injected faults and slow ones instabilities/bars.py says so, which takes what is said here from the JSON.

#ifndef BELLWETHER_TOOLS_LAB_BARS_H_
#define BELLWETHER_TOOLS_LAB_BARS_H_

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/lab/scorecard.h"
#include "tools/lab/synthetic_scorecard.h"

namespace bellwether::server {

struct Bar {
  std::string name;
  std::optional<double> figure = {};  // Empty: no such runs, so it is not judged.
  double limit = 0;
  bool at_least = true;             // Else at most.
  std::optional<double> goal = {};  // Beyond the limit; what is aimed at.
  bool met() const { return figure && (at_least ? *figure >= limit : *figure <= limit); }
};

// Of labelled recordings.
std::vector<Bar> BarsOf(const std::vector<RunScore>& scores);
// Of synthetic runs: of all kinds, and of each.
std::vector<Bar> BarsOf(const std::vector<SyntheticScore>& scores);

bool AnyMissed(const std::vector<Bar>& bars);
// Markdown: the figure, the bar, and met, missed or not judged.
std::string BarTable(const std::vector<Bar>& bars);
// [{"bar", "figure", "limit", "at_least", "goal", "met"}, ...]; of what is not judged figure and met are null.
nlohmann::ordered_json BarsJson(const std::vector<Bar>& bars);

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_BARS_H_
