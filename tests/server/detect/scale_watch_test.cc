// Goal: a tensor that clamps in 8 bits, or becomes 0, is told in the second sample that covers it, with its module,
// layer and side.  A share that was always there is how the tensor is scaled, and the first step of delayed scaling
// says nothing.
// Method: made-up counts of a module's tensors, with one thing planted.

#include "server/detect/scale_watch.h"

#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "server/detect/archive.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr float kElements = 10000;
constexpr int64_t kQuiet = 1000;

class ScaleWatchTest : public testing::Test {
 protected:
  // Of all three rows the usual, of row 1 what is said; a negative share: the sample does not cover it.
  StepSample Next(double saturated, double flushed) {
    StepSample sample;
    Layout layout{.layers = 4, .heads = 1, .kv_heads = 1};
    layout.modules = names_.size();
    sample.Reset(layout);
    sample.step = step_;
    step_ += 10;
    const auto set = [&](SignalId signal, float usual, double share) {
      const auto values = sample.Add(signal);
      for (float& value : values) value = usual;
      values[1] = share < 0 ? NotMeasured() : static_cast<float>(share * kElements);
    };
    set(SignalId::kFp8Elements, kElements, saturated < 0 ? -1 : 1);
    set(SignalId::kFp8NonzeroInputs, kElements, saturated < 0 ? -1 : 1);
    set(SignalId::kFp8Saturated, 20, saturated);
    set(SignalId::kFp8Flushed, 15, flushed);
    return sample;
  }
  std::vector<Finding> Judge(double saturated, double flushed = 0) {
    watch_.Observe(Next(saturated, flushed), &names_, kQuiet);
    std::vector<Finding> findings;
    watch_.AddTo(&findings);
    return findings;
  }
  void JudgeHealthy(int samples) {
    for (int i = 0; i < samples; ++i) ASSERT_THAT(Judge(0.0005 * (i % 4), 0.001 * (i % 3)), IsEmpty()) << step_;
  }

  int64_t step_ = 100;
  RowNames names_{{"layers.0.mlp.up fp8:x", "layers.3.mlp.down fp8:dy", "layers.3.mlp.down fp8:w"}};
  ScaleWatch watch_{ParametersOptions{}};
};

TEST_F(ScaleWatchTest, AClampedTensorIsToldInItsSecondSample) {
  JudgeHealthy(20);
  EXPECT_THAT(Judge(0.37), IsEmpty());
  EXPECT_THAT(Judge(-1, -1), IsEmpty()) << "another module's turn";
  std::vector<Finding> found = Judge(0.32);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_EQ(found[0].cause, "FP8 saturation");
  EXPECT_EQ(found[0].where, (Head{3, -1}));
  EXPECT_EQ(found[0].first_step, 300);
  EXPECT_EQ(found[0].facts[0].signal, std::string("fp8_saturated_share"));
  EXPECT_THAT(found[0].summary, HasSubstr("32 % of the output's gradient of layers.3.mlp.down are at the largest"));
  EXPECT_TRUE(found[0].news);
  found = Judge(-1, -1);
  ASSERT_THAT(found, SizeIs(1)) << "it goes on while others have their turn";
  EXPECT_FALSE(found[0].news);
  JudgeHealthy(20);
}

TEST_F(ScaleWatchTest, ATensorThatBecomes0IsTold) {
  JudgeHealthy(20);
  Judge(0, 0.2);
  const std::vector<Finding> found = Judge(0, 0.3);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].facts[0].signal, std::string("fp8_flushed_share"));
  EXPECT_THAT(found[0].summary, HasSubstr("30 % of the output's gradient of layers.3.mlp.down are 0 and were not"));
}

TEST_F(ScaleWatchTest, AShareThatWasAlwaysThereIsUsual) {
  // Blocks of 16 have their largest element there; of a tensor of signs all are.
  for (int i = 0; i < 20; ++i) ASSERT_THAT(Judge(1), IsEmpty()) << i;
  watch_.Rewind();
  for (int i = 0; i < 20; ++i) ASSERT_THAT(Judge(0.07), IsEmpty()) << i;
  Judge(0.29);
  EXPECT_THAT(Judge(0.29), SizeIs(1));
}

TEST_F(ScaleWatchTest, AScaleThatNeverFittedIsTold) {
  Judge(0.3);
  EXPECT_THAT(Judge(0.3), IsEmpty());
  EXPECT_THAT(Judge(0.3), SizeIs(1));
}

TEST_F(ScaleWatchTest, TheFirstStepHasNoScaleYet) {
  EXPECT_THAT(Judge(0, 1), IsEmpty());
  JudgeHealthy(20);
}

TEST_F(ScaleWatchTest, AShareThatGrowsFromTheStartIsTold) {
  int samples = 0;
  for (double share = 1e-4; Judge(share).empty(); share *= 1.5) ASSERT_LT(++samples, 20);
  EXPECT_LE(samples, 14);
}

TEST_F(ScaleWatchTest, TheJudgeTellsItInTheFirstSteps) {
  RunDescription run;
  run.name = "r";
  run.layout = {.layers = 4, .heads = 1, .kv_heads = 1};
  run.layout.modules = names_.size();
  const auto rows = std::make_shared<RunRows>();
  for (const std::string& name : names_.names()) rows->modules.Add(name);
  RunJudge judge(JudgeOptions(), run);
  judge.SetRows(rows);
  std::vector<AlertTransition> out;
  for (int i = 0; i < 8; ++i) judge.Observe(Next(0, 0), &out);
  judge.Observe(Next(0.2, 0), &out);
  ASSERT_THAT(out, IsEmpty());
  RunJudge restored(JudgeOptions(), run);
  restored.SetRows(rows);
  ASSERT_TRUE(restored.Restore(judge.Save()));
  EXPECT_EQ(restored.Save(), judge.Save());
  restored.Observe(Next(0.2, 0), &out);
  ASSERT_THAT(out, SizeIs(1));
  EXPECT_EQ(out[0].rule, "parameters");
  EXPECT_EQ(out[0].cause, "FP8 saturation");
  EXPECT_EQ(out[0].strongest, (Head{3, -1}));
  EXPECT_THAT(out[0].advice, testing::StartsWith("Look at the scale of the named tensor"));
}

}  // namespace
}  // namespace bellwether::server
