#include "tools/lab/scorecard_command.h"

#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"
#include "tools/lab/ablation.h"
#include "tools/lab/run_set.h"
#include "tools/lab/scorecard.h"
#include "tools/lab/scorecard_text.h"
#include "tools/lab/synthetic_scorecard.h"
#include "tools/lab/tuning.h"

namespace bellwether::server {
namespace {

constexpr size_t kBarWidth = 30;

// A bar that is drawn over itself; nothing if nobody watches.
Progress Bar(const std::string& what) {
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

}  // namespace

absl::Status RunScorecard(const ScorecardCommand& command) {
  if (command.synthetic) {
    const auto scores = ScoreSynthetic({.runs = command.synthetic_runs,
                                        .run = {.seed = command.seed},
                                        .judge = command.judge,
                                        .progress = Bar("synthetic runs")});
    Print(command.json ? ToJsonLines(scores) : ToTable(scores));
    return absl::OkStatus();
  }
  if (command.ablate || command.tune) {
    BW_ASSIGN_OR_RETURN(const RunSet runs, RunSet::Read(command.folder, command.labels, Bar("recordings read")));
    if (runs.size() > 0) {
      Print(command.ablate ? ToTable(Ablate(runs, command.judge, Bar("sets of tests")))
                           : ToTable(Tune(runs, command.judge, Bar("searches"))));
    }
    return Tell(runs.failures());
  }
  BW_ASSIGN_OR_RETURN(
      const Scorecard card,
      ScoreRuns({.folder = command.folder, .labels = command.labels, .judge = command.judge, .progress = Bar("runs")}));
  const ScorecardTotals totals = AddUp(card.scores);
  Print(command.json ? ToJsonLines(card, totals) : ToTable(card, totals));
  return Tell(card.failures);
}

}  // namespace bellwether::server
