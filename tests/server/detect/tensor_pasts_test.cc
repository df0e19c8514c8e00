// Goal: parameters that leave their own past are named within some samples, alone or all together.  Of
// healthy runs with 10^4 parameters none is, whatever their noise is like.
// Method: numbers of parameters drawn at random, with one thing planted.

#include "server/detect/tensor_pasts.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "server/detect/archive.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

constexpr TensorPasts::Context kJudgedTensors{.excused = false, .quiet_steps = 1000};

// What is multiplied with a tensor's gradient norm, update ratio and second-moment lag in a sample.
struct Factors {
  double gradient = 1, update = 1, lag = 1;
};
using FactorsOf = std::function<Factors(int tensor)>;

StepSample Trained(int64_t step, int tensors, const FactorsOf& of) {
  StepSample sample;
  Layout layout{.layers = 1, .heads = 1, .kv_heads = 1};
  layout.tensors = tensors;
  sample.Reset(layout);
  sample.step = step;
  const auto gradients = sample.Add(SignalId::kTensorGradSumsq), changes = sample.Add(SignalId::kTensorChangeSumsq);
  const auto weights = sample.Add(SignalId::kTensorChangeWeightSumsq);
  const auto elements = sample.Add(SignalId::kTensorElements), lags = sample.Add(SignalId::kTensorLagSum);
  for (int i = 0; i < tensors; ++i) {
    const Factors factors = of(i);
    const auto at = static_cast<size_t>(i);
    const double norm = 1e-3 * (1 + i % 100);
    sample.Add(SignalId::kTensorGradSumsq)[at] = static_cast<float>(std::pow(norm * factors.gradient, 2));
    sample.Add(SignalId::kTensorChangeSumsq)[at] = static_cast<float>(std::pow(1e-2 * factors.update, 2));
    sample.Add(SignalId::kTensorChangeWeightSumsq)[at] = 100;
    sample.Add(SignalId::kTensorElements)[at] = 1000;
    sample.Add(SignalId::kTensorLagSum)[at] = static_cast<float>(1000 * std::pow(factors.lag, 2));
  }
  static_cast<void>(gradients), static_cast<void>(changes), static_cast<void>(weights);
  static_cast<void>(elements), static_cast<void>(lags);
  return sample;
}

class TensorPastsTest : public testing::Test {
 protected:
  TensorPastsTest() {
    for (int i = 0; i < kFew; ++i) names_.Add("layers." + std::to_string(i) + ".weight");
  }
  static constexpr int kFew = 30;
  // Noise of a fifth, with one tensor's factors, or all of them, beside it.
  StepSample Next(const Factors& planted = {}, int tensor = -1) {
    return Trained(step_++, kFew, [&](int i) {
      Factors factors = i == tensor || tensor < 0 ? planted : Factors{};
      factors.gradient *= std::exp(0.2 * normal_(random_));
      factors.update *= std::exp(0.2 * normal_(random_));
      factors.lag *= std::exp(0.2 * normal_(random_));
      return factors;
    });
  }
  const std::vector<Finding>& Judge(const StepSample& sample) {
    watch_.Observe(sample, &names_, kJudgedTensors);
    return *watch_.findings();
  }
  void JudgeHealthy(int samples) {
    for (int i = 0; i < samples; ++i) ASSERT_THAT(Judge(Next()), IsEmpty()) << step_;
  }
  // Samples until something is found, at most `most`.
  int Until(int most, const std::function<StepSample()>& next) {
    for (int i = 1; i <= most; ++i) {
      if (!Judge(next()).empty()) return i;
    }
    return most + 1;
  }

  int64_t step_ = 1000;
  std::mt19937 random_{5};
  std::normal_distribution<double> normal_;
  RowNames names_;
  TensorPasts watch_{ParametersOptions{}};
};

TEST_F(TensorPastsTest, AGradientThatExplodesIsNamedInFiveSamples) {
  JudgeHealthy(100);
  EXPECT_EQ(Until(10, [&] { return Next({.gradient = 1000}, 7); }), 5);
  ASSERT_THAT(*watch_.findings(), SizeIs(1));
  const Finding& found = watch_.findings()->front();
  EXPECT_EQ(found.rule, Rule::kParameters);
  EXPECT_EQ(found.severity, Severity::kInfo);
  EXPECT_EQ(found.note, "layers.7.weight");
  EXPECT_EQ(found.facts[0].signal, std::string("tensor_grad_norm"));
  EXPECT_NEAR(found.facts[0].value, 8, 4);
  EXPECT_NEAR(found.facts[0].baseline, 0.008, 0.004);
  EXPECT_EQ(found.first_step, 1100);
  EXPECT_THAT(found.summary,
              AllOf(HasSubstr("the gradient norm of layers.7.weight has risen to"), HasSubstr(", since step 1100")));
  JudgeHealthy(100);
}

TEST_F(TensorPastsTest, TwentySamplesAreAWarningAndAHundredNormal) {
  JudgeHealthy(100);
  Severity severity = Severity::kNone;
  for (int i = 1; i < 100; ++i) {
    const std::vector<Finding>& found = Judge(Next({.lag = 100}, 7));
    severity = found.empty() ? Severity::kNone : found[0].severity;
    EXPECT_EQ(severity, i < 5 ? Severity::kNone : i < 20 ? Severity::kInfo : Severity::kWarning) << i;
  }
  Judge(Next({.lag = 100}, 7));
  for (int i = 0; i < 100; ++i) EXPECT_THAT(Judge(Next({.lag = 100}, 7)), IsEmpty());
}

TEST_F(TensorPastsTest, UpdatesAndLagsMayFallAndGradientsNotFar) {
  JudgeHealthy(100);
  for (int i = 0; i < 20; ++i) EXPECT_THAT(Judge(Next({.update = 1e-6, .lag = 1e-6}, 7)), IsEmpty());
  EXPECT_EQ(Until(10, [&] { return Next({.gradient = 1e-4}, 7); }), 5);
  EXPECT_THAT(watch_.findings()->front().summary, HasSubstr("the gradient norm of layers.7.weight has fallen to"));
}

TEST_F(TensorPastsTest, GradientsThatPileUpAreToldOfAllTogether) {
  JudgeHealthy(100);
  double steps = 0;
  const int found = Until(40, [&] { return Next({.gradient = ++steps}); });
  EXPECT_LE(found, 20);
  EXPECT_THAT(watch_.findings()->front().summary,
              AllOf(HasSubstr("the gradient norm of all parameters together has risen to"), Not(HasSubstr("layers"))));
  EXPECT_EQ(watch_.findings()->front().note, "all parameters");
}

TEST_F(TensorPastsTest, GradientsThatAreUnscaledTwiceAreToldOfAllTogether) {
  JudgeHealthy(100);
  EXPECT_EQ(Until(10, [&] { return Next({.gradient = 0x1p-16}); }), 5);
  EXPECT_THAT(watch_.findings()->front().summary, HasSubstr("of all parameters together has fallen to 1."));
}

TEST_F(TensorPastsTest, ALearningRateFarAboveAllBeforeIsTold) {
  JudgeHealthy(100);
  EXPECT_EQ(Until(10, [&] { return Next({.update = 100}); }), 5);
  EXPECT_THAT(watch_.findings()->front().summary, HasSubstr("the update ratio of all parameters together has risen"));
}

TEST_F(TensorPastsTest, ScheduleThatBeginsAgainIsHealthy) {
  for (int i = 0; i < 2000; ++i) {
    const double rate = 0.5 * (1 + std::cos(3.14159 * (i % 500) / 500)) + 1e-3;
    ASSERT_THAT(Judge(Next({.update = rate})), IsEmpty()) << i;
  }
}

TEST_F(TensorPastsTest, WhereFewAreCoveredEachIsHeldAgainstItself) {
  const auto covered = [&](const Factors& planted) {
    StepSample sample = Next(planted, 7);
    for (const SignalId signal : {SignalId::kTensorChangeSumsq, SignalId::kTensorLagSum}) {
      for (size_t i = 0; i < kFew; ++i) {
        if (i % 10 != static_cast<size_t>(step_) % 10) sample.Add(signal)[i] = NotMeasured();
      }
    }
    return sample;
  };
  for (int i = 0; i < 1000; ++i) ASSERT_THAT(Judge(covered({})), IsEmpty()) << i;
  EXPECT_LE(Until(60, [&] { return covered({.lag = 100}); }), 50);
  EXPECT_EQ(watch_.findings()->front().note, "layers.7.weight");
}

TEST_F(TensorPastsTest, ZeroAndUnknownGradientsAreLeftOut) {
  JudgeHealthy(100);
  for (int i = 0; i < 20; ++i) {
    StepSample sample = Next();
    sample.Add(SignalId::kTensorGradSumsq)[3] = 0;
    sample.Add(SignalId::kTensorGradSumsq)[4] = NotMeasured();
    sample.Add(SignalId::kTensorGradSumsq)[5] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_THAT(Judge(sample), IsEmpty());
  }
  StepSample partial = Next({.gradient = 1000}, 7);
  partial.complete = false;
  EXPECT_FALSE(watch_.Observe(partial, &names_, kJudgedTensors));
}

TEST_F(TensorPastsTest, AnnouncedChangesOfParametersAreLearntAndNotJudged) {
  JudgeHealthy(100);
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(watch_.Observe(Next({.gradient = 100}), &names_, {.excused = true, .quiet_steps = 1000}));
  }
  for (int i = 0; i < 50; ++i) EXPECT_THAT(Judge(Next({.gradient = 100})), IsEmpty());
}

// Of each turn of 25 samples one covers the parameter.
void CoverInTurns(StepSample* sample) {
  const auto turn = static_cast<size_t>(sample->step) % 25;
  for (const SignalId signal :
       {SignalId::kTensorChangeSumsq, SignalId::kTensorChangeWeightSumsq, SignalId::kTensorLagSum}) {
    const auto values = sample->Add(signal);
    for (size_t i = 0; i < values.size(); ++i) {
      if (i % 25 != turn) sample->Add(signal)[i] = NotMeasured();
    }
  }
}

TEST_F(TensorPastsTest, FewThatTakeTurnsAreToldOfAllTogether) {
  const auto in_turn = [&](const Factors& planted) {
    StepSample sample = Next(planted);
    CoverInTurns(&sample);
    return sample;
  };
  for (int i = 0; i < 2500; ++i) ASSERT_THAT(Judge(in_turn({})), IsEmpty()) << i;
  EXPECT_LE(Until(100, [&] { return in_turn({.update = 100}); }), 60);
  for (int i = 0; i < 300; ++i) {
    for (const Finding& finding : *watch_.findings()) EXPECT_EQ(finding.note, "all parameters") << finding.summary;
    Judge(in_turn({.update = 100}));
  }
}

TEST_F(TensorPastsTest, OneOfFewThatTakeTurnsIsNamed) {
  const auto in_turn = [&](const Factors& planted) {
    StepSample sample = Next(planted, 7);
    CoverInTurns(&sample);
    return sample;
  };
  for (int i = 0; i < 2500; ++i) ASSERT_THAT(Judge(in_turn({})), IsEmpty()) << i;
  EXPECT_LE(Until(200, [&] { return in_turn({.lag = 100}); }), 150);
  EXPECT_EQ(watch_.findings()->front().note, "layers.7.weight");
}

// A learning rate that falls to a thousandth and begins again, over more samples than pasts hold; batches that are
// hard for all.
TEST_F(TensorPastsTest, SmallHealthyModelsThatTakeTurnsAreSilent) {
  constexpr int kSamples = 12000, kCycle = 4000;
  std::student_t_distribution<float> tails(3);
  size_t alarms = 0;
  for (const int size : {2, 8, 10, 30, 100, 175}) {
    for (const bool schedule : {false, true}) {
      watch_ = TensorPasts{ParametersOptions{}};
      std::vector<double> walks(static_cast<size_t>(size));
      double shared = 0;
      for (int t = 0; t < kSamples; ++t) {
        shared = 0.95 * shared + 0.1 * normal_(random_);
        const double spike = t % 300 == 150 ? 3 : 0;
        const double rate = schedule ? std::log(0.5 * (1 + std::cos(3.14159 * (t % kCycle) / kCycle)) + 1e-3) : 0.0;
        StepSample sample = Trained(t, size, [&](int i) {
          double& walk = walks[static_cast<size_t>(i)];
          walk = 0.98 * walk + 0.1 * normal_(random_);
          const double noise = i % 3 == 0 ? 0.3 * normal_(random_) : i % 3 == 1 ? walk : 0.2 * tails(random_);
          return Factors{.gradient = std::exp(noise + shared + spike),
                         .update = std::exp(0.5 * noise + rate + 0.2 * shared),
                         .lag = std::exp(noise + shared + spike)};
        });
        CoverInTurns(&sample);
        for (const Finding& finding : Judge(sample)) {
          if (++alarms < 20) ADD_FAILURE() << size << " at " << t << " " << finding.note << ": " << finding.summary;
        }
      }
    }
  }
  EXPECT_EQ(alarms, 0u);
}

TEST_F(TensorPastsTest, ParametersThatWaitForATurnAreSaved) {
  const auto in_turn = [&](int64_t step) {
    std::mt19937 random(static_cast<uint32_t>(step));
    std::normal_distribution<double> normal;
    StepSample sample = Trained(step, kFew, [&](int) { return Factors{.lag = std::exp(normal(random))}; });
    CoverInTurns(&sample);
    return sample;
  };
  const auto state_of = [](TensorPasts& watch) {
    std::string saved;
    StateWriter writer(&saved);
    writer(watch);
    watch.VisitLater(writer);
    return saved;
  };
  for (int64_t step = 0; step < 300; ++step) {
    Judge(in_turn(step));
    if (step < 260) continue;
    const std::string saved = state_of(watch_);
    TensorPasts restored{ParametersOptions{}};
    StateReader reader(saved);
    reader(restored);
    restored.VisitLater(reader);
    ASSERT_TRUE(reader.at_end() && restored.Consistent());
    watch_ = restored;
    ASSERT_EQ(state_of(watch_), saved);
  }
  TensorPasts plain{ParametersOptions{}};
  for (int64_t step = 0; step < 300; ++step) plain.Observe(in_turn(step), &names_, kJudgedTensors);
  EXPECT_EQ(state_of(watch_), state_of(plain));
}

// A governor that samples rarely: no sample falls into the 200 steps behind the change.
TEST(ParametersJudgeTest, AChangeExcusesSamplesThatComeLate) {
  for (const bool announced : {false, true}) {
    RunDescription run;
    run.name = "r";
    run.layout = {.layers = 1, .heads = 1, .kv_heads = 1};
    run.layout.tensors = 10;
    auto judge = std::make_unique<RunJudge>(JudgeOptions(), run);
    std::vector<AlertTransition> out;
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    int64_t step = 1000;
    const auto to = [&](int samples, double factor) {
      for (int i = 0; i < samples; ++i, step += 301) {
        judge->Observe(
            Trained(step, 10, [&](int) { return Factors{.gradient = factor * std::exp(0.2 * normal(random))}; }), &out);
        const std::string saved = judge->Save();
        judge = std::make_unique<RunJudge>(JudgeOptions(), run);
        ASSERT_TRUE(judge->Restore(saved)) << step;
      }
    };
    to(100, 1);
    if (announced) judge->OnEvent({.step = step - 300, .kind = EventKind::kData}, &out);
    to(60, 1e3);
    EXPECT_EQ(out.empty(), announced);
  }
}

// Ten thousand parameters of eight kinds, in 2,000 samples; what all share varies, too.
TEST_F(TensorPastsTest, TenThousandHealthyParametersAreSilent) {
  constexpr int kMany = 10000, kSamples = 2000, kSignals = 3;
  std::student_t_distribution<float> tails(3);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  std::vector<float> states(kMany * kSignals);
  std::vector<Finding> none;
  float shared = 0;
  size_t alarms = 0;
  for (int t = 0; t < kSamples; ++t) {
    shared = 0.95f * shared + 0.1f * normal(random_);
    // A batch that is hard for all of them now and then.
    const float spike = t % 300 == 150 ? 3.0f : 0.0f;
    const auto noise = [&](int tensor, int signal) -> double {
      float& state = states[static_cast<size_t>(tensor * kSignals + signal)];
      switch (tensor % 8) {
        case 0:
          return 0.3f * normal(random_);
        case 1:
          return state = 0.9f * state + 0.2f * normal(random_);
        case 2:
          return state = 0.98f * state + 0.1f * normal(random_);
        case 3:
          return 0.2f * tails(random_);
        case 4:  // Falls, or grows, by a factor of a thousand.
          return (tensor % 16 == 4 ? -1 : 1) * 7.0f * static_cast<float>(t) / kSamples + 0.1f * normal(random_);
        case 5:  // Of an expert that few batches need.
          return uniform(random_) < 0.05f ? 5.0f : 0.3f * normal(random_);
        case 6:
          return std::sin(static_cast<float>(t) / 50.0f) + 0.1f * normal(random_);
        default:  // Almost none.
          return 1e-3f * normal(random_);
      }
    };
    const StepSample sample = Trained(t, kMany, [&](int i) {
      return Factors{.gradient = std::exp(noise(i, 0) + shared + spike),
                     .update = std::exp(noise(i, 1)),
                     .lag = std::exp(noise(i, 2) + spike)};
    });
    for (const Finding& finding : Judge(sample)) {
      ++alarms;
      if (alarms < 20)
        ADD_FAILURE() << t << " " << finding.note << " " << finding.facts[0].signal << ": " << finding.summary;
    }
  }
  EXPECT_EQ(alarms, 0u);
  EXPECT_LT(watch_.memory_bytes(), 85u * kMany);
}

TEST_F(TensorPastsTest, ASavedStateGoesOn) {
  JudgeHealthy(100);
  EXPECT_EQ(Until(4, [&] { return Next({.gradient = 1000}, 7); }), 5);
  std::string saved;
  StateWriter writer(&saved);
  writer(watch_);
  TensorPasts restored{ParametersOptions{}};
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end() && restored.Consistent() && restored.has_seen());
  EXPECT_TRUE(restored.Observe(Next({.gradient = 1000}, 7), &names_, kJudgedTensors));
  ASSERT_THAT(*restored.findings(), SizeIs(1));
  EXPECT_EQ(restored.findings()->front().first_step, 1100);
}

}  // namespace
}  // namespace bellwether::server
