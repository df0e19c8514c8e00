// Goal: the heads that differ are found, from the step on from which they do,
// in twins and in runs of two seeds; noise, single samples, what is not finite
// and what was not measured do not mislead.
// Method: made-up runs of known differences; seeds are fixed.
#include "server/query/compare_runs.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "server/model/step_sample.h"

namespace bellwether::server {
namespace {

constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kFloatInf = std::numeric_limits<float>::infinity();
constexpr size_t kHeads = 64;
constexpr int kSteps = 64;

// A run of heads whose log2 levels are drawn once, with noise in time; `edit`
// may change a value.
class MadeUpRun {
 public:
  MadeUpRun(unsigned seed, double level_spread, double noise) : random_(seed), noise_(noise) {
    std::normal_distribution<double> level(0, level_spread);
    for (double& head : levels_) head = level(random_);
  }
  std::vector<float> Next() {
    std::normal_distribution<double> draw(0, noise_);
    std::vector<float> values;
    for (const double level : levels_) values.push_back(static_cast<float>(std::exp2(level + draw(random_))));
    return values;
  }

 private:
  std::mt19937 random_;
  const double noise_;
  std::array<double, kHeads> levels_{};
};

int Differing(const RunComparison& comparison, size_t heads = kHeads) {
  int differing = 0;
  for (size_t i = 0; i < heads; ++i) differing += comparison.Of(i).first >= 0;
  return differing;
}

TEST(CompareRunsTest, TwinsDifferInTheHeadThatDrifts) {
  MadeUpRun run(1, 1, 0.05), twin(1, 1, 0.05);
  RunComparison comparison(kHeads, 0.5);
  for (int i = 0; i < kSteps; ++i) {
    std::vector<float> ill = run.Next();
    if (i > 20) ill[7] *= static_cast<float>(std::exp2(0.1 * (i - 20)));
    comparison.Add(100 * i, ill, twin.Next());
  }
  EXPECT_EQ(Differing(comparison), 1);
  const auto head = comparison.Of(7);
  EXPECT_NEAR(head.first, 25, 1) << "log2 passes 0.5";
  EXPECT_EQ(head.before, head.first - 1);
  EXPECT_NEAR(head.ratio, 4.3, 0.3);
  EXPECT_EQ(comparison.band(head.first), 0.5);
}

TEST(CompareRunsTest, RunsOfTwoSeedsDifferOnlyInIllHeads) {
  MadeUpRun run(1, 0.7, 0.1), other(2, 0.7, 0.1);
  RunComparison comparison(kHeads, 0.5);
  for (int i = 0; i < kSteps; ++i) {
    std::vector<float> ill = run.Next();
    // At last most heads are lost: they must not hide each other.
    if (i > 16) ill[7] *= static_cast<float>(std::exp2(0.25 * (i - 16)));
    for (size_t n = 20; i > 40 && n < kHeads; ++n) ill[n] *= static_cast<float>(std::exp2(0.5 * (i - 40)));
    comparison.Add(100 * i, ill, other.Next());
  }
  const auto first = comparison.Of(7);
  EXPECT_GE(first.first, 17);
  EXPECT_LE(first.first, 40);
  EXPECT_GT(comparison.band(first.first), 1.5);
  EXPECT_LT(comparison.band(kSteps - 1), 4) << "as wide as the calmer run's heads are apart";
  int lost = 0, wrong = 0;
  for (size_t n = 0; n < kHeads; ++n) {
    const int from = comparison.Of(n).first;
    if (n >= 20) lost += from >= 40;
    if (n < 20 && n != 7) wrong += from >= 0;
  }
  EXPECT_EQ(lost, 44);
  EXPECT_LE(wrong, 1);
}

TEST(CompareRunsTest, HealthyRunsOfTwoSeedsDoNotDiffer) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    MadeUpRun run(seed, 0.7, 0.2), other(seed + 100, 0.7, 0.2);
    RunComparison comparison(kHeads, 0.5);
    for (int i = 0; i < kSteps; ++i) comparison.Add(100 * i, run.Next(), other.Next());
    EXPECT_LE(Differing(comparison), 1) << seed;
  }
}

TEST(CompareRunsTest, NoiseAndSingleSamplesAreNoDifference) {
  MadeUpRun run(1, 1, 0.6), twin(1, 1, 0);
  RunComparison comparison(kHeads, 0.5);
  for (int i = 0; i < kSteps; ++i) {
    std::vector<float> values = run.Next();
    if (i == 30 || i == kSteps - 1) values[3] *= 1000;
    comparison.Add(100 * i, values, twin.Next());
  }
  EXPECT_EQ(Differing(comparison), 0);
  EXPECT_GT(comparison.band(kSteps - 1), 1.5);
}

TEST(CompareRunsTest, RepairedHeadNoLongerDiffers) {
  MadeUpRun run(1, 1, 0.05), twin(1, 1, 0.05);
  RunComparison comparison(kHeads, 0.5);
  for (int i = 0; i < kSteps; ++i) {
    std::vector<float> values = run.Next();
    if (i > 20 && i < 40) values[3] *= 16;
    if (i > 20 && i != 50 && i != 51) values[4] *= 16;  // Two samples within are not its end.
    comparison.Add(100 * i, values, twin.Next());
  }
  EXPECT_EQ(comparison.Of(3).first, -1);
  EXPECT_NEAR(comparison.Of(3).ratio, 4, 0.3);
  EXPECT_EQ(comparison.Of(4).first, 21);
}

TEST(CompareRunsTest, NotFiniteInOneRunIsADifference) {
  RunComparison comparison(4, 0.5);
  for (int i = 0; i < 10; ++i) {
    const bool late = i >= 6;
    comparison.Add(i, std::vector<float>{late ? kFloatNan : 1, 1, kFloatNan, NotMeasured()},
                   std::vector<float>{1, late ? kFloatInf : 1, kFloatNan, late ? kFloatNan : 1});
  }
  EXPECT_EQ(comparison.Of(0).first, 6);
  EXPECT_EQ(comparison.Of(0).before, 5);
  EXPECT_EQ(comparison.Of(0).ratio, std::numeric_limits<double>::infinity());
  EXPECT_EQ(comparison.Of(1).first, 6);
  EXPECT_EQ(comparison.Of(1).ratio, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(comparison.Of(2).first, -1) << "both are NaN";
  EXPECT_EQ(comparison.Of(3).first, -1) << "never measured in one";
}

TEST(CompareRunsTest, RatiosHaveAFloorNearZero) {
  // Shares of rows: most heads at 3 %, some at none or at one row of thousands.
  RunComparison comparison(12, 0.5);
  std::vector<float> run(12, 0.03f), baseline(12, 0.03f);
  run[0] = 0, baseline[0] = 1e-4f;
  run[1] = 1e-5f, baseline[1] = 0;
  run[2] = 0.9f, baseline[2] = 0;
  for (int i = 0; i < 8; ++i) comparison.Add(i, run, baseline);
  EXPECT_EQ(comparison.Of(0).ratio, 0);
  EXPECT_EQ(comparison.Of(1).ratio, 0);
  EXPECT_EQ(comparison.Of(2).first, 0);
  EXPECT_NEAR(comparison.Of(2).ratio, std::log2(0.9 / (0.03 / 16)), 0.01);
  RunComparison nothing(2, 0.5);
  nothing.Add(0, std::vector<float>{0, 0}, std::vector<float>{0, 0});
  EXPECT_EQ(nothing.Of(0).first, -1);
}

TEST(CompareRunsTest, FewHeadsAreHeldAgainstTheirOwnNoise) {
  std::mt19937 random(3);
  std::normal_distribution<double> noise(0, 0.1);
  RunComparison comparison(1, 0.5);
  for (int i = 0; i < kSteps; ++i) {
    const double drift = i > 30 ? 0.2 * (i - 30) : 0;
    comparison.Add(i, std::vector<float>{static_cast<float>(std::exp2(drift + noise(random)))},
                   std::vector<float>{static_cast<float>(std::exp2(noise(random)))});
  }
  EXPECT_NEAR(comparison.Of(0).first, 33, 2);
}

TEST(CompareRunsTest, ShortRunsAreComparedWhole) {
  RunComparison comparison(1, 0.5);
  comparison.Add(0, std::vector<float>{4}, std::vector<float>{1});
  EXPECT_EQ(comparison.Of(0).first, 0) << "all there is";
  EXPECT_EQ(comparison.Of(0).before, -1);
  for (int i = 1; i < 80; ++i) comparison.Add(i, std::vector<float>{4}, std::vector<float>{1});
  EXPECT_EQ(comparison.steps(), RunComparison::kStepsMax) << "and no more";
  EXPECT_EQ(comparison.Of(0).first, 0);
}

}  // namespace
}  // namespace bellwether::server
