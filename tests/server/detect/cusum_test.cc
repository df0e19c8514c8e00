// Goal: the baseline detectors score against the past alone, are blind to NaN,
// widen for values that are alike, stand still while they alarm, and do not cry
// on noise.
// Method: series by hand, and normal noise of a fixed seed with and without
// memory.

#include "server/detect/cusum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "server/detect/archive.h"
#include "server/detect/baseline_bank.h"
#include "server/detect/impulse.h"
#include "server/detect/multiplicity.h"

namespace bellwether::server {
namespace {

constexpr double kNoReading = std::numeric_limits<double>::quiet_NaN();

// Values around 10 that are not alike: +1, -1, ...
double Wave(int i) { return i % 2 == 0 ? 11 : 9; }

template <class Bank>
Bank Taught(const typename Bank::Options& options, size_t cells = 1) {
  Bank bank(cells, options);
  for (int i = 0; i < options.window; ++i) {
    for (size_t cell = 0; cell < cells; ++cell) EXPECT_FALSE(bank.Update(cell, Wave(i)).scored);
  }
  return bank;
}

TEST(BaselineBankTest, IsTheNewestValuesOfItsCell) {
  BaselineBank bank(2, 4);
  BaselineBank::Baseline baseline;
  for (const double value : {100.0, 1.0, 2.0, 3.0}) bank.Push(1, value);
  bank.Push(1, kNoReading);
  bank.Push(1, 4);
  ASSERT_TRUE(bank.Read(1, &baseline));
  EXPECT_DOUBLE_EQ(baseline.mean, 2.5);
  EXPECT_DOUBLE_EQ(baseline.deviation, std::sqrt(5.0 / 3));
  // Deviations -1.5, -0.5, 0.5, 1.5: products 0.75 - 0.25 + 0.75, squares 5.
  EXPECT_DOUBLE_EQ(baseline.phi, 1.25 / 5);
  EXPECT_DOUBLE_EQ(baseline.widening(), std::sqrt(1.25 / 0.75));
  EXPECT_FALSE(bank.Read(0, &baseline)) << "another cell has seen nothing";
  bank.Forget(1);
  EXPECT_FALSE(bank.Read(1, &baseline));
}

TEST(BaselineBankTest, EqualValuesHaveALeastDeviation) {
  BaselineBank bank(1, 3);
  for (int i = 0; i < 3; ++i) bank.Push(0, 5);
  BaselineBank::Baseline baseline;
  ASSERT_TRUE(bank.Read(0, &baseline));
  EXPECT_GT(baseline.deviation, 0);
  EXPECT_EQ(baseline.phi, 0);
}

TEST(CusumTest, AddsWhatExceedsK) {
  CusumBank bank = Taught<CusumBank>({.k = 1, .h = 8, .window = 50});
  const double deviation = std::sqrt(50.0 / 49);
  const BankReading once = bank.Update(0, 10 + 4 * deviation);
  EXPECT_TRUE(once.scored);
  EXPECT_NEAR(once.score, 3, 1e-5);
  EXPECT_NEAR(once.mean, 10, 1e-12);
  EXPECT_NEAR(once.deviation, deviation, 1e-12) << "phi below 0 does not make it narrower";
  EXPECT_NEAR(once.p, std::exp(-2 * (3 + 0.583)), 1e-6);
  EXPECT_FALSE(once.alarm);
  EXPECT_NEAR(bank.Update(0, kNoReading).score, 0, 0) << "says nothing";
  EXPECT_TRUE(bank.Update(0, 1000).alarm);
}

TEST(CusumTest, BaselineExcludesScoredValuesAndFreezesInAlarm) {
  CusumBank bank = Taught<CusumBank>({.k = 1, .h = 8, .window = 50, .relearn = 1000});
  const double mean = bank.Update(0, 100).mean;
  EXPECT_DOUBLE_EQ(mean, 10);
  for (int i = 0; i < 200; ++i) {
    const BankReading reading = bank.Update(0, 100 + Wave(i));
    ASSERT_TRUE(reading.alarm) << i;
    ASSERT_DOUBLE_EQ(reading.mean, mean) << "an alarm does not become normal";
    ASSERT_LE(reading.score, 16) << "held at 2 h";
  }
  int batches = 0;
  while (bank.Update(0, Wave(batches)).alarm) ASSERT_LT(++batches, 20) << "ends soon after its cause";
}

TEST(CusumTest, NanNeverEntersABaseline) {
  CusumBank bank(1, {.window = 50});
  for (int i = 0; i < 49; ++i) bank.Update(0, Wave(i));
  for (int i = 0; i < 100; ++i)
    EXPECT_FALSE(bank.Update(0, i % 2 == 0 ? kNoReading : std::numeric_limits<double>::infinity()).scored);
  EXPECT_FALSE(bank.Update(0, Wave(49)).scored) << "only now it is full";
  const BankReading reading = bank.Update(0, 10);
  EXPECT_TRUE(reading.scored);
  EXPECT_TRUE(std::isfinite(reading.mean));
}

TEST(CusumTest, AlarmsOnlyInItsDirection) {
  for (const auto direction : {RuleDirection::kUp, RuleDirection::kDown, RuleDirection::kBoth}) {
    CusumBank up = Taught<CusumBank>({.window = 50, .direction = direction});
    CusumBank down = Taught<CusumBank>({.window = 50, .direction = direction});
    EXPECT_EQ(up.Update(0, 100).alarm, direction != RuleDirection::kDown);
    EXPECT_EQ(down.Update(0, -100).alarm, direction != RuleDirection::kUp);
  }
}

TEST(CusumTest, LastingShiftBecomesTheBaseline) {
  CusumBank bank = Taught<CusumBank>({.window = 50, .relearn = 5});
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(bank.Update(0, 100 + Wave(i)).alarm);
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(bank.Update(0, 100 + Wave(i)).scored) << "learns afresh";
  EXPECT_FALSE(bank.Update(0, 110).alarm);
}

// Batches in alarm over `cells` cells of x_t = phi x_(t-1) + noise.
int64_t Alarms(double phi, double h, int cells, int batches) {
  CusumBank bank(static_cast<size_t>(cells), {.k = 1, .h = h, .window = 50});
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  std::vector<double> x(static_cast<size_t>(cells));
  int64_t alarms = 0;
  for (int t = 0; t < batches; ++t) {
    for (size_t cell = 0; cell < x.size(); ++cell) {
      x[cell] = phi * x[cell] + std::sqrt(1 - phi * phi) * normal(random);
      alarms += bank.Update(cell, x[cell]).alarm ? 1 : 0;
    }
  }
  return alarms;
}

TEST(CusumTest, IsSilentOnNoiseWithAndWithoutMemory) {
  EXPECT_EQ(Alarms(0, 8, 1, 20'000), 0);
  EXPECT_EQ(Alarms(0.5, 12, 200, 500), 0);
  EXPECT_LE(Alarms(0.7, 12, 200, 500), 200 * 500 / 1000);
}

TEST(CusumTest, FindsAShiftOfThreeDeviations) {
  CusumBank bank(1, {.k = 1, .h = 8, .window = 50});
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (int i = 0; i < 60; ++i) bank.Update(0, normal(random));
  int batches = 0;
  while (!bank.Update(0, 3 + normal(random)).alarm) ASSERT_LT(++batches, 12);
}

TEST(CusumTest, GoesOnAfterASave) {
  CusumBank bank = Taught<CusumBank>({.window = 50}, 3);
  bank.Update(1, 13);
  std::string saved;
  StateWriter writer(&saved);
  writer(bank);
  CusumBank restored(3, {.window = 50});
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end() && restored.Consistent());
  EXPECT_EQ(bank.Update(1, 14).score, restored.Update(1, 14).score);
  CusumBank other(4, {.window = 50});
  StateReader misled(saved);
  misled(other);
  EXPECT_FALSE(other.Consistent()) << "the state of other cells";
}

TEST(ImpulseTest, ImpulseScoreIsInPastDeviations) {
  ImpulseBank bank = Taught<ImpulseBank>({.sigmas = 6, .window = 64, .relearn = 3});
  const double deviation = std::sqrt(64.0 / 63);
  EXPECT_FALSE(bank.Update(0, 10 + 5.9 * deviation).alarm);
  bank = Taught<ImpulseBank>({.sigmas = 6, .window = 64, .relearn = 3});
  const BankReading reading = bank.Update(0, 10 + 6.1 * deviation);
  EXPECT_TRUE(reading.alarm);
  EXPECT_NEAR(reading.score, 6.1, 1e-9);
  EXPECT_NEAR(reading.p, NormalTail(6.1), 1e-15);
  EXPECT_FALSE(bank.Update(0, kNoReading).scored);
  EXPECT_DOUBLE_EQ(bank.Update(0, 10).mean, 10) << "the impulse has not entered";
  EXPECT_FALSE(Taught<ImpulseBank>({}).Update(0, -100).alarm);
  EXPECT_TRUE(Taught<ImpulseBank>({.direction = RuleDirection::kDown}).Update(0, -100).alarm);
  EXPECT_TRUE(Taught<ImpulseBank>({.direction = RuleDirection::kBoth}).Update(0, -100).alarm);
}

TEST(ImpulseTest, LastingShiftBecomesTheBaseline) {
  ImpulseBank bank = Taught<ImpulseBank>({.window = 64, .relearn = 3});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(bank.Update(0, 1000 + Wave(i)).alarm);
  EXPECT_FALSE(bank.Update(0, 1000).scored);
}

TEST(MultiplicityTest, TakesAsManyAsBenjaminiAndHochberg) {
  std::vector<double> scratch;
  // The example of their paper, Section 3.2: four are taken at q = 0.05.
  const std::vector<double> p = {0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344,
                                 0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.000};
  EXPECT_EQ(BenjaminiHochberg(p, 0.05, &scratch), 0.0095);
  EXPECT_EQ(BenjaminiHochberg(std::vector<double>{0.9, 0.8}, 0.05, &scratch), -1);
  EXPECT_EQ(BenjaminiHochberg(std::vector<double>{}, 0.05, &scratch), -1);
  EXPECT_EQ(BenjaminiHochberg(std::vector<double>{0.04, 0.05}, 0.05, &scratch), 0.05)
      << "a step-up: the larger carries both";
}

TEST(MultiplicityTest, TailOfTheNormal) {
  EXPECT_DOUBLE_EQ(NormalTail(0), 0.5);
  EXPECT_NEAR(NormalTail(1.959964), 0.025, 1e-8);
  EXPECT_NEAR(NormalTail(-1.959964), 0.975, 1e-8);
  EXPECT_GT(NormalTail(20), 0) << "far out it is still a number";
}

}  // namespace
}  // namespace bellwether::server
