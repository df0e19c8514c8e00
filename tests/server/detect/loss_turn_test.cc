// Goal: a loss that turns is told within some steps, also in a short run, and by the learning rate
// if that has just risen; what is no turn is not told.
// Method: losses by hand through a whole judge.

#include "server/detect/loss_turn.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/detect/run_judge.h"
#include "tests/support/judged_samples.h"

namespace bellwether::server {
namespace {

struct LossRun {
  int64_t last_step = 800;
  double noise = 0.04;
  int64_t rate_rises = -1;  // Tenfold, at this step.
  std::vector<RunEvent> events;
  int64_t saved_each = 0;
};

// A loss that falls from 5.5 to 2, to which `more(step)` is added.
template <class More>
std::vector<AlertTransition> JudgeLosses(const LossRun& course, const More& more) {
  const RunDescription run = SyntheticRun();
  auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  for (int64_t step = 0; step <= course.last_step; ++step) {
    StepSample sample = SampleAt(run, {.period = 500, .drift_from = -1}, step);
    const double level = 2 + 3.5 * std::exp(-static_cast<double>(step) / 60);
    sample.Add(SignalId::kLoss)[0] = static_cast<float>(level + more(step) + course.noise * normal(random));
    const bool risen = course.rate_rises >= 0 && step >= course.rate_rises;
    sample.Add(SignalId::kLearningRate)[0] = risen ? 2e-3f : 2e-4f;
    for (const RunEvent& event : course.events) {
      if (event.step == step) judge->OnEvent(event, &out);
    }
    judge->Observe(sample, &out);
    if (course.saved_each > 0 && step % course.saved_each == 0) {
      auto again = std::make_unique<RunJudge>(JudgeOptions{}, run);
      EXPECT_TRUE(again->Restore(judge->Save()));
      judge = std::move(again);
    }
  }
  return out;
}

double StepUp(int64_t step, int64_t from, double by) { return step >= from ? by : 0; }

TEST(LossTurnTest, RiseAfterTheLearningRateWarnsWithinTwentySteps) {
  for (const int64_t at : {100, 300, 600}) {
    const auto out = JudgeLosses({.rate_rises = at}, [at](int64_t step) { return StepUp(step, at + 2, 0.7); });
    const auto told = std::find_if(out.begin(), out.end(), [](const AlertTransition& t) {
      // It may have been called a spike before, or the rate alone told.
      return t.severity == Severity::kWarning && t.rule == "loss";
    });
    ASSERT_NE(told, out.end()) << at;
    EXPECT_EQ(told->key, out[0].key);
    EXPECT_LE(told->step, at + 20);
    EXPECT_EQ(told->cause, "learning rate too high");
    EXPECT_THAT(told->summary, testing::HasSubstr("after the learning rate rose tenfold at step"));
    EXPECT_THAT(told->advice, testing::StartsWith("Set the learning rate back to 0.0002"));
  }
}

TEST(LossTurnTest, TurnOfAShortRunIsInformationUntilItLasts) {
  // Over 30 steps, so it is no step change.
  const auto out = JudgeLosses({.last_step = 260}, [](int64_t step) {
    return 0.7 * std::clamp(static_cast<double>(step - 199) / 30, 0.0, 1.0);
  });
  ASSERT_GE(out.size(), 2u);
  EXPECT_EQ(out[0].severity, Severity::kInfo);
  EXPECT_LE(out[0].step, 235);
  EXPECT_THAT(out[0].summary, testing::HasSubstr(" from step 2"));
  EXPECT_EQ(out[1].severity, Severity::kWarning);
  EXPECT_EQ(out[1].key, out[0].key);
  EXPECT_LE(out[1].step, 265);
  EXPECT_EQ(out[1].cause, "unknown");
}

TEST(LossTurnTest, LossThatJumpsAndStaysIsAStepChange) {
  const auto out = JudgeLosses({.last_step = 260}, [](int64_t step) { return StepUp(step, 200, 0.7); });
  const auto told =
      std::find_if(out.begin(), out.end(), [](const AlertTransition& t) { return t.severity == Severity::kWarning; });
  ASSERT_NE(told, out.end());
  EXPECT_EQ(told->key, out[0].key);
  EXPECT_LE(told->step, 210);
  EXPECT_EQ(told->cause, "step change of the loss");
  EXPECT_THAT(told->summary, testing::HasSubstr("the loss has jumped from 2.24 to 2.82 at step 200 and stays"));
}

TEST(LossTurnTest, WanderingSpikesAndNewDataAreNoTurn) {
  const auto severity = [](const LossRun& course, const auto& more) {
    Severity worst = Severity::kNone;
    for (const AlertTransition& t : JudgeLosses(course, more)) worst = std::max(worst, t.severity);
    return worst;
  };
  EXPECT_EQ(severity({}, [](int64_t) { return 0.0; }), Severity::kNone);
  EXPECT_EQ(severity({.noise = 0.3}, [](int64_t) { return 0.0; }), Severity::kNone);
  EXPECT_EQ(severity({}, [](int64_t step) { return 0.15 * std::sin(static_cast<double>(step) / 30); }),
            Severity::kNone);
  EXPECT_EQ(severity({}, [](int64_t step) { return step % 200 < 5 && step > 100 ? 3.0 : 0.0; }), Severity::kInfo);
  for (const EventKind kind : {EventKind::kData, EventKind::kSequenceLength, EventKind::kBatchSize}) {
    const LossRun course{.events = {{.step = 400, .kind = kind}}};
    EXPECT_EQ(severity(course, [](int64_t step) { return StepUp(step, 400, 0.5); }), Severity::kNone);
  }
}

TEST(LossTurnTest, RestoredJudgeSeesTheSameTurn) {
  const auto turn = [](int64_t step) { return StepUp(step, 300, 0.7); };
  const auto expected = JudgeLosses({.last_step = 400}, turn);
  const auto out = JudgeLosses({.last_step = 400, .saved_each = 7}, turn);
  ASSERT_EQ(out.size(), expected.size());
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(out[i].step, expected[i].step);
    EXPECT_EQ(out[i].summary, expected[i].summary);
  }
}

}  // namespace
}  // namespace bellwether::server
