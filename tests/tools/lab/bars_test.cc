// Goal: bars are judged of the runs that they are of, and say what is missed.
// Method: made-up scores.

#include "tools/lab/bars.h"

#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

RunScore Rounding(int64_t fails, int64_t warned) {
  RunScore score;
  score.family = "rounding";
  score.truth.t_sigma = fails;
  score.truth.steps = 10000;
  score.first_warning = warned;
  return score;
}

RunScore Quiet(int64_t warnings, int64_t criticals) {
  RunScore score;
  score.family = "healthy";
  score.truth.steps = 10000;
  score.warnings = warnings;
  score.criticals = criticals;
  return score;
}

TEST(BarsTest, NoRunsAreNoJudgement) {
  const std::vector<Bar> bars = BarsOf(std::vector<RunScore>{});
  ASSERT_EQ(bars.size(), 5u);
  for (const Bar& bar : bars) EXPECT_FALSE(bar.figure.has_value()) << bar.name;
  EXPECT_FALSE(AnyMissed(bars));
  EXPECT_THAT(BarTable(bars),
              HasSubstr("| rounding runs: least lead, steps | - | at least 500, goal 1000 | not judged"));
}

TEST(BarsTest, ShortRunsNeedHalfTheirLifeAsLead) {
  const std::vector<Bar> bars = BarsOf(
      std::vector<RunScore>{Rounding(4000, 1000), Rounding(5000, 4400), Rounding(6000, 3000), Rounding(1200, 500)});
  EXPECT_EQ(bars[0].figure, 600);
  EXPECT_TRUE(bars[0].met());
  EXPECT_EQ(bars[1].figure, 3000);
  EXPECT_NEAR(*bars[2].figure, 700.0 / 1200, 1e-9);
  EXPECT_FALSE(bars[3].figure.has_value()) << "a failure is not quiet";
  EXPECT_FALSE(AnyMissed(bars));
  EXPECT_TRUE(AnyMissed(BarsOf(std::vector<RunScore>{Rounding(4000, -1)}))) << "never warned of";
}

TEST(BarsTest, QuietRunsHaveFewWarningsAndNoCritical) {
  const std::vector<Bar> bars = BarsOf(std::vector<RunScore>{Quiet(1, 1), Quiet(1, 0)});
  EXPECT_NEAR(*bars[3].figure, 0.1, 1e-9);
  EXPECT_TRUE(bars[3].met());
  EXPECT_EQ(bars[4].figure, 1);
  EXPECT_FALSE(bars[4].met());
  EXPECT_THAT(BarTable(bars), HasSubstr("| quiet recordings: false criticals | 1 | at most 0 | missed |"));
  const auto json = BarsJson(bars);
  EXPECT_EQ(json[4]["met"], false);
  EXPECT_TRUE(json[0]["met"].is_null());
}

TEST(BarsTest, EachKindOfSyntheticRunsHasItsBar) {
  std::vector<SyntheticScore> scores(2);
  scores[1].kind = SyntheticKind::kSeasonal;
  for (SyntheticScore& score : scores) score.run_steps = 100000;
  scores[1].warnings = 20;
  const std::vector<Bar> bars = BarsOf(scores);
  ASSERT_EQ(bars.size(), 4u);
  EXPECT_TRUE(bars[0].met());
  EXPECT_THAT(BarTable(bars),
              HasSubstr("| synthetic, seasonal: false warnings per 1,000 steps, all families together | 0.2 | at most "
                        "0.1 | missed |"));
  EXPECT_NEAR(*bars[2].figure, 0.1, 1e-9);
  EXPECT_EQ(bars[3].figure, 0);
}

}  // namespace
}  // namespace bellwether::server
