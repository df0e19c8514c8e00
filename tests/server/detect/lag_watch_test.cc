// Goal: a step whose second moment lags far beyond its past is told, at once as information, as a warning where it
// stays.  Of healthy runs none is, though small batches and first steps lie above the paper's level, too.
// Method: made-up largest lags of the steps between two samples, with one thing planted.

#include "server/detect/lag_watch.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/detect/archive.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr LagWatch::Context kJudgedLags{.excused = false, .quiet_steps = 1000};

StepSample Lagging(int64_t step, double lag) {
  StepSample sample;
  sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1});
  sample.step = step;
  sample.Add(SignalId::kMomentLagMax)[0] = static_cast<float>(lag);
  return sample;
}

class LagWatchTest : public testing::Test {
 protected:
  std::vector<Finding> Judge(double lag, const LagWatch::Context& context = kJudgedLags) {
    watch_.Observe(Lagging(step_, lag), context);
    step_ += 20;
    std::vector<Finding> findings;
    watch_.AddTo(&findings);
    return findings;
  }
  double Usual() { return 1.1 * std::exp(0.03 * normal_(random_)); }
  void JudgeHealthy(int samples) {
    for (int i = 0; i < samples; ++i) ASSERT_THAT(Judge(Usual()), IsEmpty()) << step_;
  }

  int64_t step_ = 1000;
  std::mt19937 random_{11};
  std::normal_distribution<double> normal_;
  LagWatch watch_{ParametersOptions{}};
};

TEST_F(LagWatchTest, ALagThatStaysOffIsInformationThenAWarning) {
  JudgeHealthy(200);
  for (int i = 1; i <= 5; ++i) {
    const std::vector<Finding> found = Judge(6);
    ASSERT_THAT(found, SizeIs(1));
    EXPECT_EQ(found[0].severity, i < 3 ? Severity::kInfo : Severity::kWarning) << i;
    EXPECT_EQ(found[0].news, i == 1);
    EXPECT_EQ(found[0].rule, Rule::kParameters);
    EXPECT_EQ(found[0].first_step, 5000);
    EXPECT_EQ(found[0].facts[0].signal, std::string("moment_lag_max"));
    EXPECT_DOUBLE_EQ(found[0].facts[0].threshold, 2.3);
    EXPECT_THAT(found[0].summary, HasSubstr("lags by 6 in a step up to"));
  }
  JudgeHealthy(200);
}

TEST_F(LagWatchTest, BelowTheLevelNothingIsTold) {
  JudgeHealthy(200);
  EXPECT_THAT(Judge(2.29), IsEmpty());
  EXPECT_THAT(Judge(2.31), SizeIs(1));
}

TEST_F(LagWatchTest, ARunWhoseLagsAreLargeIsHeldAgainstItself) {
  for (int i = 0; i < 300; ++i) ASSERT_THAT(Judge(i % 7 == 0 ? 3.5 : 1.2), IsEmpty()) << i;
  EXPECT_THAT(Judge(10), IsEmpty());
  EXPECT_THAT(Judge(31), SizeIs(1));
}

TEST_F(LagWatchTest, ALevelThatStaysIsTheNewNormal) {
  JudgeHealthy(200);
  for (int i = 1; i < 100; ++i) EXPECT_THAT(Judge(6), SizeIs(1)) << i;
  for (int i = 0; i < 300; ++i) EXPECT_THAT(Judge(6), IsEmpty());
}

TEST_F(LagWatchTest, AnnouncedChangesOfLagsAreLearntAndNotJudged) {
  JudgeHealthy(200);
  for (int i = 0; i < 10; ++i) EXPECT_THAT(Judge(6, {.excused = true, .quiet_steps = 1000}), IsEmpty());
  for (int i = 0; i < 60; ++i) EXPECT_THAT(Judge(6), IsEmpty());
}

TEST_F(LagWatchTest, LagsThatAreNoNumbersSayNothing) {
  JudgeHealthy(200);
  for (const double lag : {std::nan(""), HUGE_VAL, 0.0}) {
    EXPECT_FALSE(watch_.Observe(Lagging(step_, lag), kJudgedLags));
    EXPECT_THAT(Judge(lag), IsEmpty());
  }
  StepSample other;
  other.Reset({.layers = 1, .heads = 1, .kv_heads = 1});
  EXPECT_FALSE(watch_.Observe(other, kJudgedLags));
}

TEST_F(LagWatchTest, NewsOfLagsEndsAfterEightUntilItIsQuiet) {
  JudgeHealthy(200);
  int news = 0;
  for (int i = 0; i < 20; ++i) {
    news += Judge(6)[0].news;
    Judge(Usual());
  }
  EXPECT_EQ(news, 8);
  JudgeHealthy(200);
  EXPECT_TRUE(Judge(6)[0].news);
}

TEST_F(LagWatchTest, WithParametersTheWorstStaysFirst) {
  JudgeHealthy(200);
  Finding parameter = Finding::OfRun(Rule::kParameters, Severity::kWarning, {.signal = "tensor_grad_norm"});
  parameter.score = 5;
  parameter.summary = "a parameter";
  Judge(6);
  std::vector<Finding> both = {parameter};
  watch_.AddTo(&both);
  ASSERT_THAT(both, SizeIs(2));
  EXPECT_TRUE(both[0].news && both[0].score > both[1].score);
  EXPECT_THAT(both[0].summary, HasSubstr("a parameter; the second moment"));
  both[0].severity = Severity::kInfo;
  both.resize(1);
  Judge(6), Judge(6);
  watch_.AddTo(&both);
  ASSERT_THAT(both, SizeIs(2));
  EXPECT_EQ(both[0].severity, Severity::kWarning);
  EXPECT_GT(both[0].score, both[1].score);
}

// As trainings have them, of maxima over the steps between two samples; with beta2 = 0.999 none is above 31.6.
TEST_F(LagWatchTest, HealthyLagsOfAllKindsAreSilent) {
  std::student_t_distribution<double> tails(6);
  std::exponential_distribution<double> long_tails(2);
  double level = 0;
  const std::vector<std::function<double(int)>> kinds = {
      [&](int) { return Usual(); },
      [&](int) { return 1.3 * std::exp(0.15 * tails(random_)); },
      [&](int) { return 1 + long_tails(random_); },
      [&](int) { return 1.1 * std::exp(0.5 * std::abs(normal_(random_))); },
      [&](int) { return std::exp(level = 0.98 * level + 0.05 * normal_(random_)); },
      [&](int i) { return 1 + std::sin(i / 50.0) * 0.5 + 0.1 * std::abs(normal_(random_)); },
      [&](int i) { return (0.8 + i / 2000.0) * std::exp(0.1 * normal_(random_)); },  // Grows to 5.
      [&](int i) { return i % 50 == 7 ? 4.0 : Usual(); },                            // A hard batch now and then.
  };
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    for (int run = 0; run < 20; ++run) {
      watch_.Rewind();
      level = 0;
      for (int i = 0; i < 10000; ++i) {
        ASSERT_THAT(Judge(std::min(31.6, kinds[kind](i))), IsEmpty()) << kind << " " << run << " " << i;
      }
    }
  }
}

TEST_F(LagWatchTest, ASavedStateOfLagsGoesOn) {
  JudgeHealthy(200);
  Judge(6);
  std::string saved;
  StateWriter writer(&saved);
  writer(watch_);
  LagWatch restored{ParametersOptions{}};
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end() && restored.Consistent() && restored.has_seen());
  restored.Observe(Lagging(step_, 6), kJudgedLags);
  std::vector<Finding> findings;
  restored.AddTo(&findings);
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_EQ(findings[0].first_step, 5000);
  EXPECT_FALSE(findings[0].news);
}

// Lags of a run with a sample in 20 steps.
std::vector<AlertTransition> JudgeLags(const JudgeOptions& options, const std::function<double(int64_t)>& lag,
                                       int64_t save_at = -1) {
  RunDescription description;
  description.layout = {.layers = 1, .heads = 1, .kv_heads = 1};
  auto judge = std::make_unique<RunJudge>(options, description);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step < 6000; step += 20) {
    judge->Observe(Lagging(step, lag(step)), &out);
    if (step != save_at) continue;
    const std::string saved = judge->Save();
    judge = std::make_unique<RunJudge>(options, description);
    EXPECT_TRUE(judge->Restore(saved));
    EXPECT_EQ(judge->Save(), saved);
  }
  return out;
}

TEST(LagJudgeTest, FirstStepsMayLag) {
  EXPECT_THAT(JudgeLags({}, [](int64_t step) { return step > 20 && step < 700 ? 6.5 : 1.2; }), IsEmpty());
}

TEST(LagJudgeTest, AStepBetweenSamplesIsToldAsInformation) {
  const auto told = JudgeLags({}, [](int64_t step) { return step == 5000 ? 6 : 1.2; });
  ASSERT_FALSE(told.empty());
  EXPECT_EQ(told[0].rule, "parameters");
  EXPECT_EQ(told[0].severity, Severity::kInfo);
  EXPECT_EQ(told[0].cause, "second moment too slow");
  EXPECT_THAT(told[0].summary, HasSubstr("lags by 6 in a step up to 5000"));
}

TEST(LagJudgeTest, ASavedJudgeOfLagsGoesOn) {
  const auto lag = [](int64_t step) { return step >= 5000 && step < 5200 ? 6 : 1.2; };
  const auto words = [](const std::vector<AlertTransition>& told) {
    std::string text;
    for (const AlertTransition& change : told) text += change.key + " " + change.summary + "\n";
    return text;
  };
  const std::string plain = words(JudgeLags({}, lag));
  EXPECT_THAT(plain, HasSubstr("lags by 6"));
  for (const int64_t at : {700, 4980, 5000, 5020, 5060, 5200}) EXPECT_EQ(words(JudgeLags({}, lag, at)), plain) << at;
}

TEST(LagJudgeTest, ThresholdAndSwitchAreThoseOfParameters) {
  const auto lag = [](int64_t step) { return step == 5000 ? 6 : 1.2; };
  JudgeOptions options;
  options.parameters.lag_level = 7;
  EXPECT_THAT(JudgeLags(options, lag), IsEmpty());
  JudgeOptions off;
  off.off.Add(Builtin::kParameters);
  EXPECT_THAT(JudgeLags(off, lag), IsEmpty());
}

}  // namespace
}  // namespace bellwether::server
