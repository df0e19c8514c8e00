#include "tools/lab/bars.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/median.h"
#include "tools/lab/scorecard_text.h"

namespace bellwether::server {
namespace {

// A run that fails before it has no room for a lead of 500: half of its life is asked for.
constexpr int64_t kShortLife = 1500;

constexpr double kLeadLeast = 500, kLeadGoal = 1000;
constexpr double kLeadMedian = 2000, kLeadMedianGoal = 3000;
constexpr double kLifeShare = 0.5;
constexpr double kWarningsPer1000 = 0.1;

bool IsRounding(const RunScore& score) {
  return score.fails() && (score.family == "rounding" || score.family == "rounding-rescued");
}

std::optional<double> Least(const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  return *std::min_element(values.begin(), values.end());
}

// As many digits as tell it from its limit.
std::string Number(double value) {
  return value >= 100 ? absl::StrFormat("%.0f", value) : absl::StrFormat("%.3g", value);
}

Bar WarningsBar(const std::string& of, int64_t warnings, int64_t steps) {
  Bar bar{.name = absl::StrCat(of, ": false warnings per 1,000 steps, all families together"),
          .limit = kWarningsPer1000,
          .at_least = false};
  if (steps > 0) bar.figure = MakeRate(warnings, steps).value;
  return bar;
}

Bar CriticalsBar(const std::string& of, int64_t criticals, int64_t steps) {
  Bar bar{.name = absl::StrCat(of, ": false criticals"), .limit = 0, .at_least = false};
  if (steps > 0) bar.figure = static_cast<double>(criticals);
  return bar;
}

}  // namespace

std::vector<Bar> BarsOf(const std::vector<RunScore>& scores) {
  std::vector<double> leads, shares;
  int64_t warnings = 0, criticals = 0, steps = 0;
  for (const RunScore& score : scores) {
    if (IsRounding(score)) {
      const auto lead = static_cast<double>(score.lead());
      if (score.failed_at() < kShortLife) {
        shares.push_back(lead / static_cast<double>(std::max<int64_t>(score.failed_at(), 1)));
      } else {
        leads.push_back(lead);
      }
    }
    if (!score.quiet()) continue;
    warnings += score.false_warnings();
    criticals += score.false_criticals();
    steps += score.truth.steps;
  }
  const std::optional<double> median = leads.empty() ? std::nullopt : std::optional(MedianOr(0, leads));
  return {
      {.name = "rounding runs: least lead, steps", .figure = Least(leads), .limit = kLeadLeast, .goal = kLeadGoal},
      {.name = "rounding runs: median lead, steps", .figure = median, .limit = kLeadMedian, .goal = kLeadMedianGoal},
      {.name = absl::StrCat("rounding runs that fail before step ", kShortLife, ": least lead over their life"),
       .figure = Least(shares),
       .limit = kLifeShare,
       .goal = std::nullopt},
      WarningsBar("quiet recordings", warnings, steps),
      CriticalsBar("quiet recordings", criticals, steps),
  };
}

std::vector<Bar> BarsOf(const std::vector<SyntheticScore>& scores) {
  std::vector<Bar> bars;
  int64_t warnings = 0, criticals = 0, steps = 0;
  for (const SyntheticScore& score : scores) {
    warnings += score.warnings;
    criticals += score.criticals;
    steps += score.run_steps;
    bars.push_back(WarningsBar(absl::StrCat("synthetic, ", NameOf(score.kind)), score.warnings, score.run_steps));
  }
  bars.push_back(WarningsBar("synthetic, all", warnings, steps));
  bars.push_back(CriticalsBar("synthetic, all", criticals, steps));
  return bars;
}

bool AnyMissed(const std::vector<Bar>& bars) {
  return std::any_of(bars.begin(), bars.end(), [](const Bar& bar) { return bar.figure && !bar.met(); });
}

std::string BarTable(const std::vector<Bar>& bars) {
  std::string text = "| what | figure | bar | |\n| --- | --- | --- | --- |\n";
  for (const Bar& bar : bars) {
    absl::StrAppend(&text, "| ", bar.name, " | ", bar.figure ? Number(*bar.figure) : "-", " | at ",
                    bar.at_least ? "least " : "most ", Number(bar.limit),
                    bar.goal ? absl::StrCat(", goal ", Number(*bar.goal)) : "", " | ",
                    !bar.figure ? "not judged: no such runs"
                    : bar.met() ? "met"
                                : "missed",
                    " |\n");
  }
  return text;
}

nlohmann::ordered_json BarsJson(const std::vector<Bar>& bars) {
  using Json = nlohmann::ordered_json;
  Json all = Json::array();
  for (const Bar& bar : bars) {
    all.push_back({{"bar", bar.name},
                   {"figure", bar.figure ? Json(*bar.figure) : Json(nullptr)},
                   {"limit", bar.limit},
                   {"at_least", bar.at_least},
                   {"goal", bar.goal ? Json(*bar.goal) : Json(nullptr)},
                   {"met", bar.figure ? Json(bar.met()) : Json(nullptr)}});
  }
  return all;
}

}  // namespace bellwether::server
