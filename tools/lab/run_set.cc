#include "tools/lab/run_set.h"

#include <filesystem>
#include <optional>
#include <utility>
#include <variant>

#include "server/offline/recorded_run.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

struct RunSet::Kept final : RunListener {
  std::string name;
  std::optional<RunLabel> label;
  std::vector<std::variant<RunDescription, StepSample, RunEvent, RunRows>> items;

  void OnHello(const RunDescription& run) override { items.emplace_back(run); }
  void OnRows(const RunRows& rows) override { items.emplace_back(rows); }
  void OnSample(const StepSample& sample) override { items.emplace_back(sample); }
  void OnEvent(const RunEvent& event) override { items.emplace_back(event); }

  absl::Status Walk(RunListener* listener) const {
    for (const auto& item : items) {
      if (const auto* sample = std::get_if<StepSample>(&item)) {
        listener->OnSample(*sample);
      } else if (const auto* event = std::get_if<RunEvent>(&item)) {
        listener->OnEvent(*event);
      } else if (const auto* rows = std::get_if<RunRows>(&item)) {
        listener->OnRows(*rows);
      } else {
        listener->OnHello(std::get<RunDescription>(item));
      }
    }
    return absl::OkStatus();
  }
};

RunSet::RunSet() = default;
RunSet::RunSet(RunSet&&) noexcept = default;
RunSet& RunSet::operator=(RunSet&&) noexcept = default;
RunSet::~RunSet() = default;
size_t RunSet::size() const { return runs_.size(); }

absl::StatusOr<RunSet> RunSet::Read(const std::string& folder, const std::string& labels, const Progress& progress) {
  BW_ASSIGN_OR_RETURN(const RunFolder opened, OpenRunFolder(folder, labels));
  RunSet set;
  size_t done = 0;
  for (const std::string& file : opened.files) {
    auto run = std::make_unique<Kept>();
    run->name = std::filesystem::path(file).stem().string();
    if (const RunLabel* label = opened.LabelOf(file)) run->label = *label;
    if (const absl::Status walked = WalkRecordedRun(file, run.get()); walked.ok()) {
      set.runs_.push_back(std::move(run));
    } else {
      set.failures_.emplace_back(walked.message());
    }
    if (progress) progress(++done, opened.files.size());
  }
  return set;
}

RunScore RunSet::Score(size_t index, const JudgeOptions& options) const {
  const Kept& run = *runs_[index];
  const auto walk = [&](RunListener* listener) { return run.Walk(listener); };
  // What is kept cannot fail.
  return ScoreWalk(run.name, walk, run.label ? &*run.label : nullptr, options, false).value();
}

}  // namespace bellwether::server
