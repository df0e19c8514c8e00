// Goal: a loss that jumps within a step and stays is a warning within 20 steps, a small one within 64.  What
// rises over many steps, is over soon, or only scatters is none.
// Method: losses by hand.

#include "server/detect/loss_step.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "server/detect/archive.h"

namespace bellwether::server {
namespace {

constexpr float kNotTold = std::numeric_limits<float>::quiet_NaN();

class LossStepTest : public testing::Test {
 protected:
  double Usual() { return 2.4 + 0.25 * normal_(random_); }
  // Steps until it holds, of at most `steps` with `more(i)` added; -1: never.
  template <class More>
  int64_t HoldsAfter(int64_t steps, const More& more) {
    for (int64_t i = 0; i < steps; ++i) {
      watch_.Observe(step_++, static_cast<float>(Usual() + more(i)), kNotTold, true);
      if (watch_.holds()) return i + 1;
    }
    return -1;
  }
  int64_t HoldsAfter(int64_t steps) {
    return HoldsAfter(steps, [](int64_t) { return 0.0; });
  }

  int64_t step_ = 0;
  std::mt19937 random_{5};
  std::normal_distribution<double> normal_;
  LossStep watch_{LossOptions{}};
};

TEST_F(LossStepTest, JumpOfThreeDeviationsIsSeenWithinTwentySteps) {
  int in_time = 0;
  for (int run = 0; run < 20; ++run) {
    watch_.Forget();
    step_ = 0;
    ASSERT_EQ(HoldsAfter(200), -1);
    const int64_t after = HoldsAfter(40, [](int64_t) { return 0.75; });
    ASSERT_GT(after, 0) << run;
    in_time += after <= 20 ? 1 : 0;
    EXPECT_NEAR(static_cast<double>(watch_.since()), 200, 5);
  }
  EXPECT_GE(in_time, 17);
  std::vector<Finding> found(3);
  found[0].severity = found[1].severity = Severity::kWarning;
  found[1].cause = "learning rate too high";
  watch_.Name(&found);
  EXPECT_EQ(found[0].cause, "step change of the loss");
  EXPECT_EQ(found[1].cause, "learning rate too high");
  EXPECT_EQ(found[2].cause, "");
  EXPECT_THAT(found[0].summary, testing::HasSubstr("the loss has jumped from 2."));
}

TEST_F(LossStepTest, JumpOfOneDeviationNeedsMoreSteps) {
  int found = 0;
  for (int run = 0; run < 20; ++run) {
    watch_.Forget();
    ASSERT_EQ(HoldsAfter(150), -1);
    found += HoldsAfter(64, [](int64_t) { return 0.25; }) > 0 ? 1 : 0;
  }
  EXPECT_GE(found, 8);
}

TEST_F(LossStepTest, RepeatedLabelsExplainPartOfTheScatter) {
  std::uniform_real_distribution<double> share(0.1, 0.4);
  const auto after = [&](bool told) {
    std::vector<int64_t> steps;
    for (int run = 0; run < 21; ++run) {
      watch_.Forget();
      for (int64_t i = 0; i < 300; ++i) {
        const double repeated = share(random_);
        const double loss = 3 - 3 * repeated + 0.1 * normal_(random_) + (i >= 200 ? 0.25 : 0);
        watch_.Observe(i, static_cast<float>(loss), told ? static_cast<float>(repeated) : kNotTold, true);
        if (watch_.holds()) {
          steps.push_back(i - 200);
          break;
        }
      }
    }
    std::sort(steps.begin(), steps.end());
    return steps[steps.size() / 2];
  };
  EXPECT_LE(after(true), 16);
  EXPECT_GE(after(false), 20);
}

TEST_F(LossStepTest, HealthyLossesOfAllKindsAreNoStep) {
  std::student_t_distribution<double> tails(4);
  for (int kind = 0; kind < 4; ++kind) {
    for (int run = 0; run < 10; ++run) {
      watch_.Forget();
      for (int64_t i = 0; i < 3000; ++i) {
        const auto at = static_cast<double>(i);
        double loss = 2.4 + 0.25 * normal_(random_);
        if (kind == 1) loss = 2.4 + 0.1 * tails(random_);
        if (kind == 2) loss = 2 + 8 * std::exp(-at / 300) + 0.05 * normal_(random_);
        if (kind == 3) loss = 2.4 + 0.1 * std::sin(at / 60) + 0.05 * normal_(random_);
        watch_.Observe(i, static_cast<float>(std::max(0.01, loss)), kNotTold, true);
        ASSERT_FALSE(watch_.holds()) << kind << " at " << i;
      }
    }
  }
}

TEST_F(LossStepTest, RiseOverManyStepsIsNoStep) {
  ASSERT_EQ(HoldsAfter(200), -1);
  EXPECT_EQ(HoldsAfter(200, [](int64_t i) { return 0.05 * static_cast<double>(i); }), -1);
}

TEST_F(LossStepTest, FewBadBatchesAreNoStep) {
  ASSERT_EQ(HoldsAfter(200), -1);
  EXPECT_EQ(HoldsAfter(200, [](int64_t i) { return i < 6 ? 4.0 : 0.0; }), -1);
}

TEST_F(LossStepTest, LossThatComesBackEndsIt) {
  ASSERT_EQ(HoldsAfter(200), -1);
  ASSERT_GT(HoldsAfter(30, [](int64_t) { return 1.0; }), 0);
  for (int i = 0; i < 10; ++i) watch_.Observe(step_++, static_cast<float>(Usual()), kNotTold, true);
  EXPECT_FALSE(watch_.holds());
}

TEST_F(LossStepTest, LossesBelowZeroAreNotJudged) {
  for (int64_t i = 0; i < 300; ++i) {
    watch_.Observe(i, static_cast<float>(0.1 * normal_(random_) + (i > 200 ? 1.0 : 0)), kNotTold, true);
    ASSERT_FALSE(i < 230 && watch_.holds());
  }
}

TEST_F(LossStepTest, NothingIsFoundWhileBadDataIs) {
  ASSERT_EQ(HoldsAfter(200), -1);
  for (int i = 0; i < 30; ++i) watch_.Observe(step_++, static_cast<float>(Usual() + 1), kNotTold, false);
  EXPECT_FALSE(watch_.holds());
  EXPECT_EQ(HoldsAfter(100), -1) << "its losses are no past";
}

TEST_F(LossStepTest, SavedStateGoesOn) {
  ASSERT_EQ(HoldsAfter(200), -1);
  ASSERT_GT(HoldsAfter(30, [](int64_t) { return 1.0; }), 0);
  std::string saved;
  StateWriter writer(&saved);
  writer(watch_);
  LossStep restored{LossOptions{}};
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end() && restored.Consistent());
  EXPECT_EQ(restored.since(), watch_.since());
  EXPECT_TRUE(restored.holds());
}

}  // namespace
}  // namespace bellwether::server
