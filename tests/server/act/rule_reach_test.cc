// Goal: an alert's end is taken for evidence of what an action did only where the
// judge does not end it while the illness goes on as before.
// Method: the real judge, each kind of action as the trainer announces it, each
// built-in rule with an illness of its own, before the action and after it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/act/action_kinds.h"
#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

constexpr Head kIll{2, 1};
constexpr int64_t kOnset = 1500;
constexpr int64_t kAction = 4500;
constexpr int64_t kLast = 9500;

const char* const kRules[] = {"drift",     "ties",       "norm",         "logits",  "loss",
                              "gradient",  "nonfinite",  "disagreement", "silent",  "overhead",
                              "kernel",    "arithmetic", "own",          "frozen",  "experts",
                              "sequences", "parameters", "corruption",   "learning"};

RunDescription Description() {
  RunDescription run;
  run.name = "r";
  run.layout = {.layers = 4, .heads = 4, .kv_heads = 4, .head_dim = 64, .seq_len = 1024};
  run.layout.modules = 1;
  run.layout.own = 1;
  run.layout.tensors = 2;
  run.layout.experts = 2;
  run.attention.score_dtype = "bf16";
  return run;
}

// A healthy step, but for what makes `rule` fire from step `from` on.  What makes a drift
// or ties moves the weights in the end.
StepSample SampleAt(const RunDescription& run, int64_t step, const std::string& rule, int64_t from) {
  const bool ill = step >= from;
  StepSample sample;
  sample.Reset(run.layout);
  sample.step = step;
  std::mt19937 random(static_cast<uint32_t>(step) + 7);
  std::normal_distribution<double> normal;
  const auto since = static_cast<double>(ill ? step - kOnset : 0);
  const auto is = [&](const char* name) { return ill && rule == name; };
  sample.Add(SignalId::kLoss)[0] = static_cast<float>(2 + 4 * std::exp(-static_cast<double>(step) / 800) +
                                                      0.02 * normal(random) + (is("loss") ? since / 500 : 0));
  if (is("learning")) sample.Add(SignalId::kLoss)[0] = 2.5;
  sample.Add(SignalId::kGradNorm)[0] =
      static_cast<float>(0.6 * std::exp(0.1 * normal(random)) * (is("gradient") ? 1000 : 1));
  // Not all of the time: what is so in a hundred steps is the new normal.
  sample.Add(SignalId::kLossSequenceMax)[0] = is("sequences") && step % 20 == 0 ? 50.0f : 3.0f;
  if (is("overhead")) {
    sample.Add(SignalId::kHookSeconds)[0] = 0.5;
    sample.Add(SignalId::kStepSeconds)[0] = 1;
  }
  if (step % 10 != 0) return sample;
  for (int32_t i = 0; i < 16; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool here = i == kIll.layer * 4 + kIll.head;
    const double noise = std::exp(0.1 * normal(random));
    const double ratio = noise * (here && is("drift") ? std::exp2(std::min(since / 300, 30.0)) : 1);
    sample.Add(SignalId::kRows)[at] = 2048;
    sample.Add(SignalId::kCommonModeSum)[at] = static_cast<float>(2048 * 2 * ratio);
    sample.Add(SignalId::kSpreadSum)[at] = 2048 * 2;
    sample.Add(SignalId::kTiedRowsBf16)[at] = here && is("ties") ? 1600.0f : 100.0f;
    double sigma = 3 * std::exp(0.01 * normal(random));
    if (here && is("norm")) sigma *= std::exp2(since / 600);
    if (here && (is("drift") || is("ties"))) sigma *= std::exp2(static_cast<double>(step - from) / 1500);
    if (here && is("corruption") && step % 200 == 0) sigma *= 1e5;
    sample.Add(SignalId::kWqSigma)[at] = static_cast<float>(sigma);
    sample.Add(SignalId::kLogitMax)[at] = here && is("logits") ? 5000.0f : 24.0f;
    sample.Add(SignalId::kEntropySum)[at] = 2048 * 0.5;
  }
  if (is("nonfinite")) sample.Add(SignalId::kWqSigma)[9] = std::numeric_limits<float>::infinity();
  // A kernel that is switched is another one: that its alert ends then is evidence.
  for (const auto& [signal, value] :
       {std::pair(SignalId::kLawA3, is("kernel") ? 500.0f : 0.5f), std::pair(SignalId::kLawA3Variance, 1.0f),
        std::pair(SignalId::kLawA3Alike, 0.0f)}) {
    sample.Add(signal)[9] = value;
  }
  sample.Add(SignalId::kLawDifference)[0] = is("arithmetic") ? 500.0f : 0.5f;
  sample.Add(SignalId::kLawVariance)[0] = 1;
  sample.Add(SignalId::kOwnMean)[0] = is("own") ? std::numeric_limits<float>::quiet_NaN() : 0.5f;
  for (const SignalId signal : {SignalId::kTensorMoved, SignalId::kTensorGradMax, SignalId::kTensorGradSumsq}) {
    for (float& value : sample.Add(signal)) value = 1;
  }
  if (is("parameters") && step % 200 != 0) sample.Add(SignalId::kTensorGradSumsq)[1] = 1e6f;
  if (is("frozen")) sample.Add(SignalId::kTensorMoved)[1] = 0;
  for (float& load : sample.Add(SignalId::kExpertLoad)) load = 100;
  if (is("experts")) sample.Add(SignalId::kExpertLoad)[1] = 0;
  if (is("disagreement")) sample.disagreements.push_back({SignalId::kWqSigma, kIll.layer, kIll.head, 1, 2});
  return sample;
}

// As the trainer announces what it applied; actions that no event tells of change nothing here.
std::optional<RunEvent> EventOf(const Action& action) {
  RunEvent event{.step = kAction};
  switch (action.kind) {
    case ActionKind::kCenterK:
      event.kind = action.value == 0 ? EventKind::kCentringOff : EventKind::kCentringOn;
      return event;
    case ActionKind::kAttentionMode:
      event.kind = EventKind::kAttentionMode;
      event.text = action.mode;
      return event;
    case ActionKind::kLrScale:
      event.kind = EventKind::kLearningRate;
      return event;
    case ActionKind::kBatchSkip:
      event.kind = EventKind::kData;
      return event;
    default:
      return std::nullopt;
  }
}

std::vector<Action> AllActions() {
  std::vector<Action> all;
  for (const ActionKindInfo& info : ActionKinds()) {
    Action action;
    action.kind = info.kind;
    action.value = info.fallback;
    if (info.kind == ActionKind::kAttentionMode) {
      for (const char* const mode : AttentionModes()) {
        action.mode = mode;
        all.push_back(action);
      }
      continue;
    }
    all.push_back(action);
    if (info.kind != ActionKind::kCenterK) continue;
    action.value = 0;
    all.push_back(action);
  }
  return all;
}

// Whether an alert fires at `kLast`, and how often one ended, of an illness from `from` on.
struct Outcome {
  bool fires = false;
  int ended = 0;
};
Outcome Judge(const std::string& rule, const Action& action, int64_t from) {
  RunDescription run = Description();
  // What is switched off was on.
  if (action.kind == ActionKind::kCenterK && action.value == 0) run.attention.centred = true;
  JudgeOptions options;
  // A norm that is as old as that is a jump, whose cause would be the alert's.
  if (rule == "norm") options.off = {Builtin::kCorruption};
  RunJudge judge(options, run);
  auto rows = std::make_shared<RunRows>();
  rows->own_signals.push_back({.name = "kl"});
  rows->AddOwnCell({});
  judge.SetRows(rows);
  std::vector<AlertTransition> out;
  const std::optional<RunEvent> event = EventOf(action);
  for (int64_t step = 0; step <= kLast; ++step) {
    if (step == kAction && event.has_value()) judge.OnEvent(*event, &out);
    if (step == from && rule == "silent") judge.OnSilence(1, 300, &out);
    // Each illness is as old as if it had begun at kOnset: what fires is what the rule sees.
    judge.Observe(SampleAt(run, step, rule, from), &out);
  }
  Outcome outcome;
  for (const AlertTransition& t : out) {
    if (t.rule != rule) continue;
    outcome.fires = t.state == AlertState::kFiring;
    outcome.ended += t.state == AlertState::kResolved;
  }
  return outcome;
}

class RuleReachTest : public testing::TestWithParam<const char*> {};

TEST_P(RuleReachTest, RuleReachMatchesTheJudgesBehaviour) {
  const std::string rule = GetParam();
  std::vector<std::string> seen;
  for (const Action& action : AllActions()) {
    SCOPED_TRACE(ActionText(action));
    const RuleReach reach = ReachOf(action, rule);
    // Those that are told alike are judged alike.
    const std::optional<RunEvent> event = EventOf(action);
    const std::string told = !event.has_value() ? "nothing" : std::to_string(static_cast<int>(event->kind));
    const std::string known = told + " " + std::to_string(static_cast<int>(reach));
    if (std::find(seen.begin(), seen.end(), known) != seen.end()) continue;
    seen.push_back(known);
    if (reach != RuleReach::kMoved && (action.kind != ActionKind::kCenterK || action.value == 1)) {
      const Outcome before = Judge(rule, action, kOnset);
      EXPECT_TRUE(before.fires) << "the illness goes on";
      EXPECT_EQ(before.ended, 0);
    }
    const Outcome after = Judge(rule, action, kAction + 300);
    EXPECT_EQ(after.fires, reach != RuleReach::kOff) << "what the rule can find while the action holds";
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, RuleReachTest, testing::ValuesIn(kRules),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(RuleReachOfPeopleTest, UserRuleIsMovedByEveryActionOnTrial) {
  for (const Action& action : AllActions()) {
    const bool judged = FindActionKind(action.kind)->on_trial;
    EXPECT_EQ(ReachOf(action, "entropy_collapse") == RuleReach::kMoved, judged) << ActionText(action);
  }
}

}  // namespace
}  // namespace bellwether::server
