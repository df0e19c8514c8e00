#include "tools/lab/scorecard.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/detect/run_judge.h"
#include "server/offline/recorded_run.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"
#include "tools/lab/peer_rules.h"

namespace bellwether::server {
namespace {

constexpr char kEnding[] = ".bwrun";
constexpr size_t kLabelsBytesMax = 16 << 20;

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The rules of others, given samples by the hundred: a clock that is read at
// every step would cost more than they do.
class PeerScorer {
 public:
  PeerScorer() : rules_(MakePeerRules()), seconds_(rules_.size()), waiting_(256) {}

  void Observe(const StepSample& sample) {
    waiting_[count_++] = sample;
    if (count_ == waiting_.size()) Flush();
  }

  std::vector<PeerScore> Finish() {
    Flush();
    std::vector<PeerScore> scores;
    for (size_t i = 0; i < rules_.size(); ++i) scores.push_back({rules_[i]->name(), rules_[i]->alarms(), seconds_[i]});
    return scores;
  }

 private:
  void Flush() {
    for (size_t i = 0; i < rules_.size(); ++i) {
      const auto begin = std::chrono::steady_clock::now();
      for (size_t sample = 0; sample < count_; ++sample) rules_[i]->Observe(waiting_[sample]);
      seconds_[i] += SecondsSince(begin);
    }
    count_ = 0;
  }

  const std::vector<std::unique_ptr<PeerRule>> rules_;
  std::vector<double> seconds_;
  std::vector<StepSample> waiting_;
  size_t count_ = 0;
};

class Scorer final : public RunListener {
 public:
  Scorer(const JudgeOptions& options, bool peers, RunScore* score) : options_(options), score_(score) {
    if (peers) peers_.emplace();
  }

  void OnHello(const RunDescription& run) override {
    if (judge_ == nullptr) judge_ = std::make_unique<RunJudge>(options_, run);
    judge_->OnHello(run, &transitions_);
    Note();
  }

  void OnRows(const RunRows& rows) override { judge_->SetRows(std::make_shared<const RunRows>(rows)); }

  void OnSample(const StepSample& sample) override {
    truth_.Observe(sample);
    if (peers_) peers_->Observe(sample);
    ++score_->samples;
    for (const SignalId signal : sample.signals()) score_->values += static_cast<int64_t>(sample.matrix(signal).size());
    const auto begin = std::chrono::steady_clock::now();
    judge_->Observe(sample, &transitions_);
    score_->judge_seconds += SecondsSince(begin);
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
    if (peers_) score_->peers = peers_->Finish();
    if (score_->first_warning < 0 || score_->failed_at() < 0) return;
    const int64_t middle = (score_->first_warning + score_->failed_at()) / 2;
    const auto at = std::find_if(etas_.begin(), etas_.end(), [&](const auto& eta) { return eta.first >= middle; });
    const auto left = at == etas_.end() ? 0.0 : static_cast<double>(score_->failed_at() - at->first);
    if (left > 0 && at->second.known) score_->eta_error = (at->second.steps - left) / left;
  }

 private:
  void Note() {
    for (const AlertTransition& transition : transitions_) {
      if (transition.state != AlertState::kFiring || transition.severity < Severity::kWarning) continue;
      if (score_->first_warning < 0) {
        score_->first_warning = transition.step;
        score_->named_heads = transition.heads;
      }
      if (warned_.insert(transition.key).second) {
        ++score_->warnings;
        ++score_->warned_rules[transition.rule];
        ++score_->warned_by[transition.evidence.empty()
                                ? transition.rule
                                : absl::StrCat(transition.evidence[0].signal, " ", transition.evidence[0].detector)];
      }
      if (transition.severity < Severity::kCritical) continue;
      if (score_->first_critical < 0) score_->first_critical = transition.step;
      if (critical_.insert(transition.key).second) {
        ++score_->criticals;
        ++score_->critical_rules[transition.rule];
      }
    }
    transitions_.clear();
  }

  const JudgeOptions& options_;
  RunScore* const score_;
  std::unique_ptr<RunJudge> judge_;
  TruthFinder truth_;
  std::optional<PeerScorer> peers_;
  std::vector<AlertTransition> transitions_;
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
  BW_ASSIGN_OR_RETURN(const RegularFile file, ReadRegularFile(path, kLabelsBytesMax));
  RunLabels labels;
  std::string run;
  try {
    const auto all = nlohmann::json::parse(file.text);
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

absl::StatusOr<RunScore> ScoreWalk(const std::string& name, const RunWalk& walk, const RunLabel* label,
                                   const JudgeOptions& options, bool peers) {
  RunScore score;
  score.run = name;
  if (label != nullptr) score.family = label->family;
  Scorer scorer(options, peers, &score);
  BW_RETURN_IF_ERROR(walk(&scorer));
  scorer.Finish(label);
  return score;
}

absl::StatusOr<RunScore> ScoreRun(const std::string& file, const RunLabel* label, const JudgeOptions& options) {
  const auto walk = [&](RunListener* listener) { return WalkRecordedRun(file, listener); };
  return ScoreWalk(std::filesystem::path(file).stem().string(), walk, label, options);
}

const RunLabel* RunFolder::LabelOf(const std::string& file) const {
  static const RunLabel kOfBenchmark = {.family = "benchmark", .truth = {}};
  const std::string name = std::filesystem::path(file).stem().string();
  if (of_benchmark.contains(name)) return &kOfBenchmark;
  const auto label = labels.find(name);
  return label == labels.end() ? nullptr : &label->second;
}

absl::StatusOr<RunFolder> OpenRunFolder(const std::string& folder, const std::string& labels) {
  std::error_code error;
  RunFolder runs;
  int traces = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == kEnding) runs.files.push_back(entry.path().string());
    if (entry.path().extension() == ".npz") ++traces;
  }
  if (error) return absl::NotFoundError(absl::StrCat(folder, ": ", error.message()));
  if (runs.files.empty()) {
    const std::string how = "python -m bellwether npz2run NAME.npz NAME.bwrun";
    return absl::NotFoundError(
        traces == 0
            ? absl::StrCat(folder, " holds no *", kEnding, "; a trace becomes one by `", how, "`")
            : absl::StrCat(folder, " holds ", traces, " *.npz and no *", kEnding, ": convert each with `", how, "`"));
  }
  std::sort(runs.files.begin(), runs.files.end());
  for (const std::string& file : runs.files) {
    const std::filesystem::path recording(file);
    if (std::filesystem::exists(std::filesystem::path(recording).replace_extension(".json"), error)) {
      runs.of_benchmark.insert(recording.stem().string());
    }
  }
  if (const std::filesystem::path beside = std::filesystem::path(folder) / "labels.json";
      !labels.empty() || std::filesystem::exists(beside)) {
    BW_ASSIGN_OR_RETURN(runs.labels, ReadRunLabels(labels.empty() ? beside.string() : labels));
  }
  return runs;
}

absl::StatusOr<Scorecard> ScoreRuns(const ScorecardOptions& options) {
  BW_ASSIGN_OR_RETURN(const RunFolder folder, OpenRunFolder(options.folder, options.labels));
  Scorecard card;
  card.of_benchmark = folder.of_benchmark.size();
  size_t done = 0;
  for (const std::string& file : folder.files) {
    absl::StatusOr<RunScore> score = ScoreRun(file, folder.LabelOf(file), options.judge);
    if (score.ok()) {
      card.scores.push_back(*std::move(score));
    } else {
      card.failures.emplace_back(score.status().message());
    }
    if (options.progress) options.progress(++done, folder.files.size());
  }
  return card;
}

}  // namespace bellwether::server
