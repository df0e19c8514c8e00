// Goal: a weight or a gradient that jumps at one place alone is named in its sample, and nothing else is: what
// grows with all others, what grows from 0, what was restored.
// Method: samples of heads and parameters that train, with one thing planted.

#include "server/detect/corruption_watch.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
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

constexpr int kTensors = 12;

RowNames TensorNames() {
  RowNames names;
  for (int i = 0; i < kTensors; ++i) names.Add("layers." + std::to_string(i) + ".weight");
  return names;
}

RunDescription Described() {
  RunDescription run;
  run.name = "r";
  run.layout = {.layers = 3, .heads = 4, .kv_heads = 2};
  run.layout.tensors = kTensors;
  run.attention.score_dtype = "bf16";
  return run;
}

// Norms that wander by 2 % a sample and grow slowly.
StepSample Training(int64_t step) {
  std::mt19937 random(static_cast<uint32_t>(step));
  std::normal_distribution<float> normal(0, 0.02f);
  StepSample sample;
  sample.Reset(Described().layout);
  sample.step = step;
  const auto fill = [&](SignalId signal, float with) {
    for (float& value : sample.Add(signal))
      value = with * (1 + normal(random)) * (1 + 1e-4f * static_cast<float>(step));
  };
  fill(SignalId::kWqSigma, 2);
  fill(SignalId::kWkSigma, 1.5);
  fill(SignalId::kTensorWeightSumsq, 0.04f);
  fill(SignalId::kTensorGradMax, 0.01f);
  for (float& value : sample.Add(SignalId::kTensorElements)) value = 100;
  return sample;
}

class CorruptionWatchTest : public testing::Test {
 protected:
  const std::vector<Finding>& Judge(const StepSample& sample) {
    watch_.Observe(sample, &names_);
    return *watch_.findings();
  }
  // Trains up to `to`, in which nothing is wrong.
  void Train(int64_t to) {
    for (; step_ < to; step_ += 20) EXPECT_THAT(Judge(Training(step_)), IsEmpty()) << step_;
  }
  // The next sample, with something planted.
  const std::vector<Finding>& Plant(const std::function<void(StepSample*)>& plant) {
    StepSample sample = Training(step_);
    plant(&sample);
    step_ += 20;
    return Judge(sample);
  }

  RowNames names_ = TensorNames();
  CorruptionWatch watch_{CorruptionOptions{}};
  int64_t step_ = 0;
};

TEST_F(CorruptionWatchTest, NormsThatGrowSlowlyAreSilent) { Train(20000); }

TEST_F(CorruptionWatchTest, AHeadThatJumpsIsNamedUntilItIsBack) {
  Train(400);
  const auto jump = [](StepSample* sample) { sample->Add(SignalId::kWqSigma)[6] = 3e5f; };
  for (int i = 0; i < 5; ++i) {
    const std::vector<Finding>& found = Plant(jump);
    ASSERT_THAT(found, SizeIs(1));
    EXPECT_EQ(found[0].rule, Rule::kCorruption);
    EXPECT_EQ(found[0].severity, Severity::kCritical);
    EXPECT_EQ(found[0].where, (Head{1, 2}));
    EXPECT_EQ(found[0].first_step, 400);
    EXPECT_EQ(found[0].cause, "corruption");
    EXPECT_THAT(found[0].summary, HasSubstr("sigma(W_Q) of layer 1 head 2 was 2"));
    EXPECT_TRUE(watch_.spoils(1));
    EXPECT_FALSE(watch_.spoils(0));
  }
  Train(1000);
  EXPECT_FALSE(watch_.spoils(1));
}

TEST_F(CorruptionWatchTest, AParameterIsNamedByItsName) {
  Train(400);
  const std::vector<Finding>& found = Plant([](StepSample* sample) {
    sample->Add(SignalId::kTensorWeightSumsq)[3] = 1e6f;
    sample->Add(SignalId::kWkSigma)[5] = 1e3f;
  });
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_EQ(found[0].where, (Head{2, 1}));
  EXPECT_THAT(found[0].summary, HasSubstr("the parameter: layers.3.weight"));
  EXPECT_EQ(found[0].note, "layers.3.weight");
  EXPECT_THAT(found[1].summary, HasSubstr("the root mean square of layers.3.weight was 0.02"));
}

TEST_F(CorruptionWatchTest, AGradientThatJumpsIsAWarningOnce) {
  Train(400);
  const std::vector<Finding>& found =
      Plant([](StepSample* sample) { sample->Add(SignalId::kTensorGradMax)[7] = 1e30f; });
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_EQ(found[0].note, "layers.7.weight");
  EXPECT_THAT(found[0].summary, HasSubstr("an element of the gradient of layers.7.weight is 1e+30 at step 400"));
  Train(800);
}

TEST_F(CorruptionWatchTest, AJumpOfAllPlacesIsNoCorruption) {
  Train(400);
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(Plant([](StepSample* sample) {
                  for (const SignalId signal : {SignalId::kWqSigma, SignalId::kWkSigma, SignalId::kTensorGradMax}) {
                    for (float& value : sample->Add(signal)) value *= 1e6f;
                  }
                  sample->Add(SignalId::kWqSigma)[6] *= 100;
                }),
                IsEmpty());
  }
}

TEST_F(CorruptionWatchTest, WeightsThatBeginAtZeroMayGrowManifold) {
  for (; step_ < 2000; step_ += 20) {
    StepSample sample = Training(step_);
    const auto steps = static_cast<float>(step_ + 1);
    sample.Add(SignalId::kTensorWeightSumsq)[0] = 100 * 1e-6f * steps * steps;  // By the learning rate each step.
    sample.Add(SignalId::kTensorGradMax)[1] = step_ < 200 ? 1e-9f : 0.01f;
    EXPECT_THAT(Judge(sample), IsEmpty()) << step_;
  }
}

TEST_F(CorruptionWatchTest, AnExplosionOfManyStepsIsNoJump) {
  // Twentyfold in 500 steps, with samples of all distances.
  for (const int64_t period : {10, 20, 100, 500}) {
    CorruptionWatch watch{CorruptionOptions{}};
    for (int64_t step = 0; step < 4000; step += period) {
      StepSample sample = Training(step);
      if (step > 2000) {
        sample.Add(SignalId::kWqSigma)[6] *= std::exp(std::log(20.0f) / 500 * static_cast<float>(step - 2000));
      }
      watch.Observe(sample, &names_);
      EXPECT_THAT(*watch.findings(), IsEmpty()) << period << " " << step;
    }
  }
}

TEST_F(CorruptionWatchTest, ARestoredCheckpointMayHaveAnyWeights) {
  Train(400);
  watch_.Forget();
  EXPECT_THAT(Plant([](StepSample* sample) { sample->Add(SignalId::kWqSigma)[6] = 3e5f; }), IsEmpty());
}

TEST_F(CorruptionWatchTest, AJumpThatLastsIsTheNewNormal) {
  CorruptionOptions options;
  options.relearn_samples = 10;
  watch_.SetOptions(options);
  Train(400);
  int named = 0;
  for (int i = 0; i < 40; ++i) {
    named += !Plant([](StepSample* sample) { sample->Add(SignalId::kWqSigma)[6] = 3e5f; }).empty();
  }
  EXPECT_EQ(named, 10);
}

TEST_F(CorruptionWatchTest, ValuesThatAreNoNumbersEnterNothing) {
  Train(400);
  EXPECT_THAT(Plant([](StepSample* sample) {
                sample->Add(SignalId::kWqSigma)[6] = INFINITY;
                sample->Add(SignalId::kWkSigma)[1] = NAN;
                sample->Add(SignalId::kTensorGradMax)[1] = NotMeasured();
              }),
              IsEmpty());
  Train(800);
}

TEST(CorruptionJudgeTest, AFlippedBitIsCriticalUntilARestore) {
  const RunDescription run = Described();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  int64_t step = 0;
  for (; step < 1000; step += 20) judge.Observe(Training(step), &out);
  EXPECT_THAT(out, IsEmpty());
  for (int i = 0; i < 60; ++i, step += 20) {
    StepSample sample = Training(step);
    sample.Add(SignalId::kWqSigma)[6] = 3e5f;
    judge.Observe(sample, &out);
    if (i != 3) continue;
    const std::string saved = judge.Save();
    RunJudge restored(JudgeOptions{}, run);
    ASSERT_TRUE(restored.Restore(saved));
    EXPECT_EQ(restored.Save(), saved);
  }
  ASSERT_THAT(out, SizeIs(1));
  EXPECT_EQ(out[0].rule, "corruption");
  EXPECT_EQ(out[0].key, "p1");
  EXPECT_EQ(out[0].severity, Severity::kCritical);
  EXPECT_EQ(out[0].strongest, (Head{1, 2}));
  EXPECT_EQ(out[0].cause, "corruption");
  EXPECT_THAT(out[0].advice, testing::StartsWith("Go back to a checkpoint, and test this GPU."));
  judge.OnEvent({.step = step, .kind = EventKind::kRestore, .value = 900}, &out);
  for (const int64_t end = step + 1100; step < end; step += 20) judge.Observe(Training(step), &out);
  ASSERT_THAT(out, SizeIs(2));
  EXPECT_EQ(out[1].state, AlertState::kResolved);
}

}  // namespace
}  // namespace bellwether::server
