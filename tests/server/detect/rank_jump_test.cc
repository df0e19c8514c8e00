// Goal: what jumps above all of its past is seen within ten values, whatever the scatter; what scatters, falls or
// is over soon is not.
// Method: values by hand and of known distributions.

#include "server/detect/rank_jump.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>

#include "server/detect/archive.h"

namespace bellwether::server {
namespace {

class RankJumpTest : public testing::Test {
 protected:
  // Values until it holds, of at most `count` with `more(i)` added; -1: never.
  template <class More>
  int HoldsAfter(int count, const More& more) {
    for (int i = 0; i < count; ++i) {
      jump_.Observe(step_++, 1 + 0.1 * normal_(random_) + more(i), 0.05);
      if (jump_.holds()) return i + 1;
    }
    return -1;
  }
  int HoldsAfter(int count) {
    return HoldsAfter(count, [](int) { return 0.0; });
  }

  int64_t step_ = 0;
  std::mt19937 random_{3};
  std::normal_distribution<double> normal_;
  RankJump jump_;
};

TEST_F(RankJumpTest, JumpAboveThePastIsSeenWithinTenValues) {
  ASSERT_EQ(HoldsAfter(200), -1);
  const int after = HoldsAfter(20, [](int) { return 0.8; });
  EXPECT_GE(after, 8);
  EXPECT_LE(after, 10);
  EXPECT_EQ(jump_.since(), 200);
  EXPECT_NEAR(jump_.level(), 1, 0.05);
  EXPECT_NEAR(jump_.value(), 1.8, 0.1);
}

// An AR(r) of deviation 1: one value says much of the next.
TEST_F(RankJumpTest, ValuesThatAreLikeTheirNeighboursJumpOnlyAtOnce) {
  for (const double kept : {0.9, 0.98}) {
    jump_.Forget();
    double state = 0;
    const auto next = [&] {
      state = kept * state + std::sqrt(1 - kept * kept) * normal_(random_);
      return std::exp(0.08 * state);
    };
    int found = 0;
    for (int i = 0; i < 200000; ++i) {
      jump_.Observe(step_++, next(), 0.05);
      if (!jump_.holds()) continue;
      ++found;
      jump_.Forget();
    }
    EXPECT_LE(found, 2) << kept;
    for (int i = 0; i < 100; ++i) jump_.Observe(step_++, next(), 0.05);
    for (int i = 0; i < 10 && !jump_.holds(); ++i) jump_.Observe(step_++, 1.8 * next(), 0.05);
    EXPECT_TRUE(jump_.holds()) << kept;
  }
}

TEST_F(RankJumpTest, ScatterOfAnyKindIsNone) {
  std::student_t_distribution<double> heavy(1.5);
  std::uniform_int_distribution<int> length(5, 25);
  int left = 0;
  double level = 0;
  for (int kind = 0; kind < 6; ++kind) {
    jump_.Forget();
    int found = 0;
    for (int i = 0; i < 100000; ++i) {
      double value = normal_(random_);
      if (kind == 1) value = heavy(random_);
      if (kind == 2) value = 8 * std::exp(-i / 300.0) + 0.05 * normal_(random_);
      if (kind == 3) value = 0.1 * std::sin(i / 60.0) + 0.05 * normal_(random_);
      if (kind == 4) value = 0.3 * std::sin(i / 20.0) + 0.05 * normal_(random_);
      // Data that is not shuffled: stretches of 5 to 25 values, each with a level of its own.
      if (kind == 5 && --left <= 0) left = length(random_), level = 0.05 * normal_(random_);
      if (kind == 5) value = level + 0.05 * normal_(random_);
      jump_.Observe(i, value, 0.05);
      found += jump_.holds() ? 1 : 0;
      if (jump_.holds()) jump_.Forget();
    }
    EXPECT_LE(found, kind == 5 ? 5 : 0) << kind;
  }
}

TEST_F(RankJumpTest, RiseOverManyValuesIsNone) {
  ASSERT_EQ(HoldsAfter(200), -1);
  for (const double slope : {0.01, 0.02, 0.05}) {
    EXPECT_EQ(HoldsAfter(300, [slope](int i) { return slope * i; }), -1) << slope;
    jump_.Forget();
  }
}

TEST_F(RankJumpTest, FewHighValuesAreNone) {
  ASSERT_EQ(HoldsAfter(200), -1);
  EXPECT_EQ(HoldsAfter(200, [](int i) { return i < 7 ? 5.0 : 0.0; }), -1);
}

TEST_F(RankJumpTest, RiseBelowTheLeastIsNone) {
  for (int i = 0; i < 200; ++i) {
    jump_.Observe(i, (i < 100 ? 1 : 1.04) + 1e-6 * i, 0.05);
    ASSERT_FALSE(jump_.holds());
  }
}

TEST_F(RankJumpTest, ReturnToThePastEndsIt) {
  ASSERT_EQ(HoldsAfter(200), -1);
  ASSERT_GT(HoldsAfter(20, [](int) { return 0.8; }), 0);
  for (int i = 0; i < 10; ++i) jump_.Observe(step_++, 1, 0.05);
  EXPECT_FALSE(jump_.holds());
}

TEST_F(RankJumpTest, SavedStateGoesOn) {
  ASSERT_EQ(HoldsAfter(200), -1);
  for (int i = 0; i < 5; ++i) jump_.Observe(step_++, 2, 0.05);
  std::string saved;
  StateWriter writer(&saved);
  writer(jump_);
  RankJump restored;
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end() && restored.Consistent());
  for (int i = 0; i < 5; ++i) restored.Observe(step_++, 2, 0.05);
  EXPECT_TRUE(restored.holds());
  EXPECT_EQ(restored.since(), 200);
}

}  // namespace
}  // namespace bellwether::server
