// act_run.h: a made-up run whose actions are followed step by step.

#ifndef BELLWETHER_TESTS_SERVER_ACT_ACT_RUN_H_
#define BELLWETHER_TESTS_SERVER_ACT_ACT_RUN_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/act/action_engine.h"
#include "server/act/action_kinds.h"

namespace bellwether::server {

inline constexpr uint32_t kAllKinds = ~0u;

inline RunDescription SmallRun() {
  RunDescription run;
  run.name = "run";
  run.uuid = {0xab, 0xcd, 0xef, 0x01, 2};
  run.attempt = 1;
  run.layout = {.layers = 2, .heads = 2, .kv_heads = 2, .head_dim = 64, .seq_len = 64};
  run.attention.score_dtype = "bf16";
  return run;
}

inline PolicyPtr PolicyOf(const std::string& text) {
  auto policy = ParsePolicy(text, "policy.yml");
  EXPECT_TRUE(policy.ok()) << policy.status();
  return policy.ok() ? *policy : DefaultPolicy();
}

// A run, its engine, and a clock of one second a step.
struct ActRun {
  explicit ActRun(PolicyPtr policy, RunDescription description = SmallRun())
      : run(std::move(description)), engine(std::make_unique<ActionEngine>(run, std::move(policy))) {}

  ActionEngine::Now now() const {
    return {.time_unix_ns = 1'700'000'000'000'000'000 + time_s * 1'000'000'000, .step = step};
  }

  void Hello(uint32_t rank = 0, uint32_t kinds = kAllKinds, bool agree = false) {
    engine->OnHello(run, {.rank = rank, .attempt = run.attempt, .kinds_mask = kinds, .ranks_agree = agree}, now(),
                    &changed);
  }
  void Steps(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      ++step;
      ++time_s;
      StepSample sample;
      sample.Reset(run.layout);
      sample.attempt = run.attempt;
      sample.step = step;
      engine->OnStep(sample, now(), &changed);
    }
  }
  AlertTransition Alert(const std::string& rule = "drift", int32_t stage = 1, Severity severity = Severity::kWarning) {
    AlertTransition alert;
    alert.key = rule + "/1/0/10";
    alert.rule = rule;
    alert.state = AlertState::kFiring;
    alert.stage = stage;
    alert.severity = severity;
    alert.step = step;
    alert.first_step = 10;
    alert.strongest = {1, 0};
    alert.heads = {{1, 0}, {1, 1}};
    return alert;
  }
  void Fire(const AlertTransition& alert) { engine->OnTransitions({alert}, now(), &changed); }
  void Resolve(AlertTransition alert) {
    alert.state = AlertState::kResolved;
    engine->OnTransitions({alert}, now(), &changed);
  }
  void Judge(const FalseAlarm& said) { engine->OnFalseAlarm(said, now(), &changed); }
  absl::Status Ask(ActionRequest::Verb verb, const std::string& id, const std::string& by = "alice") {
    ActionRequest request;
    request.verb = verb;
    request.id = id;
    request.by = by;
    return engine->OnRequest(request, now(), &changed);
  }
  absl::Status Propose(const Action& action, const std::string& by = "alice") {
    ActionRequest request;
    request.action = action;
    request.by = by;
    return engine->OnRequest(request, now(), &changed);
  }
  void Sent(const std::string& id) { engine->OnSent(id, now(), &changed); }
  void Answer(const std::string& id, bool applied = true, uint32_t rank = 0, const std::string& reason = "",
              int64_t at = -1) {
    engine->OnResult({.id = id,
                      .rank = rank,
                      .attempt = run.attempt,
                      .applied = applied,
                      .step = at >= 0 ? at : step + 1,
                      .reason = reason},
                     now(), &changed);
  }
  void Deliver(const std::string& id) {
    Sent(id);
    Answer(id);
  }
  // By its number in the run.
  Action At(size_t number) const {
    const std::vector<Action> all = engine->actions();
    EXPECT_LE(number, all.size());
    return number >= 1 && number <= all.size() ? all[number - 1] : Action();
  }
  std::string Id(size_t number) const { return "abcdef01-" + std::to_string(number); }
  size_t count() const { return engine->actions().size(); }

  RunDescription run;
  std::unique_ptr<ActionEngine> engine;
  int64_t step = 100;
  int64_t time_s = 0;
  std::vector<Action> changed;
};

inline Action CenterAll() {
  Action action;
  action.kind = ActionKind::kCenterK;
  action.value = 1;
  return action;
}

// "proposed approved sent applied"
inline std::string Life(const Action& action) {
  std::string text;
  for (const ActionChange& change : action.history)
    text += (text.empty() ? "" : ", ") + std::string(NameOf(change.state));
  return text;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SERVER_ACT_ACT_RUN_H_
