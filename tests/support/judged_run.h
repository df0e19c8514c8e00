// judged_run.h: a recorded run, judged from its first step to its last.

#ifndef BELLWETHER_TESTS_SUPPORT_JUDGED_RUN_H_
#define BELLWETHER_TESTS_SUPPORT_JUDGED_RUN_H_

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"
#include "tests/support/recorded_run.h"

namespace bellwether::server {

// What labels.json says; -1 = it never happened.
struct RunLabel {
  std::string name, family;
  int64_t steps = 0, t_sigma = -1, t_loss = -1;
  std::vector<Head> heads;
};

inline std::vector<RunLabel> ReadLabels(const std::string& path) {
  std::ifstream file(path);
  std::vector<RunLabel> labels;
  if (!file) return labels;
  const auto step_of = [](const nlohmann::json& value) { return value.is_null() ? -1 : value.get<int64_t>(); };
  const nlohmann::json all = nlohmann::json::parse(file);
  for (const auto& [name, entry] : all.items()) {
    RunLabel& label = labels.emplace_back();
    label.name = name;
    label.family = entry["family"];
    label.steps = entry["steps"];
    label.t_sigma = step_of(entry["t_sigma"]);
    label.t_loss = step_of(entry["t_loss"]);
    for (const auto& head : entry["heads"]) label.heads.push_back({head[0], head[1]});
  }
  return labels;
}

struct Verdict {
  std::vector<AlertTransition> transitions;
  int64_t first_warning = -1, first_critical = -1;  // Steps; -1 = never.
  AlertTransition warning, critical;                // The first of each.
  int warnings = 0;                                 // Alerts that reached warning.
  // RunJudge::eta() at each sample of the heads.
  std::vector<std::pair<int64_t, Eta>> etas;
};

inline void Note(Verdict* verdict, size_t from) {
  for (size_t i = from; i < verdict->transitions.size(); ++i) {
    const AlertTransition& t = verdict->transitions[i];
    if (t.state != AlertState::kFiring) continue;
    if (t.severity >= Severity::kWarning) {
      bool before = false;
      for (size_t j = 0; j < i; ++j) {
        const AlertTransition& earlier = verdict->transitions[j];
        before |= earlier.key == t.key && earlier.severity >= Severity::kWarning;
      }
      if (!before) ++verdict->warnings;
      if (verdict->first_warning < 0) {
        verdict->first_warning = t.step;
        verdict->warning = t;
      }
    }
    if (t.severity >= Severity::kCritical && verdict->first_critical < 0) {
      verdict->first_critical = t.step;
      verdict->critical = t;
    }
  }
}

inline Verdict Judge(const RecordedRun& run, const JudgeOptions& options = {}) {
  Verdict verdict;
  RunJudge judge(options, run.description);
  for (const RecordedItem& item : run.items) {
    const size_t before = verdict.transitions.size();
    if (item.is_event) {
      judge.OnEvent(item.event, &verdict.transitions);
    } else {
      judge.Observe(item.sample, &verdict.transitions);
      if (item.sample.has(SignalId::kWqSigma)) verdict.etas.emplace_back(item.sample.step, judge.eta());
    }
    Note(&verdict, before);
  }
  return verdict;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_JUDGED_RUN_H_
