// Goal: synthetic runs have the statistics that their header states, each kind
// does what its name says, and the judge leaves them in peace.
// Method: the samples of small runs, added up; a slice of the measurement that
// docs/concepts/detection.md reports.

#include "tools/lab/synthetic_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/lab/synthetic_scorecard.h"

namespace bellwether::server {
namespace {

struct Kept final : RunListener {
  std::vector<RunDescription> hellos;
  std::vector<StepSample> samples;
  std::vector<RunEvent> events;
  RunRows rows;
  void OnHello(const RunDescription& run) override { hellos.push_back(run); }
  void OnRows(const RunRows& named) override { rows = named; }
  void OnSample(const StepSample& sample) override { samples.push_back(sample); }
  void OnEvent(const RunEvent& event) override { events.push_back(event); }
};

Kept Walk(SyntheticKind kind, uint64_t seed = 1, int64_t steps = 10000, bool places = false) {
  Kept kept;
  WalkSyntheticRun(
      {.kind = kind, .layers = 4, .heads = 16, .steps = steps, .key_leak = true, .places = places, .seed = seed},
      &kept);
  return kept;
}

// ln of a derived signal after step 1,000: by head, then by sample.
std::vector<std::vector<double>> LogsOf(const Kept& run, SignalId signal) {
  std::vector<std::vector<double>> logs;
  std::vector<float> values;
  for (const StepSample& sample : run.samples) {
    if (sample.step < 1000 || !DeriveMatrix(sample, *FindSignal(signal), &values)) continue;
    logs.resize(values.size());
    for (size_t head = 0; head < values.size(); ++head) {
      if (!IsNotMeasured(values[head])) logs[head].push_back(std::log(static_cast<double>(values[head])));
    }
  }
  return logs;
}

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double Variance(const std::vector<double>& values) {
  const double mean = Mean(values);
  double sum = 0;
  for (const double value : values) sum += (value - mean) * (value - mean);
  return sum / static_cast<double>(values.size());
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Of the differences of neighbours, which no slow trend reaches: the variance
// of a series with correlation r has 2 (1 - r) of its own there.
double DifferenceVariance(const std::vector<double>& values) {
  std::vector<double> differences;
  for (size_t i = 1; i < values.size(); ++i) differences.push_back(values[i] - values[i - 1]);
  return Variance(differences);
}

TEST(SyntheticRunTest, RunsAreDeterministicForTheirOptionsAndSeed) {
  const Kept a = Walk(SyntheticKind::kMissing), b = Walk(SyntheticKind::kMissing), c = Walk(SyntheticKind::kMissing, 2);
  ASSERT_EQ(a.samples.size(), b.samples.size());
  size_t different = 0;
  for (size_t i = 0; i < a.samples.size(); ++i) {
    const auto x = a.samples[i].matrix(SignalId::kSpreadSum), y = b.samples[i].matrix(SignalId::kSpreadSum);
    ASSERT_EQ(x.size(), y.size());
    ASSERT_EQ(x.size_bytes() == 0 ? 0 : std::memcmp(x.data(), y.data(), x.size_bytes()), 0);
    if (i < c.samples.size()) {
      const auto z = c.samples[i].matrix(SignalId::kSpreadSum);
      different += x.size() == z.size() && !x.empty() && std::memcmp(x.data(), z.data(), x.size_bytes()) != 0;
    }
  }
  EXPECT_GT(different, 100u);
}

TEST(SyntheticRunTest, LevelsAndNoiseAreTheRecordedOnes) {
  struct Expected {
    SignalId signal;
    double level, head, noise;
  };
  // Of the header's table.
  for (const Expected& e : {Expected{SignalId::kDriftRatio, 0.95, 0.6, 0.122},
                            {SignalId::kSpread, 3.8, 1.0, 0.085},
                            {SignalId::kTiedFractionBf16, 0.027, 0.6, 0.30},
                            {SignalId::kLogitMax, 25, 0.8, 0.122}}) {
    SCOPED_TRACE(static_cast<int>(e.signal));
    std::vector<double> levels, noises;
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      for (const auto& head : LogsOf(Walk(SyntheticKind::kAsRecorded, seed, 3000), e.signal)) {
        levels.push_back(Mean(head));
        noises.push_back(std::sqrt(DifferenceVariance(head)));
      }
    }
    // 256 heads; two thirds of the noise are white, one is AR(0.98).
    EXPECT_NEAR(Median(levels), std::log(e.level), 4 * e.head / std::sqrt(256));
    EXPECT_NEAR(std::sqrt(Variance(levels)), e.head, 0.25 * e.head);
    EXPECT_NEAR(Median(noises), e.noise * std::sqrt(2 * (2 + 0.02) / 3), 0.2 * e.noise);
  }
}

TEST(SyntheticRunTest, EveryGranularityIsReportedWithItsNames) {
  const Kept run = Walk(SyntheticKind::kAsRecorded, 1, 1000, true);
  std::set<Granularity> found;
  for (const StepSample& sample : run.samples) {
    for (const SignalId signal : sample.signals()) found.insert(FindSignal(signal)->granularity);
  }
  EXPECT_EQ(found.size(), 9u);
  const Layout& layout = run.hellos[0].layout;
  EXPECT_EQ(layout.tensors, run.rows.tensors.size());
  EXPECT_EQ(layout.modules, run.rows.modules.size());
  EXPECT_EQ(layout.own, run.rows.own.size());
  EXPECT_EQ(run.rows.tensors.names().back(), "lm_head.weight");
}

// Of the table of synthetic_places.h.
TEST(SyntheticRunTest, PlacesHaveTheRecordedNoise) {
  const Kept run = Walk(SyntheticKind::kAsRecorded, 1, 6000, true);
  const auto noise_of = [&run](SignalId signal) {
    std::vector<double> noises;
    for (const auto& row : LogsOf(run, signal)) {
      if (row.size() > 10) noises.push_back(std::sqrt(DifferenceVariance(row) / 2));
    }
    return Median(noises);
  };
  EXPECT_NEAR(noise_of(SignalId::kTensorGradNorm), std::hypot(0.20, 0.21), 0.04);
  EXPECT_NEAR(noise_of(SignalId::kTensorMomentLag), std::hypot(0.14, 0.13), 0.04);
  EXPECT_NEAR(noise_of(SignalId::kTensorUpdateRatio), 0.10, 0.02);
  EXPECT_NEAR(noise_of(SignalId::kExpertShare), 0.18, 0.03);
  EXPECT_NEAR(noise_of(SignalId::kMomentLagMax), 0.19, 0.03);
  EXPECT_LT(noise_of(SignalId::kTensorWeightRms), 0.003);
}

TEST(SyntheticRunTest, NoiseHasTheCorrelationAndTailsOfItsKind) {
  const auto lag1 = [](SyntheticKind kind) {
    std::vector<double> found;
    for (const auto& head : LogsOf(Walk(kind, 1, 30000), SignalId::kKeyLeak)) {
      found.push_back(1 - DifferenceVariance(head) / (2 * Variance(head)));
    }
    return Median(found);
  };
  EXPECT_NEAR(lag1(SyntheticKind::kAr90), 0.9, 0.06);
  EXPECT_NEAR(lag1(SyntheticKind::kAr98), 0.97, 0.03);
  const auto kurtosis = [](SyntheticKind kind) {
    std::vector<double> found;
    for (const auto& head : LogsOf(Walk(kind, 1, 30000), SignalId::kKeyLeak)) {
      std::vector<double> fourth;
      const double mean = Mean(head), variance = Variance(head);
      for (const double x : head) fourth.push_back(std::pow(x - mean, 4) / (variance * variance));
      found.push_back(Mean(fourth));
    }
    return Median(found);
  };
  EXPECT_GT(kurtosis(SyntheticKind::kHeavyTails), 5);
  EXPECT_LT(kurtosis(SyntheticKind::kAsRecorded), 4);
}

TEST(SyntheticRunTest, RestartsGoBackAndEverySecondIsTold) {
  const Kept run = Walk(SyntheticKind::kRestarts);
  ASSERT_GE(run.hellos.size(), 3u);
  int64_t back = 0;
  for (size_t i = 1; i < run.samples.size(); ++i) {
    const StepSample &last = run.samples[i - 1], &now = run.samples[i];
    if (now.attempt == last.attempt) {
      EXPECT_EQ(now.step, last.step + 1);
    } else {
      EXPECT_EQ(now.attempt, last.attempt + 1);
      EXPECT_LE(now.step, last.step + 1);
      EXPECT_GT(now.step, last.step - 500);
      back += last.step + 1 - now.step;
    }
  }
  EXPECT_GT(back, 100);
  EXPECT_EQ(run.events.size(), (run.hellos.size() - 1) / 2);
  EXPECT_EQ(run.samples.back().step, 10000);
}

TEST(SyntheticRunTest, PeriodsChangeAndDataIsMissing) {
  const auto periods = [](const Kept& run) {
    std::set<int64_t> gaps;
    int64_t last = -1;
    for (const StepSample& sample : run.samples) {
      if (!sample.has(SignalId::kWqSigma)) continue;
      if (last >= 0) gaps.insert(sample.step - last);
      last = sample.step;
    }
    return gaps;
  };
  EXPECT_THAT(periods(Walk(SyntheticKind::kAsRecorded)), ::testing::ElementsAre(10));
  EXPECT_THAT(periods(Walk(SyntheticKind::kPeriods)), ::testing::IsSupersetOf({5, 10, 20, 50, 100}));
  const Kept missing = Walk(SyntheticKind::kMissing);
  EXPECT_LT(missing.samples.size(), 9200u) << "500 of 5,000 steps";
  EXPECT_GT(periods(missing).size(), 3u);
  size_t cells = 0, holes = 0;
  for (const StepSample& sample : missing.samples) {
    for (const float value : sample.matrix(SignalId::kWqSigma)) {
      ++cells;
      holes += IsNotMeasured(value);
    }
  }
  EXPECT_NEAR(static_cast<double>(holes) / static_cast<double>(cells), 0.05, 0.01);
}

TEST(SyntheticRunTest, FewHeadsFallUnderLogGrowth) {
  const auto falling = [](SyntheticKind kind) {
    int64_t count = 0;
    for (const auto& head : LogsOf(Walk(kind, 1, 20000), SignalId::kDriftRatio)) {
      const size_t end = head.size() / 5;
      count += Mean({head.end() - static_cast<ptrdiff_t>(end), head.end()}) <
               Mean({head.begin(), head.begin() + static_cast<ptrdiff_t>(end)}) - 0.1;
    }
    return count;
  };
  const int64_t recorded = falling(SyntheticKind::kAsRecorded);
  EXPECT_GT(recorded, 15);
  EXPECT_LT(3 * falling(SyntheticKind::kLogGrowth), recorded);
}

// The bars of the scorecard, on a slice: 180,000 run-steps of 64 heads.
TEST(SyntheticScorecardTest, HealthySyntheticRunsHaveFewWarnings) {
  size_t told = 0;
  const auto scores = ScoreSynthetic({.runs = 2,
                                      .run = {.layers = 8, .heads = 8, .steps = 10000, .places = false},
                                      .progress = [&](size_t done, size_t of) {
                                        EXPECT_EQ(done, ++told);
                                        EXPECT_EQ(of, 18u);
                                      }});
  ASSERT_EQ(scores.size(), static_cast<size_t>(kSyntheticKinds));
  int64_t steps = 0, warnings = 0;
  for (const SyntheticScore& score : scores) {
    SCOPED_TRACE(NameOf(score.kind));
    EXPECT_EQ(score.runs, 2);
    EXPECT_EQ(score.criticals, 0);
    steps += score.run_steps;
    warnings += score.warnings;
  }
  EXPECT_GE(steps, 180000);
  EXPECT_LE(static_cast<double>(warnings), 0.1 * static_cast<double>(steps) / 1000) << ToTable(scores);
  EXPECT_THAT(ToTable(scores), ::testing::HasSubstr("| AR(0.98) | 2 | 20000 |"));
}

// And of what is no head: 36,000 run-steps, in which the families of other granularities say nothing.
TEST(SyntheticScorecardTest, HealthyPlacesHaveFewWarnings) {
  const auto scores = ScoreSynthetic({.runs = 1, .run = {.layers = 4, .heads = 4, .steps = 4000}});
  int64_t warnings = 0;
  for (const SyntheticScore& score : scores) {
    EXPECT_EQ(score.criticals, 0) << NameOf(score.kind);
    for (const auto& [rule, count] : score.warned_rules) {
      if (rule != "drift" && rule != "ties") warnings += count;
    }
  }
  EXPECT_LE(warnings, 3) << ToTable(scores);
}

// What finds nothing must be able to find: a judge that takes every rise for a
// drift fails the bar above.
TEST(SyntheticScorecardTest, OverlySensitiveJudgeExceedsTheWarningLimit) {
  JudgeOptions nervous;
  nervous.drift.level_factor = 2;
  nervous.drift.level_rise_min = 1.01;
  nervous.alert.resolve_steps = 100;
  nervous.alert.cooldown_steps = 0;
  const auto scores =
      ScoreSynthetic({.runs = 1, .run = {.layers = 8, .heads = 8, .steps = 10000, .places = false}, .judge = nervous});
  int64_t warnings = 0, steps = 0;
  std::set<std::string> causes;
  for (const SyntheticScore& score : scores) {
    warnings += score.warnings;
    steps += score.run_steps;
    for (const auto& [cause, count] : score.warned_by) causes.insert(cause);
  }
  EXPECT_GT(static_cast<double>(warnings), 0.1 * static_cast<double>(steps) / 1000);
  EXPECT_TRUE(causes.contains("drift_ratio peers"));
}

}  // namespace
}  // namespace bellwether::server
