// Goal: a run that learns nothing is named by its own numbers: a constant loss, gradients or a rate of 0, weights
// that stand still, gradients that add up, a scale that is wrong.  A healthy run is not.
// Method: series as trainings have them, with one thing planted.

#include "server/detect/learning_watch.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

struct Numbers {
  float loss, norm, rate, sigma;
};
using Course = std::function<void(int64_t step, Numbers*)>;

// A loss that falls, gradients that scatter by a fifth, a rate that warms up.
StepSample At(int64_t step, const Course& course, uint32_t seed = 1) {
  std::mt19937 random(static_cast<uint32_t>(step) * 7919u + seed);
  std::normal_distribution<float> normal(0, 1);
  const auto at = static_cast<float>(step);
  Numbers numbers{.loss = 2 + 3 * std::exp(-at / 300) + 0.05f * normal(random),
                  .norm = (0.5f + 2 * std::exp(-at / 100)) * std::exp(0.2f * normal(random)),
                  .rate = 1e-3f * std::min(1.0f, (at + 1) / 100),
                  .sigma = 2 + 1e-3f * at};
  if (course) course(step, &numbers);
  StepSample sample;
  sample.Reset({.layers = 2, .heads = 2, .kv_heads = 2});
  sample.step = step;
  sample.Add(SignalId::kLoss)[0] = numbers.loss;
  sample.Add(SignalId::kGradNorm)[0] = numbers.norm;
  sample.Add(SignalId::kLearningRate)[0] = numbers.rate;
  if (step % 10 == 0) {
    for (float& value : sample.Add(SignalId::kWqSigma)) value = numbers.sigma;
  }
  return sample;
}

struct Word {
  int64_t step = -1;  // Of the first finding; -1: none.
  Finding finding;
  int64_t last = -1;
};

Word Judge(const Course& course, int64_t steps = 2000, uint32_t seed = 1) {
  LearningWatch watch{LearningOptions{}};
  Word word;
  for (int64_t step = 0; step < steps; ++step) {
    watch.Observe(At(step, course, seed));
    if (watch.findings()->empty()) continue;
    word.last = step;
    if (word.step >= 0) continue;
    word.step = step;
    word.finding = watch.findings()->front();
  }
  return word;
}

TEST(LearningWatchTest, HealthyRunsAreSilent) {
  for (uint32_t seed = 0; seed < 50; ++seed) EXPECT_EQ(Judge(nullptr, 2000, seed).step, -1) << seed;
}

TEST(LearningWatchTest, ALossOfExactlyZeroLearnsNothing) {
  const Word word = Judge([](int64_t step, Numbers* n) { n->loss = step >= 500 ? 0 : n->loss; });
  EXPECT_EQ(word.step, 515);
  EXPECT_EQ(word.finding.cause, "nothing to learn");
  EXPECT_EQ(word.finding.first_step, 500);
  EXPECT_EQ(word.finding.severity, Severity::kWarning);
  EXPECT_THAT(word.finding.summary, HasSubstr("the loss has been exactly 0 in 16 values in a row, since step 500"));
}

TEST(LearningWatchTest, AConstantLossIsNamedFromTheFirstStep) {
  EXPECT_EQ(Judge([](int64_t, Numbers* n) { n->loss = 5.545f; }).step, 15);
}

TEST(LearningWatchTest, AGradientOfZeroLearnsNothing) {
  const Word word = Judge([](int64_t step, Numbers* n) { n->norm = step >= 300 ? 0 : n->norm; });
  EXPECT_EQ(word.step, 315);
  EXPECT_THAT(word.finding.summary, HasSubstr("the gradient norm has been 0 in 16 values"));
}

TEST(LearningWatchTest, ARateOfZeroMovesNothing) {
  const Word word = Judge([](int64_t step, Numbers* n) { n->rate = step >= 300 ? 0 : n->rate; });
  EXPECT_EQ(word.step, 307);
  EXPECT_EQ(word.finding.cause, "optimizer does not move");
  // It is that of the first group: where others move it says nothing.
  LearningWatch watch{LearningOptions{}};
  for (int64_t step = 0; step < 100; ++step) {
    StepSample sample = At(step, [](int64_t, Numbers* n) { n->rate = 0; });
    Layout layout = sample.layout();
    layout.tensors = 2;
    sample.Grow(layout);
    sample.Add(SignalId::kTensorMoved)[1] = 1;
    watch.Observe(sample);
    EXPECT_THAT(*watch.findings(), IsEmpty());
  }
}

TEST(LearningWatchTest, WeightsThatStopMovingAreNamed) {
  const Word word = Judge([](int64_t step, Numbers* n) { n->sigma = step >= 500 ? 2.5f : n->sigma; });
  EXPECT_EQ(word.step, 530);
  EXPECT_EQ(word.finding.cause, "optimizer does not move");
  EXPECT_THAT(word.finding.summary, HasSubstr("W_Q and W_K of all layers have stood still for 3 samples"));
}

TEST(LearningWatchTest, WeightsThatNeverMovedSayNothing) {
  EXPECT_EQ(Judge([](int64_t, Numbers* n) { n->sigma = 2; }).step, -1);
}

// Sums of gradients of which neighbours are alike by half, from `from` on.
Course NotCleared(int64_t from) {
  return [from, sum = 0.0f](int64_t step, Numbers* n) mutable {
    sum = step > from ? std::sqrt(sum * sum + n->norm * n->norm + sum * n->norm) : n->norm;
    n->norm = sum;
  };
}

TEST(LearningWatchTest, GradientsThatAddUpAreNamedWithinFiftySteps) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    for (const int64_t from : {200, 1000}) {
      const Word word = Judge(NotCleared(from), 2000, seed);
      EXPECT_GT(word.step, from);
      EXPECT_LE(word.step, from + 50);
      EXPECT_EQ(word.finding.cause, "gradients not cleared");
      EXPECT_GE(word.finding.first_step, from - 30);
      EXPECT_EQ(word.last, 1999);
    }
  }
}

TEST(LearningWatchTest, GradientsThatAddUpFromTheStartAreNamed) {
  const Course course = NotCleared(-1);
  EXPECT_EQ(Judge([&](int64_t step, Numbers* n) {
              n->norm = 1;
              course(step, n);
            }).step,
            23);
}

TEST(LearningWatchTest, ASumThatNoLongerScattersIsNamedSoon) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const Word word = Judge(
        [](int64_t step, Numbers* n) {
          if (step < 500) return;
          const auto at = static_cast<float>(step - 500);
          n->norm = 0.6f + 8 * (1 - std::exp(-at / 4)) + 0.1f * n->norm;
        },
        2000, seed);
    EXPECT_GT(word.step, 500);
    EXPECT_LE(word.step, 520);
    EXPECT_EQ(word.finding.cause, "gradients not cleared");
  }
}

TEST(LearningWatchTest, AnOptimizerThatTakesNoStepIsNamedSoon) {
  LearningWatch watch{LearningOptions{}};
  int64_t told = -1;
  for (int64_t step = 0; step < 600 && told < 0; ++step) {
    StepSample sample = At(step, [](int64_t at, Numbers* n) { n->sigma = at >= 503 ? 2.5f : n->sigma; });
    Layout layout = sample.layout();
    layout.tensors = 1;
    sample.Grow(layout);
    if (step < 503 && step % 10 == 0) sample.Add(SignalId::kTensorMoved)[0] = 1;
    watch.Observe(sample);
    if (!watch.findings()->empty()) told = step;
  }
  EXPECT_EQ(told, 520);
  EXPECT_EQ(watch.findings()->front().cause, "optimizer does not move");
  EXPECT_THAT(watch.findings()->front().summary, HasSubstr("the optimizer takes no step"));
}

TEST(LearningWatchTest, GradientsThatExplodeDoNotAddUp) {
  EXPECT_EQ(Judge([](int64_t step, Numbers* n) {
              if (step > 500) n->norm *= std::exp(0.2f * static_cast<float>(std::min<int64_t>(step - 500, 200)));
              if (step > 500) n->loss += 0.1f * static_cast<float>(step - 500);
            }).step,
            -1);
}

TEST(LearningWatchTest, AScaleTakenOffTwiceOrNeverIsNamed) {
  for (const float factor : {65536.0f, 1 / 65536.0f}) {
    const Word word = Judge([factor](int64_t step, Numbers* n) { n->norm *= step >= 500 ? factor : 1; });
    EXPECT_EQ(word.step, 507);
    EXPECT_EQ(word.finding.cause, "gradients scaled wrongly");
    EXPECT_THAT(word.finding.summary, HasSubstr(factor > 1 ? "not at all" : "twice"));
  }
}

TEST(LearningWatchTest, AGradientThatJumpsWithTheScoresIsNoScale) {
  LearningWatch watch{LearningOptions{}};
  for (int64_t step = 0; step < 600; ++step) {
    watch.Observe(At(step, [](int64_t at, Numbers* n) { n->norm *= at >= 500 ? 1000 : 1; }), step >= 400);
    EXPECT_THAT(*watch.findings(), IsEmpty());
  }
}

TEST(LearningWatchTest, AGradientThatJumpsWithTheLossIsNoScale) {
  EXPECT_EQ(Judge([](int64_t step, Numbers* n) {
              if (step >= 500) n->norm *= 1000, n->loss += 8;
            }).step,
            -1);
}

TEST(LearningJudgeTest, AnAlertEndsOnceTheRunLearnsAgain) {
  RunDescription run;
  run.name = "r";
  run.layout = {.layers = 2, .heads = 2, .kv_heads = 2};
  const auto all = [&](int64_t save_at) {
    auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step < 2400; ++step) {
      judge->Observe(At(step, [](int64_t at, Numbers* n) { n->norm = at >= 500 && at < 600 ? 0 : n->norm; }), &out);
      if (step != save_at) continue;
      const std::string saved = judge->Save();
      judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
      EXPECT_TRUE(judge->Restore(saved));
      EXPECT_EQ(judge->Save(), saved);
    }
    return out;
  };
  const std::vector<AlertTransition> out = all(-1);
  ASSERT_THAT(out, SizeIs(2));
  EXPECT_EQ(out[0].rule, "learning");
  EXPECT_EQ(out[0].key, "q1");
  EXPECT_EQ(out[0].step, 515);
  EXPECT_EQ(out[0].cause, "nothing to learn");
  EXPECT_THAT(out[0].advice, testing::StartsWith("Look at the named number"));
  EXPECT_EQ(out[1].state, AlertState::kResolved);
  for (const int64_t at : {3, 505, 515, 599, 1200}) {
    const std::vector<AlertTransition> again = all(at);
    ASSERT_EQ(again.size(), out.size()) << at;
    EXPECT_EQ(again[0].summary, out[0].summary);
    EXPECT_EQ(again[1].step, out[1].step);
  }
}

}  // namespace
}  // namespace bellwether::server
