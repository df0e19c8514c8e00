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
