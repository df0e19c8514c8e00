#include "tools/lab/synthetic_scorecard.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
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
}

SyntheticScore Sum(const std::vector<SyntheticScore>& scores) {
  SyntheticScore sum;
  for (const SyntheticScore& score : scores) {
    sum.runs += score.runs;
    sum.run_steps += score.run_steps;
    sum.warnings += score.warnings;
    sum.criticals += score.criticals;
    for (const auto& [cause, count] : score.warned_by) sum.warned_by[cause] += count;
  }
  return sum;
}

std::string Row(const std::string& name, const SyntheticScore& score) {
  return absl::StrCat("| ", name, " | ", score.runs, " | ", score.run_steps, " | ",
                      RateText(MakeRate(score.warnings, score.run_steps)), " | ", CausesText(score.warned_by), " | ",
                      RateText(MakeRate(score.criticals, score.run_steps)), " |\n");
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
  return text + Row("all", Sum(scores));
}

std::string ToJsonLines(const std::vector<SyntheticScore>& scores) {
  std::string text;
  for (const SyntheticScore& score : scores) {
    nlohmann::ordered_json json = {{"kind", NameOf(score.kind)},         {"runs", score.runs},
                                   {"run_steps", score.run_steps},       {"false_warnings", score.warnings},
                                   {"false_criticals", score.criticals}, {"warned_by", score.warned_by}};
    absl::StrAppend(&text, json.dump(), "\n");
  }
  return text;
}

}  // namespace bellwether::server
