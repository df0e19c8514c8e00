// Goal: a run of some hundred steps of minutes is judged before it ends, and how a pretrained model was found is no
// alarm.  Runs of quick steps are judged as ever.
// Method: the made-up run of 4 x 4 heads, with the wall time of its steps, and states that are there from the start.

#include "server/detect/step_pace.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/detect/run_judge.h"
#include "tests/support/judged_samples.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

StepSample SampleOfPace(int64_t step, double seconds) {
  StepSample sample;
  sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1});
  sample.step = step;
  sample.Add(SignalId::kStepSeconds)[0] = static_cast<float>(seconds);
  return sample;
}

TEST(StepPaceTest, StepTakesTheMedianOfTheNewestOnes) {
  StepPace pace;
  EXPECT_EQ(pace.seconds(), 0);
  for (int64_t step = 0; step < 40; ++step) pace.Observe(SampleOfPace(step, step % 10 == 0 ? 600 : 20));
  EXPECT_EQ(pace.seconds(), 20);
  for (int64_t step = 40; step < 60; ++step) pace.Observe(SampleOfPace(step, 30));
  EXPECT_EQ(pace.seconds(), 30);
  pace.Observe(SampleOfPace(60, kNan));
  EXPECT_EQ(pace.seconds(), 30);
}

TEST(StepPaceTest, SpansAreShorterWhileSlowRunsAreYoung) {
  const ContextOptions options;
  StepPace slow, quick;
  std::vector<int32_t> by;
  for (int64_t step = 1000; step <= 1400; ++step) {
    slow.Observe(SampleOfPace(step, 60));
    quick.Observe(SampleOfPace(step, 2));
    EXPECT_EQ(quick.Shorter(options, step - 1000), 1);
    if (step % 80 == 0) by.push_back(slow.Shorter(options, step - 1000));
  }
  EXPECT_THAT(by, testing::ElementsAre(16, 4, 2, 2, 1));
}

TEST(StepPaceTest, ShorterSpansAreOptionsThatFilesMayHave) {
  const JudgeOptions shorter = WithShorterSpans({}, 16);
  EXPECT_EQ(shorter.trend.batch_steps, 1);
  EXPECT_EQ(shorter.context.settle_steps, 12);
  EXPECT_GE(shorter.loss.persist_steps, shorter.loss.turn_values);
  EXPECT_GE(shorter.loss.critical_steps, shorter.loss.persist_steps);
  EXPECT_GE(shorter.own.persist_batches, shorter.own.hold_batches);
  JudgeOptions quick;
  quick.loss.persist_steps = 5;
  EXPECT_EQ(WithShorterSpans(quick, 4).loss.persist_steps, 5) << "what is shorter already stays";
}

// The transitions of 200 steps, each of them sampled, of a run that its head 2.1 drifts in from step 60 on.
std::vector<AlertTransition> OfTwoHundredSteps(double seconds, int64_t drift_from) {
  const RunDescription run = SyntheticRun();
  auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step < 200; ++step) {
    StepSample sample = SampleAt(run, {.period = 1, .drift_from = drift_from, .doubling = 15}, step);
    sample.Add(SignalId::kStepSeconds)[0] = static_cast<float>(seconds);
    sample.Add(SignalId::kLearningRate)[0] = 1e-6f;
    judge->Observe(sample, &out);
    if (step != 100) continue;
    // A server that starts again goes on where it was.
    auto other = std::make_unique<RunJudge>(JudgeOptions{}, run);
    EXPECT_TRUE(other->Restore(judge->Save()));
    EXPECT_EQ(other->Save(), judge->Save());
    judge = std::move(other);
  }
  return out;
}

TEST(StepPaceTest, DriftIsToldInTwoHundredStepsOfMinutes) {
  const std::vector<AlertTransition> told = OfTwoHundredSteps(90, 60);
  ASSERT_FALSE(told.empty());
  EXPECT_EQ(told[0].rule, "drift");
  EXPECT_EQ(told[0].strongest, kIll);
  EXPECT_LT(told[0].step, 140);
  ASSERT_TRUE(told[0].eta.known);
  EXPECT_EQ(told[0].eta.step_seconds, 90);
  EXPECT_THAT(told[0].summary, HasSubstr(" h) left."));
  EXPECT_THAT(OfTwoHundredSteps(90, -1), IsEmpty());
  EXPECT_THAT(OfTwoHundredSteps(1, 60), IsEmpty()) << "steps of a second may be noise for so long";
}

// The worst severity that the rule has told, of 2,500 steps of a run in which a head of a pretrained model has
// scores of 3,000 and ties in nearly all rows, and 40 times the others' ratio, times `grown` from step 1,500 on.
// `gone`: in the steps 500 to 1,000 it is as the others.
Severity WorstOfPretrained(const std::string& rule, float grown, bool gone = false) {
  const RunDescription run = SyntheticRun();
  RunJudge judge({}, run);
  std::vector<AlertTransition> out;
  const auto head = static_cast<size_t>(kIll.layer * 4 + kIll.head);
  for (int64_t step = 0; step <= 2500; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    if (sample.has(SignalId::kLogitMax) && !(gone && step >= 500 && step < 1000)) {
      const float times = step < 1500 ? 1 : grown;
      sample.Add(SignalId::kLogitMax)[head] = 3000 * times;
      sample.Add(SignalId::kTiedRowsBf16)[head] = 0.9f * sample.matrix(SignalId::kRows)[head];
      sample.Add(SignalId::kCommonModeSum)[head] *= 40 * times;
    }
    judge.Observe(sample, &out);
  }
  Severity worst = Severity::kNone;
  for (const AlertTransition& t : out) worst = t.rule == rule ? std::max(worst, t.severity) : worst;
  return worst;
}

TEST(StepPaceTest, StatesOfPretrainedModelsAlarmOnceTheyGrow) {
  for (const float grown : {1.0f, 1.2f}) {
    EXPECT_EQ(WorstOfPretrained("logits", grown), Severity::kInfo) << grown;
    EXPECT_EQ(WorstOfPretrained("drift", grown), Severity::kNone) << grown;
    EXPECT_EQ(WorstOfPretrained("ties", grown), Severity::kNone) << grown;
  }
  EXPECT_GE(WorstOfPretrained("logits", 1, /*gone=*/true), Severity::kWarning) << "what comes back is new";
  EXPECT_EQ(std::max(WorstOfPretrained("logits", 2), WorstOfPretrained("drift", 2)), Severity::kCritical);
}

TEST(StepPaceTest, AllHeadsOfAPretrainedModelMayHaveLargeScores) {
  const RunDescription run = SyntheticRun();
  RunJudge judge({}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 2000; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    if (sample.has(SignalId::kLogitMax)) {
      std::ranges::fill(sample.Add(SignalId::kLogitMax), step < 1500 ? 250.0f : 600.0f);
      std::ranges::fill(sample.Add(SignalId::kEntropySum), 0.1f);
    }
    judge.Observe(sample, &out);
    if (step == 1499) {
      ASSERT_THAT(out, SizeIs(1));
      EXPECT_EQ(out[0].severity, Severity::kInfo);
      EXPECT_THAT(out[0].summary, HasSubstr(" was beyond its limits in the first sample"));
      EXPECT_THAT(out[0].advice, HasSubstr("Look whether the model was so before"));
    }
  }
  ASSERT_GE(out.size(), 2u);
  EXPECT_EQ(out[1].rule, "logits");
}

TEST(StepPaceTest, AReloadKeepsSpansAsShortAsTheyAre) {
  const RunDescription run = SyntheticRun();
  std::vector<std::string> saved;
  for (const bool reloads : {false, true}) {
    RunJudge judge({}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step < 500; ++step) {
      StepSample sample = SampleAt(run, {.period = 1, .drift_from = 60, .doubling = 40}, step);
      sample.Add(SignalId::kStepSeconds)[0] = 90;
      judge.Observe(sample, &out);
      if (reloads && step == 100) judge.SetOptions({}, &out);
    }
    saved.push_back(judge.Save());
  }
  EXPECT_EQ(saved[0], saved[1]);
}

// The step of the first warning of a drift from step 200 on, in a run that lost `lost` of 6 by then.
int64_t WarningOfEarlyDrift(double lost) {
  const RunDescription run = SyntheticRun();
  RunJudge judge({}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 3000; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = 200, .doubling = 150}, step);
    float& loss = sample.Add(SignalId::kLoss)[0];
    // Its noise alone is left.
    loss -= static_cast<float>(2 + 4 * std::exp(-static_cast<double>(step) / 800));
    loss += static_cast<float>(6 - lost * std::min(1.0, static_cast<double>(step) / 200));
    sample.Add(SignalId::kLearningRate)[0] = 1e-5f;
    judge.Observe(sample, &out);
    for (const AlertTransition& told : out) {
      if (told.rule == "drift") return told.step;
    }
  }
  return -1;
}

TEST(StepPaceTest, FineTuneNeedNotWaitUntilHeadsHaveTakenShape) {
  EXPECT_LT(WarningOfEarlyDrift(0.6), 750);
  EXPECT_GT(WarningOfEarlyDrift(4), 1000);
}

}  // namespace
}  // namespace bellwether::server
