#include "server/offline/policy_dry_run.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "server/act/action_engine.h"
#include "server/act/action_kinds.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

constexpr uint32_t kAllKinds = (1u << kActionKindEnd) - 1;
constexpr int64_t kSecondNanos = 1'000'000'000;
constexpr const char* kWho = "dry run";

class DryRunner final : public RunListener {
 public:
  DryRunner(PolicyPtr policy, const JudgeOptions& judge) : policy_(std::move(policy)), options_(judge) {
    result_.mode = policy_->mode;
  }

  void OnHello(const RunDescription& run) override {
    if (judge_ == nullptr) {
      result_.run = run.name;
      judge_ = std::make_unique<RunJudge>(options_, run);
      engine_ = std::make_unique<ActionEngine>(run, policy_);
    }
    judge_->OnHello(run, &transitions_);
    // One trainer that allows everything and speaks for all ranks.
    engine_->OnHello(run, {.rank = 0, .attempt = run.attempt, .kinds_mask = kAllKinds, .ranks_agree = true}, now_,
                     &changed_);
    attempt_ = run.attempt;
    Follow();
  }
  void OnRows(const RunRows& rows) override { judge_->SetRows(std::make_shared<const RunRows>(rows)); }
  void OnSample(const StepSample& sample) override {
    Advance(sample.step, sample.time_unix_ns);
    judge_->Observe(sample, &transitions_);
    Follow();
    engine_->OnStep(sample, now_, &changed_);
    Deliver();
  }
  void OnEvent(const RunEvent& event) override {
    judge_->OnEvent(event, &transitions_);
    engine_->OnEvent(event, now_, &changed_);
    Follow();
  }

  DryRun Result() {
    if (engine_ != nullptr) result_.actions = engine_->actions();
    return std::move(result_);
  }

 private:
  void Advance(int64_t step, int64_t time_unix_ns) {
    now_.step = std::max(now_.step, step);
    result_.last_step = now_.step;
    // A recording without times passes a step in a second.
    now_.time_unix_ns = std::max(now_.time_unix_ns, time_unix_ns > 0 ? time_unix_ns : now_.step * kSecondNanos);
  }

  void Follow() {
    for (const AlertTransition& transition : transitions_) {
      result_.alerts += transition.state == AlertState::kFiring && transition.k == 0;
    }
    engine_->OnTransitions(transitions_, now_, &changed_);
    transitions_.clear();
    Deliver();
  }

  void Deliver() {
    if (policy_->mode == PolicyMode::kPropose) {
      for (const Action& action : engine_->actions()) {
        if (action.state != ActionState::kProposed || action.kind == ActionKind::kRollbackSuggest) continue;
        ActionRequest request;
        request.verb = ActionRequest::Verb::kApprove;
        request.id = action.id;
        request.by = kWho;
        (void)engine_->OnRequest(request, now_, &changed_);  // One at a time: another may be on trial.
      }
    }
    for (const Action& action : engine_->Due(0)) {
      engine_->OnSent(action.id, now_, &changed_);
      engine_->OnResult({.id = action.id, .rank = 0, .attempt = attempt_, .applied = true, .step = now_.step + 1}, now_,
                        &changed_);
    }
    changed_.clear();
  }

  PolicyPtr policy_;
  const JudgeOptions& options_;
  DryRun result_;
  std::unique_ptr<RunJudge> judge_;
  std::unique_ptr<ActionEngine> engine_;
  ActionEngine::Now now_{.time_unix_ns = 0, .step = -1};
  uint32_t attempt_ = 0;
  std::vector<AlertTransition> transitions_;
  std::vector<Action> changed_;
};

nlohmann::json JsonOf(const Action& action) {
  nlohmann::json scope = {{"layers", action.scope.layers}, {"heads", nlohmann::json::array()}};
  for (const Head& head : action.scope.heads) scope["heads"].push_back({{"layer", head.layer}, {"head", head.head}});
  nlohmann::json history = nlohmann::json::array();
  for (const ActionChange& change : action.history) {
    history.push_back(
        {{"state", NameOf(change.state)}, {"step", change.step}, {"by", change.by}, {"reason", change.reason}});
  }
  nlohmann::json json = {{"id", action.id},
                         {"do", NameOf(action.kind)},
                         {"scope", scope},
                         {"value", action.value},
                         {"alert", action.alert_key},
                         {"state", NameOf(action.state)},
                         {"effect", action.expected_effect},
                         {"cost", action.cost},
                         {"history", history}};
  if (!action.mode.empty()) json["mode"] = action.mode;
  if (!action.undoes.empty()) json["undoes"] = action.undoes;
  return json;
}

}  // namespace

int64_t DryRun::first_applied_step() const {
  for (const Action& action : actions) {
    for (const ActionChange& change : action.history) {
      if (change.state == ActionState::kApplied) return change.step;
    }
  }
  return -1;
}

absl::StatusOr<DryRun> DryRunPolicy(const RunWalk& walk, const PolicyPtr& policy, const JudgeOptions& judge) {
  PolicyPtr used = policy;
  if (policy->mode == PolicyMode::kPropose && !policy->MayApprove(kWho)) {
    auto open = std::make_shared<Policy>(*policy);
    open->approvers.clear();
    used = open;
  }
  DryRunner runner(used, judge);
  if (const absl::Status walked = walk(&runner); !walked.ok()) return walked;
  return runner.Result();
}

std::string DryRunText(const DryRun& run) {
  std::string text =
      absl::StrCat(run.run, ": ", run.last_step + 1, " steps, ", run.alerts, run.alerts == 1 ? " alert, " : " alerts, ",
                   run.actions.size(), run.actions.size() == 1 ? " action" : " actions");
  if (run.mode == PolicyMode::kObserve) absl::StrAppend(&text, "; mode observe does nothing");
  absl::StrAppend(&text, "\n");
  for (const Action& action : run.actions) {
    absl::StrAppend(&text, "  ", action.id, "  ",
                    action.undoes.empty() ? "" : absl::StrCat("undo ", action.undoes, ": "), ActionText(action),
                    action.alert_key.empty() ? "" : "  for ", action.alert_key, "\n");
    for (const ActionChange& change : action.history) {
      absl::StrAppend(&text, "    step ", change.step, "  ", NameOf(change.state), " by ", change.by, ": ",
                      change.reason, "\n");
    }
  }
  return text;
}

std::string DryRunJson(const DryRun& run) {
  nlohmann::json actions = nlohmann::json::array();
  for (const Action& action : run.actions) actions.push_back(JsonOf(action));
  return nlohmann::json{{"run", run.run},
                        {"mode", NameOf(run.mode)},
                        {"last_step", run.last_step},
                        {"alerts", run.alerts},
                        {"first_applied_step",
                         run.first_applied_step() < 0 ? nlohmann::json() : nlohmann::json(run.first_applied_step())},
                        {"actions", actions}}
      .dump();
}

}  // namespace bellwether::server
