#include "tools/lab/synthetic_scorecard.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "server/detect/finding.h"
#include "tools/lab/bars.h"
#include "tools/lab/scorecard_text.h"

namespace bellwether::server {
namespace {

std::string CausesText(const std::map<std::string, int64_t>& warned_by) {
  std::string text;
  for (const auto& [cause, count] : warned_by) absl::StrAppend(&text, text.empty() ? "" : ", ", cause, " ", count);
  return text.empty() ? "-" : text;
}

void Add(const RunScore& run, SyntheticScore* score) {
  ++score->runs;
  score->run_steps += run.truth.steps;
  score->warnings += run.warnings;
  score->criticals += run.criticals;
  score->judge_seconds += run.judge_seconds;
  for (const auto& [cause, count] : run.warned_by) score->warned_by[cause] += count;
  for (const auto& [rule, count] : run.warned_rules) score->warned_rules[rule] += count;
  for (const auto& [rule, count] : run.critical_rules) score->critical_rules[rule] += count;
}

SyntheticScore Sum(const std::vector<SyntheticScore>& scores) {
  SyntheticScore sum;
  for (const SyntheticScore& score : scores) {
    sum.runs += score.runs;
    sum.run_steps += score.run_steps;
    sum.warnings += score.warnings;
    sum.criticals += score.criticals;
    for (const auto& [cause, count] : score.warned_by) sum.warned_by[cause] += count;
    for (const auto& [rule, count] : score.warned_rules) sum.warned_rules[rule] += count;
    for (const auto& [rule, count] : score.critical_rules) sum.critical_rules[rule] += count;
  }
  return sum;
}

std::string Row(const std::string& name, const SyntheticScore& score) {
  return absl::StrCat("| ", name, " | ", score.runs, " | ", score.run_steps, " | ",
                      RateText(MakeRate(score.warnings, score.run_steps)), " | ", CausesText(score.warned_by), " | ",
                      RateText(MakeRate(score.criticals, score.run_steps)), " |\n");
}

// Rules by kinds: warnings, and how many of them became critical.
std::string RuleTable(std::vector<SyntheticScore> scores) {
  std::string text = "| rule |", line = "| --- |";
  for (const SyntheticScore& score : scores) {
    absl::StrAppend(&text, " ", NameOf(score.kind), " |");
    line += " --- |";
  }
  scores.push_back(Sum(scores));
  absl::StrAppend(&text, " all | per 1,000 run-steps (95 %) |\n", line, " --- | --- |\n");
  for (int i = 0; i < static_cast<int>(Rule::kUser); ++i) {
    const std::string rule = NameOf(static_cast<Rule>(i));
    const auto of = [&](const std::map<std::string, int64_t>& counts) {
      const auto found = counts.find(rule);
      return found == counts.end() ? 0 : found->second;
    };
    absl::StrAppend(&text, "| ", rule, " |");
    for (const SyntheticScore& score : scores) {
      const int64_t critical = of(score.critical_rules);
      absl::StrAppend(&text, " ", of(score.warned_rules), critical > 0 ? absl::StrCat(", critical ", critical) : "",
                      " |");
    }
    absl::StrAppend(&text, " ", RateText(MakeRate(of(scores.back().warned_rules), scores.back().run_steps)), " |\n");
  }
  return text;
}

}  // namespace

std::vector<SyntheticScore> ScoreSynthetic(const SyntheticSet& set) {
  static const RunLabel kHealthy = {.family = "healthy", .truth = {}};
  std::vector<SyntheticScore> scores;
  size_t done = 0;
  for (int kind = 0; kind < kSyntheticKinds; ++kind) {
    SyntheticScore& score = scores.emplace_back();
    score.kind = static_cast<SyntheticKind>(kind);
    for (int64_t run = 0; run < set.runs; ++run) {
      SyntheticOptions options = set.run;
      options.kind = score.kind;
      options.key_leak = run % 2 == 1;
      options.seed += static_cast<uint64_t>(run);
      const auto walk = [&](RunListener* listener) {
        WalkSyntheticRun(options, listener);
        return absl::OkStatus();
      };
      // What is made up cannot fail.
      Add(ScoreWalk(NameOf(score.kind), walk, &kHealthy, set.judge, false).value(), &score);
      if (set.progress) set.progress(++done, static_cast<size_t>(set.runs) * kSyntheticKinds);
    }
  }
  return scores;
}

std::string ToTable(const std::vector<SyntheticScore>& scores) {
  std::string text =
      "| kind | runs | run-steps | false warnings per 1,000 run-steps (95 %) | by | false criticals per 1,000 (95 %) "
      "|\n"
      "| --- | --- | --- | --- | --- | --- |\n";
  for (const SyntheticScore& score : scores) text += Row(NameOf(score.kind), score);
  return absl::StrCat(text, Row("all", Sum(scores)), "\n", RuleTable(scores), "\n", BarTable(BarsOf(scores)));
}

std::string ToJsonLines(const std::vector<SyntheticScore>& scores) {
  std::string text;
  for (const SyntheticScore& score : scores) {
    nlohmann::ordered_json json = {{"kind", NameOf(score.kind)},         {"runs", score.runs},
                                   {"run_steps", score.run_steps},       {"false_warnings", score.warnings},
                                   {"false_criticals", score.criticals}, {"warned_by", score.warned_by},
                                   {"warned_rules", score.warned_rules}, {"critical_rules", score.critical_rules}};
    absl::StrAppend(&text, json.dump(), "\n");
  }
  const nlohmann::ordered_json all = {{"kind", nullptr}, {"bars", BarsJson(BarsOf(scores))}};
  absl::StrAppend(&text, all.dump(), "\n");
  return text;
}

}  // namespace bellwether::server
