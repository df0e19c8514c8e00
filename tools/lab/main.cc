// bellwether-lab: how good the detectors are, measured without a server.  Run by `bellwether scorecard`.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/detect/judge_options.h"
#include "server/detect/rules_file.h"
#include "server/detect/thresholds.h"
#include "server/util/status_macros.h"
#include "tools/lab/ablation.h"
#include "tools/lab/bars.h"
#include "tools/lab/run_set.h"
#include "tools/lab/scorecard.h"
#include "tools/lab/scorecard_text.h"
#include "tools/lab/synthetic_scorecard.h"
#include "tools/lab/tuning.h"

namespace bellwether::server {
namespace {

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr int kFindings = 3;
constexpr size_t kBarWidth = 30;

struct Command {
  std::string folder, labels;  // As OpenRunFolder; not for synthetic.
  std::string rules;           // A file; "" = what is built in.
  JudgeOptions judge;
  bool json = false;  // Not for ablate and tune; nor is bars.
  bool bars = false;  // A bar that is missed is a failure.
  // At most one of these; none: the scorecard itself.
  bool ablate = false, tune = false, synthetic = false;
  int64_t synthetic_runs = 5;  // Of each kind, 25,000 steps each; 1..10000.
  uint64_t seed = 1;           // Of the first of each kind.
};

// A bar that is drawn over itself; nothing where standard error is no terminal.
Progress ProgressBar(const std::string& what) {
  if (isatty(STDERR_FILENO) == 0) return nullptr;
  return [what](size_t done, size_t of) {
    const size_t full = of == 0 ? kBarWidth : done * kBarWidth / of;
    std::fprintf(stderr, "\r[%s%s] %zu of %zu %s%s", std::string(full, '#').c_str(),
                 std::string(kBarWidth - full, ' ').c_str(), done, of, what.c_str(), done == of ? "\n" : "");
  };
}

void Print(const std::string& text) { std::fputs(text.c_str(), stdout); }

absl::Status Tell(const std::vector<std::string>& failures) {
  if (failures.empty()) return absl::OkStatus();
  for (const std::string& failure : failures) std::fprintf(stderr, "%s\n", failure.c_str());
  return absl::DataLossError(absl::StrCat(failures.size(), " recordings could not be read and are not scored"));
}

// FAILED_PRECONDITION: a bar is missed, where that is asked for.
absl::Status Hold(const Command& command, const std::vector<Bar>& bars) {
  if (!command.bars || !AnyMissed(bars)) return absl::OkStatus();
  return absl::FailedPreconditionError("a bar is missed");
}

// DATA_LOSS: all is printed, but files could not be read, each of which is named.
absl::Status Run(const Command& command) {
  if (command.synthetic) {
    const auto scores = ScoreSynthetic({.runs = command.synthetic_runs,
                                        .run = {.seed = command.seed},
                                        .judge = command.judge,
                                        .progress = ProgressBar("synthetic runs")});
    const std::vector<Bar> bars = BarsOf(scores);
    Print(command.json ? ToJsonLines(scores) : ToTable(scores));
    return Hold(command, bars);
  }
  if (command.ablate || command.tune) {
    BW_ASSIGN_OR_RETURN(const RunSet runs,
                        RunSet::Read(command.folder, command.labels, ProgressBar("recordings read")));
    if (runs.size() > 0) {
      Print(command.ablate ? ToTable(Ablate(runs, command.judge, ProgressBar("sets of tests")))
                           : ToTable(Tune(runs, command.judge, ProgressBar("searches"))));
    }
    return Tell(runs.failures());
  }
  BW_ASSIGN_OR_RETURN(const Scorecard card, ScoreRuns({.folder = command.folder,
                                                       .labels = command.labels,
                                                       .judge = command.judge,
                                                       .progress = ProgressBar("runs")}));
  const ScorecardTotals totals = AddUp(card.scores);
  const std::vector<Bar> bars = BarsOf(card.scores);
  Print(command.json ? ToJsonLines(card, totals) : ToTable(card, totals));
  if (!command.json && card.of_benchmark > 0) {
    Print(absl::StrCat("\n", card.of_benchmark,
                       " runs of the benchmark have their truths beside them.  Its bars: "
                       "python -m instabilities score ",
                       command.folder, "\n"));
  }
  if (!command.json) Print("\nBars of made-up runs: bellwether scorecard --synthetic\n");
  BW_RETURN_IF_ERROR(Tell(card.failures));
  return Hold(command, bars);
}

void AddScorecard(CLI::App* app, Command* command) {
  CLI::App* const scorecard =
      app->add_subcommand("scorecard", "how early and how rightly the detectors warn, over recorded runs");
  scorecard->add_option("dir", command->folder, "the folder of .bwrun files; not for --synthetic");
  scorecard->add_option("--labels", command->labels,
                        "what became of the runs [labels.json in the folder, else found in the runs]");
  scorecard->add_option("--rules", command->rules, "judge by this rules file [what is built in]");
  const std::string names = absl::StrJoin(BuiltinNames(), ", ");
  scorecard
      ->add_option_function<std::vector<std::string>>(
          "--without",
          [command, names](const std::vector<std::string>& given) {
            for (const std::string& name : given) {
              const auto test = BuiltinNamed(name);
              if (!test) throw CLI::ValidationError("--without", "\"" + name + "\": must be one of " + names);
              command->judge.off.Add(*test);
            }
          },
          "switch a rule or test off; may be repeated: " + names)
      ->allow_extra_args(false);
  auto* const json =
      scorecard->add_flag("--json", command->json, "one JSON object a line per run, then one for the set");
  auto* const bars = scorecard->add_flag("--bars", command->bars, "exit with 1 if a bar is missed");
  auto* const ablate = scorecard->add_flag("--ablate", command->ablate, "what each test is worth: the runs without it");
  auto* const tune = scorecard->add_flag("--tune", command->tune,
                                         "what tuning wins on all runs, and on runs that it did not see (minutes)");
  auto* const synthetic = scorecard->add_flag("--synthetic", command->synthetic,
                                              "false alarms in made-up healthy runs of 1,024 heads (minutes)");
  ablate->excludes(tune)->excludes(synthetic)->excludes(json)->excludes(bars);
  tune->excludes(synthetic)->excludes(json)->excludes(bars);
  scorecard->add_option("--runs", command->synthetic_runs, "synthetic runs of each kind, 25,000 steps each")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str()
      ->needs(synthetic);
  scorecard->add_option("--seed", command->seed, "of the first synthetic run of each kind")
      ->capture_default_str()
      ->needs(synthetic);
  scorecard->callback([command] {
    if (command->synthetic == command->folder.empty()) return;
    throw CLI::ValidationError("dir", command->synthetic ? "is not for --synthetic" : "is required");
  });
}

int Fail(const absl::Status& why, int code) {
  std::fprintf(stderr, "%s\n", std::string(why.message()).c_str());
  return code;
}

int Main(int argc, char** argv) {
  Command command;
  CLI::App app("Measures the detectors of bellwetherd on recorded and made-up runs, without a server.");
  app.require_subcommand(1);
  app.set_version_flag("--version", "bellwether-lab " BELLWETHER_VERSION);
  AddScorecard(&app, &command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kUsage;
  }
  if (!command.rules.empty()) {
    const auto rules = ReadRules(command.rules);
    if (!rules.ok()) return Fail(rules.status(), absl::IsInvalidArgument(rules.status()) ? kFindings : kFailed);
    const BuiltinSet without = command.judge.off;
    command.judge = (*rules)->options;
    command.judge.off.bits |= without.bits;
  }
  const absl::Status done = Run(command);
  return done.ok() ? kOk : Fail(done, kFailed);
}

}  // namespace
}  // namespace bellwether::server

int main(int argc, char** argv) { return bellwether::server::Main(argc, argv); }
