// Goal: an optimizer's own steps name a rate that is too high, a warm-up that is missing, moments that have
// underflowed or follow too slowly, and rates that jump.  A healthy run is not named.
// Method: samples as AdamW gives them, with one thing planted.

#include "server/detect/optimizer_watch.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace bellwether::server {
namespace {

using testing::HasSubstr;

struct OptimizerStep {
  float rate = 0;
  double change = 0.005;  // Of a parameter's size.
  double lag = 0.8;       // Root of the mean square; below 0: no second moments.
  double size = 0.02;     // Root of the parameter's mean square.
};
using OptimizerCourse = std::function<void(int64_t step, OptimizerStep*)>;

constexpr int kTensors = 4;
constexpr float kElements = 1024;

StepSample OptimizerSample(int64_t step, const OptimizerCourse& course) {
  OptimizerStep at;
  at.rate = 1e-3f * std::min(1.0f, static_cast<float>(step + 1) / 50);
  if (course) course(step, &at);
  StepSample sample;
  Layout layout{.layers = 1, .heads = 2, .kv_heads = 2};
  layout.tensors = kTensors;
  sample.Reset(layout);
  sample.step = step;
  if (at.rate > 0) sample.Add(SignalId::kLearningRate)[0] = at.rate;
  if (step % 10 != 0) return sample;
  const auto fill = [&](SignalId signal, double value) {
    std::ranges::fill(sample.Add(signal), static_cast<float>(value));
  };
  const double squares = at.size * at.size * kElements;
  fill(SignalId::kTensorElements, kElements);
  fill(SignalId::kTensorWeightSumsq, squares);
  fill(SignalId::kTensorChangeWeightSumsq, squares);
  fill(SignalId::kTensorChangeSumsq, at.change * at.change * squares);
  if (at.lag >= 0) fill(SignalId::kTensorLagSum, at.lag * at.lag * kElements);
  return sample;
}

struct OptimizerWord {
  int64_t step = -1;  // Of the first finding; -1: none.
  Finding finding;
};

OptimizerWord JudgeOptimizer(const OptimizerCourse& course, int64_t steps = 600) {
  OptimizerWatch watch{LearningOptions{}};
  for (int64_t step = 0; step < steps; ++step) {
    watch.Observe(OptimizerSample(step, course), nullptr);
    if (!watch.findings()->empty()) return {step, watch.findings()->front()};
  }
  return {};
}

TEST(OptimizerWatchTest, AHealthyRunIsSilent) { EXPECT_EQ(JudgeOptimizer(nullptr).step, -1); }

TEST(OptimizerWatchTest, StepsThatChangeParametersTooMuchAreNamed) {
  const OptimizerWord word = JudgeOptimizer([](int64_t, OptimizerStep* s) { s->change = 0.06; });
  EXPECT_EQ(word.step, 10);
  EXPECT_EQ(word.finding.cause, "learning rate too high");
  EXPECT_THAT(word.finding.summary, HasSubstr("a step changes parameters by more than 5 % of their size"));
}

TEST(OptimizerWatchTest, AFullRateFromTheFirstStepIsNamed) {
  const OptimizerWord word = JudgeOptimizer([](int64_t, OptimizerStep* s) {
    s->change = 0.06;
    s->rate = 5e-3f;
  });
  EXPECT_EQ(word.finding.cause, "warm-up missing");
}

TEST(OptimizerWatchTest, StepsBeyondAdamsAreOfMomentsThatUnderflow) {
  const OptimizerWord word = JudgeOptimizer([](int64_t step, OptimizerStep* s) {
    if (step < 100 || step % 20 != 0) return;
    s->change = 20 * s->rate / s->size;
    s->lag = 2;
  });
  EXPECT_EQ(word.step, 120);
  EXPECT_EQ(word.finding.cause, "epsilon too small");
  EXPECT_THAT(word.finding.summary, HasSubstr("up to 20 learning rates"));
}

TEST(OptimizerWatchTest, GroupsOfALargerRateDoNotUnderflow) {
  EXPECT_EQ(JudgeOptimizer([](int64_t, OptimizerStep* s) {
              s->size = 1;
              s->change = 20 * s->rate / s->size;
            }).step,
            -1);
}

TEST(OptimizerWatchTest, SecondMomentsThatStayBehindAreNamed) {
  const OptimizerWord word = JudgeOptimizer([](int64_t step, OptimizerStep* s) { s->lag = step >= 200 ? 5 : s->lag; });
  EXPECT_EQ(word.step, 210);
  EXPECT_EQ(word.finding.cause, "second moment too slow");
  EXPECT_EQ(word.finding.first_step, 200);
}

TEST(OptimizerWatchTest, AnOddBatchLagsInOneSampleOnly) {
  EXPECT_EQ(JudgeOptimizer([](int64_t step, OptimizerStep* s) { s->lag = step == 200 ? 20 : s->lag; }).step, -1);
}

TEST(OptimizerWatchTest, OneSampleOfLagNamesAGradientThatHasJumped) {
  OptimizerWatch watch{LearningOptions{}};
  const auto jumped = [&watch](int64_t step, double lag) {
    watch.Observe(OptimizerSample(step, [lag](int64_t, OptimizerStep* s) { s->lag = lag; }), nullptr);
    std::vector<Finding> found = {
        Finding::OfRun(Rule::kGradient, Severity::kWarning, {.signal = "grad_norm", .detector = kRankDetector})};
    watch.NameJump(&found);
    return found.front();
  };
  for (int64_t step = 0; step < 200; step += 10) EXPECT_EQ(jumped(step, 0.8).cause, "");
  const Finding named = jumped(200, 4);
  EXPECT_EQ(named.cause, "second moment too slow");
  EXPECT_THAT(named.summary, HasSubstr("gradients are 4 times what they expect, since step 200"));
  EXPECT_EQ(jumped(210, 2).cause, "");
}

TEST(OptimizerWatchTest, LagOfAnyStepNamesAGradientThatHasJumped) {
  for (const auto& [before, now, named] : {std::tuple(1.3f, 7.5f, true), {4.0f, 7.5f, false}, {1.3f, 5.0f, false}}) {
    OptimizerWatch watch{LearningOptions{}};
    for (const float lag : {before, now}) {
      StepSample sample = OptimizerSample(lag == before ? 100 : 110, nullptr);
      sample.Add(SignalId::kMomentLagMax)[0] = lag;
      watch.Observe(sample, nullptr);
    }
    std::vector<Finding> found = {
        Finding::OfRun(Rule::kGradient, Severity::kWarning, {.signal = "grad_norm", .detector = kRankDetector})};
    watch.NameJump(&found);
    EXPECT_EQ(found[0].cause == "second moment too slow", named) << before << " " << now;
  }
}

TEST(OptimizerWatchTest, ARateThatJumpsBeyondItsPastIsNamed) {
  const OptimizerWord word = JudgeOptimizer([](int64_t step, OptimizerStep* s) { s->rate *= step >= 203 ? 6 : 1; });
  EXPECT_EQ(word.step, 203);
  EXPECT_EQ(word.finding.cause, "learning rate too high");
  EXPECT_THAT(word.finding.summary, HasSubstr("risen 6 times at once"));
}

TEST(OptimizerWatchTest, AWarmRestartRisesToWhatItWas) {
  EXPECT_EQ(JudgeOptimizer([](int64_t step, OptimizerStep* s) {
              if (step >= 60) s->rate = 1e-3f * (1.01f - static_cast<float>(step % 100) / 100);
            }).step,
            -1);
}

TEST(OptimizerWatchTest, ARateThatFallsAtOnceStalls) {
  const OptimizerWord word = JudgeOptimizer([](int64_t step, OptimizerStep* s) { s->rate /= step >= 155 ? 100 : 1; });
  EXPECT_EQ(word.step, 155);
  EXPECT_EQ(word.finding.cause, "stall");
}

TEST(OptimizerWatchTest, SchedulesThatDecayAreSilent) {
  EXPECT_EQ(JudgeOptimizer([](int64_t step, OptimizerStep* s) { s->rate /= step >= 155 ? 10 : 1; }).step, -1);
  EXPECT_EQ(JudgeOptimizer([](int64_t step, OptimizerStep* s) {
              if (step >= 100) s->rate = 1e-3f * static_cast<float>(600 - step) / 500;
            }).step,
            -1);
}

TEST(OptimizerWatchTest, AnAnnouncedRateIsMeant) {
  OptimizerWatch watch{LearningOptions{}};
  for (int64_t step = 0; step < 300; ++step) {
    if (step == 200) watch.Excuse();
    watch.Observe(OptimizerSample(step, [](int64_t at, OptimizerStep* s) { s->rate *= at >= 200 ? 6 : 1; }), nullptr);
    EXPECT_TRUE(watch.findings()->empty()) << step;
  }
}

TEST(OptimizerWatchTest, WithoutSecondMomentsStepsSayNothing) {
  EXPECT_EQ(JudgeOptimizer([](int64_t, OptimizerStep* s) {
              s->lag = -1;
              s->change = 0.5;
            }).step,
            -1);
}

}  // namespace
}  // namespace bellwether::server
