#include "server/offline/replay.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "server/detect/rule_families.h"
#include "server/detect/run_judge.h"
#include "server/model/run_coverage.h"
#include "server/offline/recorded_run.h"
#include "server/query/json_api.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

class Replayer final : public RunListener {
 public:
  explicit Replayer(const ReplayOptions& options) : options_(options) {}

  void OnHello(const RunDescription& run) override {
    if (judge_ == nullptr) {
      name_ = run.name;
      layers_ = run.layout.layers;
      coverage_.off = FamiliesOff(options_.judge);
      judge_ = std::make_unique<RunJudge>(options_.judge, run, options_.bank);
    }
    judge_->OnHello(run, &transitions_);
    Print();
  }
  void OnRows(const RunRows& rows) override { judge_->SetRows(std::make_shared<const RunRows>(rows)); }
  void OnSample(const StepSample& sample) override {
    if (!IsWanted(sample.step)) return;
    coverage_.Observe(sample);
    ++steps_;
    step_ = std::max(step_, sample.step);
    judge_->Observe(sample, &transitions_);
    Print();
  }
  void OnEvent(const RunEvent& event) override {
    if (!IsWanted(event.step)) return;
    judge_->OnEvent(event, &transitions_);
    Print();
  }

  // To standard error, where the run was judged in part: no alert is no health then.
  void PrintJudged() const {
    if (judge_ == nullptr) return;
    const JudgedBy judged = coverage_.At(step_, layers_, steps_);
    if (judged.whole()) return;
    std::fflush(stdout);  // Behind what it is about.
    std::fprintf(stderr, "%s: %s\n", name_.c_str(), judged.Text(/*ended=*/true).c_str());
  }

 private:
  bool IsWanted(int64_t step) const { return options_.until_step < 0 || step <= options_.until_step; }

  void Print() {
    for (AlertTransition& transition : transitions_) {
      transition.run_name = name_;
      if (options_.json) {
        std::puts(TransitionToJson(transition).c_str());
        continue;
      }
      std::printf("step %8ld  %-8s %-8s stage %d  %s\n", static_cast<long>(transition.step),
                  transition.state == AlertState::kFiring ? "firing" : "resolved",
                  transition.severity == Severity::kCritical  ? "critical"
                  : transition.severity == Severity::kWarning ? "warning"
                                                              : "info",
                  transition.stage, transition.summary.c_str());
    }
    transitions_.clear();
  }

  const ReplayOptions& options_;
  std::string name_;
  int32_t layers_ = 0;
  int64_t step_ = 0;
  uint64_t steps_ = 0;
  RunCoverage coverage_;
  std::unique_ptr<RunJudge> judge_;
  std::vector<AlertTransition> transitions_;
};

}  // namespace

std::vector<std::string> RecordingsAt(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::vector<std::string> inside;
    std::error_code error;
    for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error)) {
      if (at->path().extension() == ".bwrun") inside.push_back(at->path().string());
    }
    std::sort(inside.begin(), inside.end());
    if (inside.empty()) inside.push_back(path);
    files.insert(files.end(), inside.begin(), inside.end());
  }
  return files;
}

absl::Status Replay(const ReplayOptions& options) {
  if (options.headed && !options.json) std::printf("%s:\n", options.file.c_str());
  Replayer replayer(options);
  BW_RETURN_IF_ERROR(WalkRecordedRun(options.file, &replayer));
  replayer.PrintJudged();
  return absl::OkStatus();
}

}  // namespace bellwether::server
