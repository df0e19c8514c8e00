// Goal: a parameter that has a gradient and does not move, a step that changes nothing and a gradient
// that is not finite are named, in two samples and one.  What stands still for a good reason is not:
// unused parts, gradients of rounding alone, steps that are not told, numbers of 16 bits.
// Method: samples of twelve parameters that train, with one thing planted.

#include "server/detect/tensor_watch.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "server/detect/archive.h"
#include "tests/support/judged_samples.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

constexpr int kTensors = 12;

RowNames TensorNames() {
  RowNames names;
  for (int i = 0; i < kTensors; ++i) names.Add("layers." + std::to_string(i) + ".weight");
  return names;
}

// All move; weights of 0.1, a rate of 0.01, gradients of 0.5 an element.
StepSample MovingTensors(int64_t step) {
  StepSample sample;
  Layout layout{.layers = 1, .heads = 1, .kv_heads = 1};
  layout.tensors = kTensors;
  sample.Reset(layout);
  sample.step = step;
  const auto fill = [&sample](SignalId signal, float with) {
    for (float& value : sample.Add(signal)) value = with;
  };
  fill(SignalId::kTensorElements, 100);
  fill(SignalId::kTensorGradSumsq, 25);
  fill(SignalId::kTensorGradMax, 2);
  fill(SignalId::kTensorGradNonfinite, 0);
  fill(SignalId::kTensorGradZeros, 0);
  fill(SignalId::kTensorMoved, 1);
  fill(SignalId::kTensorWeightSumsq, 1);
  sample.Add(SignalId::kLearningRate)[0] = 0.01f;
  return sample;
}

StepSample WithStill(int64_t step, const std::vector<size_t>& rows) {
  StepSample sample = MovingTensors(step);
  for (const size_t row : rows) sample.Add(SignalId::kTensorMoved)[row] = 0;
  return sample;
}

StepSample AllStill(int64_t step) {
  StepSample sample = MovingTensors(step);
  for (float& value : sample.Add(SignalId::kTensorMoved)) value = 0;
  return sample;
}

class TensorWatchTest : public testing::Test {
 protected:
  const std::vector<Finding>& Judge(const StepSample& sample) {
    watch_.Observe(sample, &names_);
    return *watch_.findings();
  }
  void JudgeMoving(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) EXPECT_THAT(Judge(MovingTensors(step)), IsEmpty());
  }

  RowNames names_ = TensorNames();
  TensorWatch watch_{FrozenOptions{}};
};

TEST_F(TensorWatchTest, ParametersThatMoveAreNotNamed) { JudgeMoving(0, 2000); }

TEST_F(TensorWatchTest, OneThatNeverMovesIsNamedInTwoSamples) {
  EXPECT_THAT(Judge(WithStill(0, {3})), IsEmpty());
  const std::vector<Finding>& found = Judge(WithStill(10, {3}));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].rule, Rule::kFrozen);
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_EQ(found[0].first_step, 0);
  EXPECT_EQ(found[0].note, "layers.3.weight");
  EXPECT_EQ(found[0].summary,
            "1 parameter has a gradient and does not move: layers.3.weight; 11 others move, since step 0");
  ASSERT_EQ(found[0].fact_count, 2);
  EXPECT_EQ(found[0].facts[1].signal, std::string("tensor_grad_norm"));
  EXPECT_EQ(found[0].facts[1].value, 5);
  EXPECT_THAT(Judge(MovingTensors(20)), IsEmpty());
}

TEST_F(TensorWatchTest, OneThatStopsMovingIsNamedInTwoSamples) {
  JudgeMoving(0, 10);
  EXPECT_THAT(Judge(WithStill(10, {3, 4})), IsEmpty());
  const std::vector<Finding>& found = Judge(WithStill(11, {3, 4}));
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_THAT(found[0].summary, HasSubstr("2 parameters have a gradient and do not move: layers.3.weight, layers.4"));
  EXPECT_EQ(found[1].first_step, 10);
}

TEST_F(TensorWatchTest, SamplesThatDoNotCoverItAreLeftOut) {
  Judge(WithStill(0, {3}));
  for (int64_t step = 1; step < 5; ++step) {
    StepSample sample = MovingTensors(step);
    sample.Add(SignalId::kTensorMoved)[3] = NotMeasured();
    EXPECT_THAT(Judge(sample), IsEmpty());
  }
  EXPECT_THAT(Judge(WithStill(5, {3})), SizeIs(1));
}

TEST_F(TensorWatchTest, TheLargestGradientsAreNamedFirst) {
  const auto at = [](int64_t step) {
    StepSample sample = WithStill(step, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    sample.Add(SignalId::kTensorGradSumsq)[7] = 100;
    return sample;
  };
  Judge(at(0));
  const std::vector<Finding>& found = Judge(at(1));
  ASSERT_THAT(found, SizeIs(8));
  EXPECT_EQ(found[0].note, "layers.7.weight");
  EXPECT_THAT(found[0].summary, HasSubstr("layers.6.weight and 2 more; 2 others move"));
}

TEST_F(TensorWatchTest, AGradientOfZeroIsNone) {
  for (int64_t step = 0; step < 50; ++step) {
    StepSample sample = WithStill(step, {3});
    sample.Add(SignalId::kTensorGradMax)[3] = 0;
    sample.Add(SignalId::kTensorGradSumsq)[3] = 0;
    EXPECT_THAT(Judge(sample), IsEmpty());
  }
}

TEST_F(TensorWatchTest, AGradientThatIsNotMeasuredIsNone) {
  for (int64_t step = 0; step < 50; ++step) {
    StepSample sample = WithStill(step, {3});
    sample.Add(SignalId::kTensorGradMax)[3] = NotMeasured();
    EXPECT_THAT(Judge(sample), IsEmpty());
  }
}

TEST_F(TensorWatchTest, RestsOfRoundingAreNoGradient) {
  for (int64_t step = 0; step < 50; ++step) {
    StepSample sample = WithStill(step, {3});
    sample.Add(SignalId::kTensorGradMax)[3] = 1e-7f;
    sample.Add(SignalId::kTensorGradSumsq)[3] = 1e-13f;
    EXPECT_THAT(Judge(sample), IsEmpty());
  }
}

TEST_F(TensorWatchTest, RoundingIsInformation) {
  const auto at = [](int64_t step) {
    StepSample sample = WithStill(step, {3});
    sample.Add(SignalId::kTensorWeightSumsq)[3] = 10000;  // Gains, at 10.
    return sample;
  };
  Judge(at(0));
  const std::vector<Finding>& found = Judge(at(1));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kInfo);
  EXPECT_THAT(found[0].summary,
              HasSubstr("; 11 others move; a step of the learning rate, 0.01, is less than half of the last bit "
                        "that bfloat16 has at their size: if they have 16 bits, rounding undoes it, since step 0"));
}

TEST_F(TensorWatchTest, RoundingIsNotSaidWhileTheRateRises) {
  for (int64_t step = 0; step < 100; ++step) {
    StepSample sample = WithStill(step, {3});
    sample.Add(SignalId::kLearningRate)[0] = 1e-7f * static_cast<float>(step);
    EXPECT_THAT(Judge(sample), IsEmpty()) << step;
  }
  EXPECT_THAT(Judge(MovingTensors(100)), IsEmpty());
}

TEST_F(TensorWatchTest, OneThatStandsStillNowAndThenIsNot) {
  JudgeMoving(0, 10);
  for (int64_t step = 10; step < 1000; ++step) {
    const bool still = step % 7 == 0 || (step > 100 && step % 7 == 1);
    EXPECT_THAT(Judge(WithStill(step, still ? std::vector<size_t>{3} : std::vector<size_t>{})), IsEmpty()) << step;
  }
  int64_t samples = 0;
  for (int64_t step = 1001; Judge(WithStill(step, {3})).empty(); ++step) ASSERT_LT(++samples, 20);
  EXPECT_GE(samples, 8);
}

TEST_F(TensorWatchTest, AStepThatChangesNothingIsNamedInTwoSamples) {
  JudgeMoving(0, 10);
  EXPECT_THAT(Judge(AllStill(10)), IsEmpty());
  const std::vector<Finding>& found = Judge(AllStill(11));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_EQ(found[0].cause, "optimizer does not move");
  EXPECT_EQ(found[0].summary,
            "the optimizer's step changes nothing: none of 12 parameters with a gradient has moved in 2 samples; the "
            "learning rate is 0.01: the step may be skipped, since step 10");
  EXPECT_THAT(Judge(MovingTensors(12)), IsEmpty());
  // The parameters have not stood still by themselves.
  EXPECT_THAT(Judge(WithStill(13, {3})), IsEmpty());
}

TEST_F(TensorWatchTest, ARateOfZeroIsSaid) {
  StepSample sample = AllStill(0);
  sample.Add(SignalId::kLearningRate)[0] = 0;
  Judge(sample);
  sample.step = 1;
  ASSERT_THAT(Judge(sample), SizeIs(1));
  EXPECT_THAT(watch_.findings()->front().summary, HasSubstr("in 2 samples; the learning rate is 0, since step 0"));
}

TEST_F(TensorWatchTest, OneStepAtARateOfZeroIsNoFault) {
  EXPECT_THAT(Judge(AllStill(0)), IsEmpty());
  JudgeMoving(1, 10);
  EXPECT_THAT(Judge(AllStill(10)), IsEmpty());  // As the last step of a decay to 0.
}

TEST_F(TensorWatchTest, NothingMovesWithoutAnyGradient) {
  for (int64_t step = 0; step < 10; ++step) {
    StepSample sample = AllStill(step);
    for (float& value : sample.Add(SignalId::kTensorGradMax)) value = 0;
    EXPECT_FALSE(watch_.Observe(sample, &names_));
    EXPECT_THAT(*watch_.findings(), IsEmpty());
  }
}

TEST_F(TensorWatchTest, SamplesWithoutAllRanksAreLeftOut) {
  for (int64_t step = 0; step < 10; ++step) {
    StepSample sample = AllStill(step);
    sample.complete = false;
    EXPECT_FALSE(watch_.Observe(sample, &names_));
  }
}

TEST_F(TensorWatchTest, SamplesWithoutTensorsAreLeftOut) {
  const RunDescription run = SyntheticRun();
  EXPECT_FALSE(watch_.Observe(SampleAt(run, {}, 10), nullptr));
  EXPECT_FALSE(watch_.has_seen());
}

TEST_F(TensorWatchTest, ANewAttemptBeginsAfresh) {
  Judge(WithStill(0, {3}));
  watch_.Rewind();
  EXPECT_THAT(Judge(WithStill(10, {3})), IsEmpty());
  EXPECT_THAT(Judge(WithStill(20, {3})), SizeIs(1));
}

TEST_F(TensorWatchTest, ItsStateGoesOnAfterARestart) {
  JudgeMoving(0, 10);
  Judge(WithStill(10, {3}));
  std::string saved;
  StateWriter writer(&saved);
  writer(watch_);
  TensorWatch restored{FrozenOptions{}};
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end());
  ASSERT_TRUE(restored.Consistent());
  restored.Observe(WithStill(11, {3}), &names_);
  ASSERT_THAT(*restored.findings(), SizeIs(1));
  EXPECT_EQ(restored.findings()->front().first_step, 10);
}

TEST(NonfiniteTensorsTest, FiniteGradientsAreNotNamed) {
  EXPECT_FALSE(FindNonfiniteTensors(MovingTensors(0), nullptr).has_value());
}

TEST(NonfiniteTensorsTest, TheLastOfTheModelIsNamedFirst) {
  const RowNames names = TensorNames();
  StepSample sample = MovingTensors(7);
  for (const size_t row : {2u, 5u, 4u}) sample.Add(SignalId::kTensorGradNonfinite)[row] = 3;
  sample.Add(SignalId::kTensorWeightSumsq)[2] = kNan;
  const std::optional<Finding> found = FindNonfiniteTensors(sample, &names);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->summary,
            "nonfinite: 3 elements of the gradient of layers.5.weight, which of these comes first in the backward "
            "pass, and of 2 other parameters; the optimizer has taken the step, and 1 parameter is not finite behind "
            "it, since step 7");
  EXPECT_EQ(found->note, "layers.5.weight, layers.4.weight, layers.2.weight");
}

TEST(NonfiniteTensorsTest, OneIsNamedByItself) {
  StepSample sample = MovingTensors(7);
  sample.Add(SignalId::kTensorGradNonfinite)[2] = 1;
  const std::optional<Finding> found = FindNonfiniteTensors(sample, nullptr);
  ASSERT_TRUE(found.has_value());
  EXPECT_THAT(found->summary, HasSubstr("1 elements of the gradient of tensor 2; the optimizer has taken the step"));
  EXPECT_THAT(found->note, Not(HasSubstr("...")));
}

}  // namespace
}  // namespace bellwether::server
