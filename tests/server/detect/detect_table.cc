// Prints the table of docs/concepts/detection.md: what the judge says of each
// recorded run, beside what happened.  Usage: detect_table DIR

#include <cmath>
#include <cstdio>

#include "tests/support/judged_run.h"

namespace bellwether::server {
namespace {

std::string StepText(int64_t step) {
  return step < 0 ? "-" : std::to_string(step);
}

// The ETA half-way from the first warning to the explosion, against the truth.
std::string EtaError(const RunLabel& label, const Verdict& verdict) {
  if (label.t_sigma < 0 || verdict.first_warning < 0) return "-";
  const int64_t middle = (verdict.first_warning + label.t_sigma) / 2;
  for (const auto& [step, eta] : verdict.etas) {
    if (step < middle) continue;
    if (!eta.known) return "unknown";
    const auto truth = static_cast<double>(label.t_sigma - step);
    char text[32];
    std::snprintf(text, sizeof text, "%+.0f %%",
                  100 * (eta.steps - truth) / truth);
    return text;
  }
  return "-";
}

int Print(const std::string& folder) {
  std::printf(
      "| run | family | first warning | rule, head | first critical | t_sigma "
      "| t_loss | ETA error at mid-course |\n");
  std::printf("| --- | --- | --- | --- | --- | --- | --- | --- |\n");
  int64_t healthy_steps = 0;
  int healthy_warnings = 0;
  for (const RunLabel& label : ReadLabels(folder + "/labels.json")) {
    const auto run = ReadRecordedRun(folder + "/" + label.name + ".bwrun");
    if (!run) {
      std::fprintf(stderr, "cannot read %s\n", label.name.c_str());
      return 1;
    }
    const Verdict verdict = Judge(*run);
    std::string what = "-";
    if (verdict.first_warning >= 0) {
      what = verdict.warning.rule + " " +
             std::to_string(verdict.warning.strongest.layer) + "." +
             std::to_string(verdict.warning.strongest.head);
    }
    std::printf("| %s | %s | %s | %s | %s | %s | %s | %s |\n",
                label.name.c_str(), label.family.c_str(),
                StepText(verdict.first_warning).c_str(), what.c_str(),
                StepText(verdict.first_critical).c_str(),
                StepText(label.t_sigma).c_str(), StepText(label.t_loss).c_str(),
                EtaError(label, verdict).c_str());
    if (label.family == "healthy" || label.family == "benign" ||
        label.family == "centred") {
      healthy_steps += label.steps;
      healthy_warnings += verdict.warnings;
    }
  }
  std::printf(
      "\nHealthy, benign and centred runs: %d warnings in %lld steps.\n",
      healthy_warnings, static_cast<long long>(healthy_steps));
  return 0;
}

}  // namespace
}  // namespace bellwether::server

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: detect_table DIR\n");
    return 2;
  }
  return bellwether::server::Print(argv[1]);
}
