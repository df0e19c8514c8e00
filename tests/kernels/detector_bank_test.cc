// Goal: the bank's hits are those of the definitions in detector_bank.h, with holes, NaN,
// windows that fill and wrap, and any number of heads; its logarithm is one.
// Method: the definitions written out naively, over random runs with growing series.

#include "bellwether/kernels/detector_bank.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "bellwether/kernels/trend.h"
#include "kernels/trend_parts.h"
#include "tests/support/bank_run.h"

namespace bellwether::kernels {
namespace {

using bellwether::testing::BankRunOptions;
using bellwether::testing::RandomBankRun;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

float NaiveMedian(std::vector<float> values) {
  std::erase_if(values, [](float x) { return !std::isfinite(x); });
  if (values.empty()) return kNan;
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) / 2];
}

TEST(DetectorBankTest, LowerMedianOfAnySize) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const size_t count : {0u, 1u, 2u, 3u, 64u, 511u, 512u, 513u, 5000u}) {
    std::vector<float> values(count), scratch(count);
    for (float& value : values) {
      value = normal(random) * std::exp2(40 * normal(random));
      if (random() % 10 == 0) value = random() % 2 != 0 ? kNan : kInf;
      if (random() % 10 == 0) value = 0;
    }
    const float median = LowerMedian(values.data(), static_cast<int64_t>(count), scratch.data());
    const float naive = NaiveMedian(values);
    EXPECT_TRUE(median == naive || (std::isnan(median) && std::isnan(naive))) << count;
  }
}

TEST(DetectorBankTest, NegativeZeroIsNoMedian) {
  for (const size_t count : {3u, 600u}) {
    const std::vector<float> values(count, -0.0f);
    std::vector<float> scratch(count);
    EXPECT_FALSE(std::signbit(LowerMedian(values.data(), static_cast<int64_t>(count), scratch.data())));
  }
}

TEST(DetectorBankTest, LogarithmOfFloats) {
  std::mt19937 random(2);
  for (int i = 0; i < 100000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random() % 0x7f800000u));
    if (value == 0) continue;
    const double exact = std::log(static_cast<double>(value));
    ASSERT_NEAR(LogOf(value), exact, 3e-16 * (1 + std::abs(exact))) << value;
  }
  EXPECT_EQ(LogOf(1.0f), 0.0);
}

// Row `age` of the newest `rows` of a series; 0 = oldest.
std::vector<float> Series(const BankTrack& track, int64_t heads, int64_t head, int32_t rows, bool relative) {
  std::vector<float> values;
  for (int32_t age = track.rows - rows; age < track.rows; ++age) {
    const int32_t row = (track.next - track.rows + age + track.window) % track.window;
    const float median = row == track.slot ? track.median : track.ring_median[row];
    values.push_back(track.ring[row * heads + head] / (relative ? median : 1.0f));
  }
  return values;
}

double NaiveRise(std::vector<float> values) {
  std::erase_if(values, [](float x) { return !std::isfinite(x); });
  if (values.size() < 6) return 1;
  const double oldest = double{values[0]} + values[1] + values[2];
  const double newest = double{values.end()[-1]} + values.end()[-2] + values.end()[-3];
  return oldest > 0 ? newest / oldest : 1;
}

struct Expected {
  bool hit = false;
  bool close = false;  // To a threshold: rounding decides.
};

Expected NaiveHit(const BankRun& run, const BankTest& test, int64_t head) {
  const BankTrack& track = run.track[test.track];
  const double threshold = std::max(test.absolute, test.factor * std::max<double>(track.median, test.floor));
  if (!(track.newest[head] > threshold)) return {};
  if (test.windows < 0) return {.hit = true};
  Expected expected;
  for (int32_t w = 0; w < test.windows; ++w) {
    const BankWindow& window = test.window[w];
    const std::vector<float> values = Series(track, run.heads, head, window.rows, test.relative);
    const double rise = NaiveRise(values);
    if (std::abs(rise - window.rise_min) < 1e-5 * window.rise_min) expected.close = true;
    if (rise < window.rise_min) continue;
    if (!test.trend) return {.hit = true, .close = expected.close};
    std::vector<float> steps;
    for (int32_t age = track.rows - window.rows; age < track.rows; ++age)
      steps.push_back(track.ring_step[(track.next - track.rows + age + track.window) % track.window]);
    TrendScratch scratch;
    const Trend trend = FitTrend(values.data(), steps.data(), window.rows, test.points_min, 0, &scratch);
    if (trend.points == 0) continue;
    if (std::abs(trend.r2 - test.r2_min) < 1e-9) expected.close = true;
    if (trend.z >= test.z_min && trend.r2 >= test.r2_min && trend.doubling_steps() <= window.doubling_steps_max)
      return {.hit = true, .close = expected.close};
  }
  return expected;
}

TEST(DetectorBankTest, HitsAreThoseOfTheDefinition) {
  int hits[RandomBankRun::kTests] = {};
  for (const int64_t heads : {1, 63, 64, 65, 700}) {
    RandomBankRun random({.heads = heads, .window = 24, .seed = static_cast<uint32_t>(heads), .holes = 0.05f});
    for (int batch = 0; batch < 60; ++batch) {
      random.NextBatch();
      BankRun* const run = random.run();
      cpu::EvaluateDetectors(run);
      for (int32_t t = 0; t < run->tracks; ++t) {
        const float* const newest = run->track[t].newest;
        const float median = NaiveMedian({newest, newest + heads});
        ASSERT_TRUE(run->track[t].median == median || std::isnan(median));
      }
      for (int32_t t = 0; t < run->tests; ++t) {
        for (int64_t head = 0; head < heads; ++head) {
          const Expected expected = NaiveHit(*run, run->test[t], head);
          if (expected.close) continue;
          ASSERT_EQ(random.Hit(t, head), expected.hit)
              << heads << " heads, batch " << batch << ", test " << t << ", head " << head;
          hits[t] += expected.hit;
        }
      }
      random.Settle();
    }
  }
  EXPECT_THAT(hits, ::testing::Each(::testing::Gt(100))) << "a test that is never a hit shows nothing";
}

TEST(DetectorBankTest, NoHitWithoutValuesOrWindows) {
  RandomBankRun random(BankRunOptions{.heads = 10});
  random.NextBatch();
  BankRun* const run = random.run();
  cpu::EvaluateDetectors(run);
  EXPECT_FALSE(random.Hit(2, 0)) << "the window is too short yet";
  run->track[0].newest = nullptr;
  run->track[0].fresh = false;
  cpu::EvaluateDetectors(run);
  for (int64_t head = 0; head < 10; ++head) EXPECT_FALSE(random.Hit(0, head));
}

TEST(DetectorBankTest, UnwantedHeadsMayBeLeftOut) {
  RandomBankRun random({.heads = 64, .window = 64, .grow_each = 1});
  for (int batch = 0; batch < 40; ++batch) {
    random.NextBatch();
    if (batch < 39) cpu::EvaluateDetectors(random.run());
    if (batch < 39) random.Settle();
  }
  std::vector<uint8_t> unwanted(64, 0);
  unwanted[5] = 1;
  random.run()->test[2].unwanted = unwanted.data();
  cpu::EvaluateDetectors(random.run());
  EXPECT_FALSE(random.Hit(2, 5));
  EXPECT_TRUE(random.Hit(2, 6));
}

}  // namespace
}  // namespace bellwether::kernels
