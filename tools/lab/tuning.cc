#include "tools/lab/tuning.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/lab/scorecard_text.h"

namespace bellwether::server {
namespace {

constexpr int64_t kLeadGoal = 3000;
constexpr double kMissed = 2, kNotCritical = 0.5, kFalseCritical = 5;
constexpr size_t kNone = static_cast<size_t>(-1);

class Tuner {
 public:
  Tuner(const RunSet& runs, const JudgeOptions& options) : runs_(runs), options_(options) {}

  std::vector<double> Given() {
    std::vector<double> values;
    for (const Knob& knob : TuningKnobs()) values.push_back(knob.field(&options_));
    return values;
  }

  // Of all runs, with those values of the knobs.
  const std::vector<RunScore>& Scores(const std::vector<double>& values) {
    const auto [at, is_new] = scores_.try_emplace(values);
    if (!is_new) return at->second;
    JudgeOptions options = options_;
    for (size_t i = 0; i < values.size(); ++i) TuningKnobs()[i].field(&options) = values[i];
    for (size_t run = 0; run < runs_.size(); ++run) at->second.push_back(runs_.Score(run, options));
    return at->second;
  }

  // The mean over all runs but `left_out`.
  double Cost(const std::vector<double>& values, size_t left_out) {
    const std::vector<RunScore>& scores = Scores(values);
    double sum = 0;
    size_t count = 0;
    for (size_t run = 0; run < scores.size(); ++run) {
      if (run == left_out) continue;
      sum += CostOf(scores[run]);
      ++count;
    }
    return count == 0 ? 0 : sum / static_cast<double>(count);
  }

  std::vector<double> Search(size_t left_out) {
    const std::vector<double> given = Given();
    std::vector<double> best = given;
    double least = Cost(best, left_out);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t i = 0; i < best.size(); ++i) {
        std::vector<double> values = TuningKnobs()[i].values;
        values.push_back(given[i]);
        for (const double value : values) {
          std::vector<double> tried = best;
          tried[i] = value;
          // What is no better moves nothing: the given thresholds have reasons.
          const double cost = Cost(tried, left_out);
          if (cost >= least - 1e-9) continue;
          least = cost;
          best = std::move(tried);
          moved = true;
        }
      }
    }
    return best;
  }

 private:
  const RunSet& runs_;
  JudgeOptions options_;
  std::map<std::vector<double>, std::vector<RunScore>> scores_;
};

// "drift.grown_factor 3, ties.fraction_min 0.2": where `values` are not `given`.
std::string Differences(const std::vector<double>& values, const std::vector<double>& given) {
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == given[i]) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ", TuningKnobs()[i].name, " ", values[i]);
  }
  return text.empty() ? "-" : text;
}

}  // namespace

const std::vector<Knob>& TuningKnobs() {
  static const std::vector<Knob> kKnobs = {
      {"drift.grown_factor", [](JudgeOptions* o) -> double& { return o->drift.grown_factor; }, {2, 3, 6, 8}},
      {"drift.level_factor", [](JudgeOptions* o) -> double& { return o->drift.level_factor; }, {4, 6, 12, 16}},
      {"drift.common_mode_large",
       [](JudgeOptions* o) -> double& { return o->drift.common_mode_large; },
       {25, 50, 200, 400}},
      {"ties.fraction_min", [](JudgeOptions* o) -> double& { return o->ties.fraction_min; }, {0.15, 0.2, 0.4, 0.5}},
      {"norm.rise_min", [](JudgeOptions* o) -> double& { return o->norm.rise_min; }, {1.2, 1.35, 2, 3}},
      {"trend.doubling_steps_max",
       [](JudgeOptions* o) -> double& { return o->trend.doubling_steps_max; },
       {1000, 1400, 2800, 4000}},
  };
  return kKnobs;
}

double CostOf(const RunScore& score) {
  const auto alarms =
      static_cast<double>(score.false_warnings()) + kFalseCritical * static_cast<double>(score.false_criticals());
  if (score.quiet()) return alarms;
  if (!score.fails()) return alarms + (score.first_warning < 0 ? 1 : 0);
  double cost = kMissed;
  if (score.lead() > 0) {
    cost = 1 - static_cast<double>(std::min(score.lead(), kLeadGoal)) / static_cast<double>(kLeadGoal);
  }
  if (score.truth.t_sigma >= 0 && score.critical_lead() == 0) cost += kNotCritical;
  return cost;
}

Tuning Tune(const RunSet& runs, const JudgeOptions& options, const Progress& progress) {
  Tuner tuner(runs, options);
  Tuning tuning;
  const size_t searches = runs.size() + 1;
  tuning.given = tuner.Given();
  tuning.best = tuner.Search(kNone);
  tuning.given_cost = tuner.Cost(tuning.given, kNone);
  tuning.best_cost = tuner.Cost(tuning.best, kNone);
  if (progress) progress(1, searches);
  for (size_t run = 0; run < runs.size(); ++run) {
    Tuning::Fold& fold = tuning.folds.emplace_back();
    fold.values = tuner.Search(run);
    fold.before = tuner.Scores(tuning.given)[run];
    fold.after = tuner.Scores(fold.values)[run];
    tuning.left_out_cost += CostOf(fold.after) / static_cast<double>(runs.size());
    if (progress) progress(run + 2, searches);
  }
  return tuning;
}

std::string ToTable(const Tuning& tuning) {
  std::string text =
      "| run left out | thresholds chosen without it | lead | was | first critical | was | cost | was |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const Tuning::Fold& fold : tuning.folds) {
    absl::StrAppend(&text, "| ", fold.before.run, " | ", Differences(fold.values, tuning.given), " | ",
                    fold.after.lead(), " | ", fold.before.lead(), " | ", StepText(fold.after.first_critical), " | ",
                    StepText(fold.before.first_critical), " | ", absl::StrFormat("%.2f", CostOf(fold.after)), " | ",
                    absl::StrFormat("%.2f", CostOf(fold.before)), " |\n");
  }
  absl::StrAppend(&text, "\n| | thresholds | mean cost of a run |\n| --- | --- | --- |\n| as given | - | ",
                  absl::StrFormat("%.3f", tuning.given_cost), " |\n| tuned on all runs | ",
                  Differences(tuning.best, tuning.given), " | ", absl::StrFormat("%.3f", tuning.best_cost),
                  " |\n| tuned without the run, scored on it | above | ", absl::StrFormat("%.3f", tuning.left_out_cost),
                  " |\n");
  return text;
}

}  // namespace bellwether::server
