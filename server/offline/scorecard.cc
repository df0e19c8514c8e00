#include "server/offline/scorecard.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/detect/run_judge.h"
#include "server/offline/peer_rules.h"
#include "server/offline/recorded_run.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr char kEnding[] = ".bwrun";

class Scorer final : public RunListener {
 public:
  Scorer(const JudgeOptions& options, RunScore* score) : options_(options), score_(score), peers_(MakePeerRules()) {}

  void OnHello(const RunDescription& run) override {
    if (judge_ == nullptr) judge_ = std::make_unique<RunJudge>(options_, run);
    judge_->OnHello(run, &transitions_);
    Note();
  }

  void OnSample(const StepSample& sample) override {
    truth_.Observe(sample);
    for (const auto& peer : peers_) peer->Observe(sample);
    for (const SignalId signal : sample.signals()) score_->values += static_cast<int64_t>(sample.matrix(signal).size());
    const auto begin = std::chrono::steady_clock::now();
    judge_->Observe(sample, &transitions_);
    score_->judge_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    Note();
    if (sample.has(SignalId::kWqSigma)) etas_.emplace_back(sample.step, judge_->eta());
  }

  void OnEvent(const RunEvent& event) override {
    judge_->OnEvent(event, &transitions_);
    Note();
  }

  void Finish(const RunLabel* label) {
    const Truth& seen = truth_.truth();
    score_->truth = label != nullptr ? label->truth : seen;
    score_->truth.steps = seen.steps;
    for (const auto& peer : peers_) score_->peers.push_back({peer->name(), peer->alarms()});
    if (score_->first_warning < 0 || score_->failed_at() < 0) return;
    const int64_t middle = (score_->first_warning + score_->failed_at()) / 2;
    const auto at = std::find_if(etas_.begin(), etas_.end(), [&](const auto& eta) { return eta.first >= middle; });
    const auto left = at == etas_.end() ? 0.0 : static_cast<double>(score_->failed_at() - at->first);
    if (left > 0 && at->second.known) score_->eta_error = (at->second.steps - left) / left;
  }

 private:
  void Note() {
    for (const Transition& transition : transitions_) {
      if (transition.state != AlertState::kFiring || transition.severity < Severity::kWarning) continue;
      if (score_->first_warning < 0) {
        score_->first_warning = transition.step;
        score_->named_heads = transition.heads;
      }
      if (warned_.insert(transition.key).second) ++score_->warnings;
      if (transition.severity < Severity::kCritical) continue;
      if (score_->first_critical < 0) score_->first_critical = transition.step;
      if (critical_.insert(transition.key).second) ++score_->criticals;
    }
    transitions_.clear();
  }

  const JudgeOptions& options_;
  RunScore* const score_;
  std::unique_ptr<RunJudge> judge_;
  TruthFinder truth_;
  std::vector<std::unique_ptr<PeerRule>> peers_;
  std::vector<Transition> transitions_;
  std::set<std::string> warned_, critical_;  // Alerts, by key.
  std::vector<std::pair<int64_t, Eta>> etas_;
};

int64_t StepOrNever(const nlohmann::json& value) { return value.is_null() ? -1 : value.get<int64_t>(); }

}  // namespace

bool RunScore::quiet() const {
  static const std::set<std::string> kQuiet = {"healthy", "benign", "centred"};
  return family.empty() ? !fails() : kQuiet.contains(family);
}

absl::StatusOr<RunLabels> ReadRunLabels(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  RunLabels labels;
  std::string run;
  try {
    const auto all = nlohmann::json::parse(file);
    for (const auto& [name, entry] : all.items()) {
      run = name;
      RunLabel& label = labels[name];
      label.family = entry.at("family").get<std::string>();
      label.truth.t_sigma = StepOrNever(entry.at("t_sigma"));
      label.truth.t_loss = StepOrNever(entry.at("t_loss"));
      for (const auto& head : entry.at("heads")) {
        label.truth.heads.push_back({head.at(0).get<int32_t>(), head.at(1).get<int32_t>()});
      }
    }
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, run.empty() ? "" : ": run " + run, ": ", error.what()));
  }
  return labels;
}

absl::StatusOr<RunScore> ScoreRun(const std::string& file, const RunLabel* label, const JudgeOptions& options) {
  RunScore score;
  score.run = std::filesystem::path(file).stem().string();
  if (label != nullptr) score.family = label->family;
  Scorer scorer(options, &score);
  BW_RETURN_IF_ERROR(WalkRecordedRun(file, &scorer));
  scorer.Finish(label);
  return score;
}

absl::StatusOr<std::vector<RunScore>> ScoreRuns(const ScorecardOptions& options) {
  std::error_code error;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(options.folder, error)) {
    if (entry.path().extension() == kEnding) files.push_back(entry.path());
  }
  if (error) return absl::NotFoundError(absl::StrCat(options.folder, ": ", error.message()));
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(options.folder, " holds no *", kEnding,
                                            "; make them of traces with python -m bellwether npz2run"));
  }
  std::sort(files.begin(), files.end());
  RunLabels labels;
  if (const std::filesystem::path beside = std::filesystem::path(options.folder) / "labels.json";
      !options.labels.empty() || std::filesystem::exists(beside)) {
    BW_ASSIGN_OR_RETURN(labels, ReadRunLabels(options.labels.empty() ? beside.string() : options.labels));
  }
  std::vector<RunScore> scores;
  for (const auto& file : files) {
    const auto label = labels.find(file.stem().string());
    BW_ASSIGN_OR_RETURN(RunScore score,
                        ScoreRun(file.string(), label == labels.end() ? nullptr : &label->second, options.judge));
    scores.push_back(std::move(score));
    if (options.progress) options.progress(scores.size(), files.size());
  }
  return scores;
}

}  // namespace bellwether::server
