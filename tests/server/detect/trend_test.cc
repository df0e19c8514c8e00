// Goal: the trend fit finds exponential growth, its rate and its end, tells it
// from flat noise, and survives outliers and holes.
// Method: series made from known rates with a fixed seed, compared with them.

#include "server/detect/trend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace bellwether::server {
namespace {

struct Series {
  std::vector<float> values, steps;
};

Series Growth(double doubling_steps, double noise, uint32_t seed, int points = 64) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Series series;
  for (int i = 0; i < points; ++i) {
    const double step = 1000 + 20.0 * i;
    const double rate = doubling_steps > 0 ? std::log(2.0) / doubling_steps : 0;
    series.steps.push_back(static_cast<float>(step));
    series.values.push_back(static_cast<float>(2 * std::exp(rate * (step - 1000) + noise * normal(random))));
  }
  return series;
}

TEST(TrendTest, FindsTheRateOfAnExponential) {
  TrendScratch scratch;
  const Series series = Growth(350, 0, 1);
  const Trend trend = FitTrend(series.values, series.steps, 24, 0, &scratch);
  ASSERT_EQ(trend.points, 64);
  EXPECT_NEAR(trend.doubling_steps(), 350, 0.5);
  EXPECT_NEAR(trend.r2, 1, 1e-6);
  // All 2,016 pairs rise: S / sqrt(64 * 63 * 133 / 18).
  EXPECT_NEAR(trend.z, 2015 / std::sqrt(64 * 63 * 133 / 18.0), 0.01);
}

TEST(TrendTest, TheIntervalHoldsTheTrueRateInMostSeries) {
  TrendScratch scratch;
  int held = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const Series series = Growth(500, 0.2, seed);
    const Trend trend = FitTrend(series.values, series.steps, 24, 0, &scratch);
    held += trend.slope_lower <= std::log(2.0) / 500 && std::log(2.0) / 500 <= trend.slope_upper;
  }
  // 80 %: four standard deviations of a binomial of 200 are 23.
  EXPECT_GE(held, 160 - 23);
  EXPECT_LE(held, 160 + 35);  // Widened by the correlation of some residuals.
}

TEST(TrendTest, FlatNoiseIsNoTrend) {
  TrendScratch scratch;
  int risen = 0;
  for (uint32_t seed = 0; seed < 500; ++seed) {
    const Series series = Growth(0, 0.3, seed);
    risen += FitTrend(series.values, series.steps, 24, 0, &scratch).z >= 4;
  }
  EXPECT_EQ(risen, 0);
}

TEST(TrendTest, OutlierMovesTheRateLittle) {
  TrendScratch scratch;
  Series series = Growth(500, 0.05, 3);
  series.values[40] *= 1e6f;
  const Trend trend = FitTrend(series.values, series.steps, 24, 0, &scratch);
  EXPECT_NEAR(trend.doubling_steps(), 500, 50);
}

TEST(TrendTest, ValuesThatAreNoNumbersAreLeftOut) {
  TrendScratch scratch;
  Series series = Growth(500, 0, 1);
  series.values[3] = std::numeric_limits<float>::quiet_NaN();
  series.values[4] = std::numeric_limits<float>::infinity();
  series.values[5] = 0;
  series.values[6] = -1;
  const Trend trend = FitTrend(series.values, series.steps, 24, 0, &scratch);
  EXPECT_EQ(trend.points, 60);
  EXPECT_NEAR(trend.doubling_steps(), 500, 1);
}

TEST(TrendTest, TooFewPointsOrTooPoorAFitIsNothing) {
  TrendScratch scratch;
  Series series = Growth(500, 0, 1, 23);
  EXPECT_EQ(FitTrend(series.values, series.steps, 24, 0, &scratch).points, 0);
  series = Growth(0, 0.3, 1);
  EXPECT_EQ(FitTrend(series.values, series.steps, 24, 0.8, &scratch).points, 0);
}

TEST(TrendTest, EtaIsTheDistanceOverTheRate) {
  Trend trend;
  trend.points = 64;
  trend.slope = std::log(2.0) / 400;
  trend.slope_lower = std::log(2.0) / 500;
  trend.slope_upper = std::log(2.0) / 300;
  trend.log_level = std::log(16.0);
  const Eta eta = EtaTo(trend, 128, 100000);
  ASSERT_TRUE(eta.known);
  EXPECT_NEAR(eta.steps, 1200, 1e-6);
  EXPECT_NEAR(eta.lower_steps, 900, 1e-6);
  EXPECT_NEAR(eta.upper_steps, 1500, 1e-6);
  EXPECT_FALSE(EtaTo(trend, 128, 1000).known);
  trend.slope = -1e-3;
  EXPECT_FALSE(EtaTo(trend, 128, 100000).known);
  trend.slope = 1e-3;
  trend.log_level = std::log(500.0);
  EXPECT_EQ(EtaTo(trend, 128, 100000).steps, 0);
}

}  // namespace
}  // namespace bellwether::server
