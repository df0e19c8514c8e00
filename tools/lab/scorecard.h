// scorecard.h: how early, how exactly and how often wrongly the judge warns,
// over a folder of recorded runs, beside the rules that others use.
//
// What is said of a run comes from its samples and events alone.  What became
// of it comes from labels.json where that names the run, else from the run
// itself (truth.h).

#ifndef BELLWETHER_TOOLS_LAB_SCORECARD_H_
#define BELLWETHER_TOOLS_LAB_SCORECARD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/detect/judge_options.h"
#include "server/model/run_types.h"
#include "server/offline/recorded_run.h"
#include "tools/lab/truth.h"

namespace bellwether::server {

// What is known of a run that its samples do not say.
struct RunLabel {
  // rounding, rounding-rescued, logits: it fails.  drifting: it deserves a
  // warning and no critical.  healthy, benign, centred: it deserves neither.
  std::string family;
  Truth truth;
};
using RunLabels = std::map<std::string, RunLabel>;

// labels.json as tests/testdata/runs/README.md describes it.  NOT_FOUND: no
// such file.  INVALID_ARGUMENT: names the run and the field.
absl::StatusOr<RunLabels> ReadRunLabels(const std::string& file);

struct PeerScore {
  std::string rule;
  std::vector<int64_t> alarms;  // Steps.
  double seconds = 0;           // That it took.
};

struct RunScore {
  std::string run;     // The file's name without .bwrun.
  std::string family;  // Empty if no label says.
  Truth truth;
  int64_t first_warning = -1, first_critical = -1;  // Steps; -1 = never.
  std::vector<Head> named_heads;                    // Of the first warning, strongest first.
  // Of the time left, half-way from the first warning to t_sigma (t_loss if
  // there is none): (said - true) / true.  Empty: nothing was said.
  std::optional<double> eta_error;
  int64_t warnings = 0, criticals = 0;  // Alerts that got so far.
  // The warnings by their first evidence: "drift_ratio growth".
  std::map<std::string, int64_t> warned_by;
  std::map<std::string, int64_t> warned_rules, critical_rules;  // The same by their rules as first told.
  std::vector<PeerScore> peers;
  double judge_seconds = 0;
  int64_t samples = 0, values = 0;  // That the judge was given.

  bool fails() const { return truth.t_sigma >= 0 || truth.t_loss >= 0; }
  // Deserves neither warning nor critical.
  bool quiet() const;
  int64_t false_warnings() const { return quiet() ? warnings : 0; }
  int64_t false_criticals() const { return quiet() || family == "drifting" ? criticals : 0; }
  // The failure that a warning is held against; -1 = none.
  int64_t failed_at() const { return truth.t_sigma >= 0 ? truth.t_sigma : truth.t_loss; }
  // Steps from the first warning or critical to failed_at(); 0 = too late, or
  // nothing failed.
  int64_t lead() const { return LeadOf(first_warning); }
  int64_t critical_lead() const { return LeadOf(first_critical); }

 private:
  int64_t LeadOf(int64_t step) const { return step < 0 || step >= failed_at() ? 0 : failed_at() - step; }
};

// `label`: null if nothing is known.  `peers`: whether the rules of others are
// asked too.  Errors: those of `walk`.
absl::StatusOr<RunScore> ScoreWalk(const std::string& name, const RunWalk& walk, const RunLabel* label,
                                   const JudgeOptions& options, bool peers = true);
// Errors as WalkRecordedRun.
absl::StatusOr<RunScore> ScoreRun(const std::string& file, const RunLabel* label, const JudgeOptions& options);

// The recordings of a folder and what is known of them.
struct RunFolder {
  std::vector<std::string> files;  // .bwrun, by rising name; others are left alone.
  RunLabels labels;
  // Runs of the benchmark (instabilities/): each has its truth as NAME.json beside it, which is not read
  // here.  They are of the family "benchmark": neither quiet nor a failure.
  std::set<std::string> of_benchmark;

  // Null if nothing is known.
  const RunLabel* LabelOf(const std::string& file) const;
};
// `labels` empty: labels.json of the folder, if it has one.  NOT_FOUND: no such
// folder, or no recording in it.  INVALID_ARGUMENT: the labels, as above.
absl::StatusOr<RunFolder> OpenRunFolder(const std::string& folder, const std::string& labels);

using Progress = std::function<void(size_t done, size_t of)>;  // May be null.

struct ScorecardOptions {
  std::string folder, labels;  // As OpenRunFolder.
  JudgeOptions judge;
  Progress progress;
};

struct Scorecard {
  std::vector<RunScore> scores;       // By rising name.
  std::vector<std::string> failures;  // "FILE: why", of runs that cannot be read.
  size_t of_benchmark = 0;            // Files that are runs of the benchmark.
};

// Errors as OpenRunFolder; a file that cannot be read is a failure of its own.
absl::StatusOr<Scorecard> ScoreRuns(const ScorecardOptions& options);

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_SCORECARD_H_
