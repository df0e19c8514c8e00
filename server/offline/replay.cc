#include "server/offline/replay.h"

#include <cstdio>
#include <memory>
#include <vector>

#include "server/detect/run_judge.h"
#include "server/offline/recorded_run.h"
#include "server/query/json_api.h"

namespace bellwether::server {
namespace {

class Replayer final : public RunListener {
 public:
  explicit Replayer(const ReplayOptions& options) : options_(options) {}

  void OnHello(const RunDescription& run) override {
    if (judge_ == nullptr) {
      name_ = run.name;
      judge_ = std::make_unique<RunJudge>(options_.judge, run, options_.bank);
    }
    judge_->OnHello(run, &transitions_);
    Print();
  }
  void OnSample(const StepSample& sample) override {
    if (!IsWanted(sample.step)) return;
    judge_->Observe(sample, &transitions_);
    Print();
  }
  void OnEvent(const RunEvent& event) override {
    if (!IsWanted(event.step)) return;
    judge_->OnEvent(event, &transitions_);
    Print();
  }

 private:
  bool IsWanted(int64_t step) const { return options_.until_step < 0 || step <= options_.until_step; }

  void Print() {
    for (Transition& transition : transitions_) {
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
  std::unique_ptr<RunJudge> judge_;
  std::vector<Transition> transitions_;
};

}  // namespace

absl::Status Replay(const ReplayOptions& options) {
  Replayer replayer(options);
  return WalkRecordedRun(options.file, &replayer);
}

}  // namespace bellwether::server
