// scorecard.h: how early, how exactly and how often wrongly the judge warns,
// over a folder of recorded runs, beside the rules that others use.
//
// What is said of a run comes from its samples and events alone.  What became
// of it comes from labels.json where that names the run, else from the run
// itself (truth.h).

#ifndef BELLWETHER_SERVER_OFFLINE_SCORECARD_H_
#define BELLWETHER_SERVER_OFFLINE_SCORECARD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/detect/judge_options.h"
#include "server/offline/truth.h"
#include "server/store/run_types.h"

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
  std::vector<PeerScore> peers;
  double judge_seconds = 0;
  int64_t values = 0;  // That the judge was given.

  bool fails() const { return truth.t_sigma >= 0 || truth.t_loss >= 0; }
  // Deserves neither warning nor critical.
  bool quiet() const;
  int64_t false_warnings() const { return quiet() ? warnings : 0; }
  int64_t false_criticals() const { return quiet() || family == "drifting" ? criticals : 0; }
  // The failure that a warning is held against; -1 = none.
  int64_t failed_at() const { return truth.t_sigma >= 0 ? truth.t_sigma : truth.t_loss; }
};

// `label`: null if nothing is known.  Errors as WalkRecordedRun.
absl::StatusOr<RunScore> ScoreRun(const std::string& file, const RunLabel* label, const JudgeOptions& options);

struct ScorecardOptions {
  std::string folder;  // Of .bwrun files; other files are left alone.
  std::string labels;  // Empty: labels.json of the folder, if it has one.
  JudgeOptions judge;
  std::function<void(size_t done, size_t of)> progress;  // May be null.
};

// By rising name.  NOT_FOUND: no such folder, or no recording in it.
absl::StatusOr<std::vector<RunScore>> ScoreRuns(const ScorecardOptions& options);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_SCORECARD_H_
