// Goal: a weight that grows by the same share in every step is named in some samples, with its layer and what it
// does in the model.  Weights that an optimizer moves are not, however small they began, and whatever the rate does.
// Method: sizes of the weights of a model of four layers, of which each gains what a learning rate and its own
// share of it add in a step, with one thing planted.

#include "server/detect/growth_watch.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <memory>
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
using testing::SizeIs;

constexpr int64_t kGrowthEvery = 10;
constexpr GrowthWatch::Context kJudgedGrowth{.quiet_steps = 1000};

std::vector<std::string> NamesOfWeights() {
  std::vector<std::string> names = {"embed_tokens.weight"};
  for (int layer = 0; layer < 4; ++layer) {
    for (const char* const part : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                   "mlp.up_proj", "mlp.down_proj", "mlp.router", "norm"}) {
      names.push_back("layers." + std::to_string(layer) + "." + part + ".weight");
    }
  }
  names.push_back("lm_head.weight");
  return names;
}

class GrowthWatchTest : public testing::Test {
 protected:
  GrowthWatchTest() : names_(NamesOfWeights()), sizes_(static_cast<size_t>(names_.size()), 0.02) {
    std::uniform_real_distribution<double> share(0.02, 0.3);
    for (size_t i = 0; i < sizes_.size(); ++i) shares_.push_back(share(random_));
  }
  size_t Row(const std::string& name) const { return static_cast<size_t>(names_.Find(name)); }
  StepSample Next() {
    StepSample sample;
    Layout layout{.layers = 4, .heads = 1, .kv_heads = 1};
    layout.tensors = names_.size();
    sample.Reset(layout);
    sample.step = step_;
    sample.Add(SignalId::kTensorWeightSumsq), sample.Add(SignalId::kTensorElements);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      sample.Add(SignalId::kTensorElements)[i] = 4096;
      sample.Add(SignalId::kTensorWeightSumsq)[i] = static_cast<float>(4096 * sizes_[i] * sizes_[i]);
    }
    if (tells_rate_) sample.Add(SignalId::kLearningRate)[0] = static_cast<float>(rate_(step_));
    for (int64_t end = step_ + kGrowthEvery; step_ < end; ++step_) {
      for (size_t i = 0; i < sizes_.size(); ++i) {
        sizes_[i] += rate_(step_) * shares_[i] * (1 + 0.3 * normal_(random_));
        sizes_[i] *= 1 + (faulty_(i) ? push_ : 0);
      }
    }
    return sample;
  }
  const std::vector<Finding>& Judge(const GrowthWatch::Context& context = kJudgedGrowth) {
    watch_.Observe(Next(), &names_, context);
    return watch_.findings();
  }
  void JudgeHealthy(int samples, const GrowthWatch::Context& context = kJudgedGrowth) {
    for (int i = 0; i < samples; ++i) ASSERT_THAT(Judge(context), IsEmpty()) << step_;
  }
  // From the last sample on.
  void Push(double share, const std::vector<std::string>& names) {
    push_ = share;
    faulty_ = [this, names](size_t row) {
      for (const std::string& name : names) {
        if (Row(name) == row) return true;
      }
      return false;
    };
  }
  // Samples until something is found, at most `most`.
  int Until(int most) {
    for (int i = 1; i <= most; ++i) {
      if (!Judge().empty()) return i;
    }
    return most + 1;
  }

  RowNames names_;
  std::mt19937 random_{3};
  std::normal_distribution<double> normal_;
  std::vector<double> sizes_, shares_;
  std::function<double(int64_t)> rate_ = [](int64_t) { return 1e-3; };
  std::function<bool(size_t)> faulty_ = [](size_t) { return false; };
  double push_ = 0;
  bool tells_rate_ = true;
  int64_t step_ = 0;
  GrowthWatch watch_{ParametersOptions{}};
};

TEST_F(GrowthWatchTest, ABlockThatAddsMoreIsNamedWithItsLayer) {
  JudgeHealthy(30);
  Push(0.03, {"layers.2.self_attn.o_proj.weight", "layers.2.mlp.down_proj.weight"});
  JudgeHealthy(1);  // Up to the sample behind which they begin to grow.
  EXPECT_LE(Until(10), 3);
  ASSERT_THAT(watch_.findings(), SizeIs(2));
  const Finding& found = watch_.findings()[0];
  EXPECT_EQ(found.rule, Rule::kParameters);
  EXPECT_EQ(found.severity, Severity::kWarning);
  EXPECT_EQ(found.cause, "residual growth");
  EXPECT_EQ(found.where, (Head{2, -1}));
  EXPECT_EQ(found.first_step, 300);
  EXPECT_TRUE(found.news);
  EXPECT_EQ(found.facts[0].signal, std::string("tensor_weight_rms"));
  EXPECT_THAT(found.summary,
              AllOf(HasSubstr("what a block adds to the residual stream grows: the root mean square of "),
                    HasSubstr("layers.2.self_attn.o_proj.weight"), HasSubstr("layers.2.mlp.down_proj.weight"),
                    HasSubstr(" grows, too, since step 300")));
  // The loss of half the runs was 5 % higher at exp(5.2) times the size.
  ASSERT_TRUE(found.eta.known);
  const double grown = std::log(found.facts[0].value / found.facts[0].baseline);
  EXPECT_NEAR(found.eta.steps, (5.2 - grown) / std::log(1.03), 0.1 * found.eta.steps);
  EXPECT_STREQ(found.eta_words, "the loss is expected to be 5 % higher");
  EXPECT_LT(found.eta.lower_steps, found.eta.steps);
  EXPECT_GT(found.eta.upper_steps, found.eta.steps);
  EXPECT_FALSE(Judge().front().news);
  push_ = 0;
  Judge();  // It grew up to here.
  JudgeHealthy(100);
}

TEST_F(GrowthWatchTest, TheOutputLayerIsNamed) {
  JudgeHealthy(30);
  Push(0.02, {"lm_head.weight"});
  JudgeHealthy(1);
  EXPECT_LE(Until(10), 4);
  ASSERT_THAT(watch_.findings(), SizeIs(1));
  EXPECT_EQ(watch_.findings()[0].cause, "head growth");
  EXPECT_EQ(watch_.findings()[0].where, (Head{-1, -1}));
  EXPECT_EQ(watch_.findings()[0].note, "lm_head.weight");
}

TEST_F(GrowthWatchTest, QueriesAndKeysAreLogitGrowth) {
  JudgeHealthy(30);
  Push(0.02, {"layers.1.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight"});
  JudgeHealthy(1);
  EXPECT_LE(Until(10), 4);
  EXPECT_EQ(watch_.findings()[0].cause, "logit growth");
  EXPECT_EQ(watch_.findings()[0].where, (Head{1, -1}));
}

TEST_F(GrowthWatchTest, AnotherWeightHasTheCauseOfItsFamily) {
  JudgeHealthy(30);
  Push(0.03, {"layers.1.self_attn.v_proj.weight"});
  EXPECT_LE(Until(10), 4);
  EXPECT_EQ(watch_.findings()[0].cause, "");
}

TEST_F(GrowthWatchTest, GainsAndRoutersAreNoSuchWeights) {
  JudgeHealthy(30);
  Push(0.03, {"layers.1.norm.weight", "layers.1.mlp.router.weight"});
  JudgeHealthy(30);
}

TEST_F(GrowthWatchTest, HealthyWeightsAreSilentWhileTheRateWarmsUp) {
  rate_ = [](int64_t step) {
    return step < 400 ? 3e-3 * static_cast<double>(step) / 400 : 3e-3 * std::exp(-static_cast<double>(step) / 3000);
  };
  sizes_[Row("lm_head.weight")] = 0;  // Grows manifold at first.
  sizes_[Row("layers.0.mlp.down_proj.weight")] = 1e-5;
  shares_[Row("lm_head.weight")] = 0.6;
  for (int i = 0; i < 300; ++i) {
    GrowthWatch::Context context = kJudgedGrowth;
    context.warming = step_ < 700;
    ASSERT_THAT(Judge(context), IsEmpty()) << step_;
  }
}

TEST_F(GrowthWatchTest, ARateThatRisesIsNoFault) {
  rate_ = [](int64_t step) { return step < 1000 ? 1e-4 : 2e-3; };
  shares_[Row("lm_head.weight")] = 0.9;
  JudgeHealthy(200);
}

TEST_F(GrowthWatchTest, FirstStepsWithoutARateAreNotJudged) {
  tells_rate_ = false;
  const GrowthWatch::Context warming{.warming = true, .quiet_steps = 1000};
  JudgeHealthy(30, warming);
  Push(0.03, {"lm_head.weight"});
  JudgeHealthy(5, warming);
}

TEST_F(GrowthWatchTest, GrowthOfAllIsNoFaultOfOne) {
  JudgeHealthy(30);
  push_ = 0.03;
  faulty_ = [](size_t) { return true; };
  JudgeHealthy(30);
}

TEST_F(GrowthWatchTest, AJumpIsNoGrowth) {
  JudgeHealthy(30);
  sizes_[Row("lm_head.weight")] *= 10;
  JudgeHealthy(50);
}

TEST_F(GrowthWatchTest, AChangeThatWasAnnouncedIsLearnt) {
  JudgeHealthy(30);
  Push(0.005, {"lm_head.weight"});
  JudgeHealthy(20, {.excused = true, .quiet_steps = 1000});
  JudgeHealthy(10);
}

TEST_F(GrowthWatchTest, GrowthThatGoesOnIsTheNewNormal) {
  JudgeHealthy(30);
  Push(0.01, {"lm_head.weight"});
  ASSERT_LE(Until(10), 5);
  int samples = 0;
  while (!Judge().empty()) ASSERT_LT(++samples, 200);
  EXPECT_NEAR(samples, ParametersOptions{}.relearn_samples, 5);
}

TEST_F(GrowthWatchTest, ARestoredCheckpointIsNoGrowth) {
  JudgeHealthy(30);
  for (int i = 0; i < 5; ++i) {
    sizes_[Row("lm_head.weight")] *= 1.5;
    watch_.Rewind();
    JudgeHealthy(1);
  }
}

TEST_F(GrowthWatchTest, WithoutNamesNothingIsJudged) {
  EXPECT_FALSE(watch_.Observe(Next(), nullptr, kJudgedGrowth));
  StepSample sample = Next();
  sample.complete = false;
  EXPECT_FALSE(watch_.Observe(sample, &names_, kJudgedGrowth));
}

TEST_F(GrowthWatchTest, ItsStateGoesOnAfterARestart) {
  JudgeHealthy(30);
  Push(0.03, {"lm_head.weight"});
  JudgeHealthy(2);
  std::string saved;
  StateWriter writer(&saved);
  writer(watch_);
  GrowthWatch restored{ParametersOptions{}};
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end());
  ASSERT_TRUE(restored.Consistent());
  int samples = 0;
  while (restored.findings().empty()) {
    ASSERT_LT(++samples, 4);
    restored.Observe(Next(), &names_, kJudgedGrowth);
  }
  EXPECT_EQ(restored.findings()[0].first_step, 300);
}

TEST_F(GrowthWatchTest, TheJudgeTellsItInTheFirstSteps) {
  RunDescription run;
  run.name = "r";
  run.layout = {.layers = 4, .heads = 1, .kv_heads = 1};
  run.layout.tensors = names_.size();
  const auto rows = std::make_shared<RunRows>();
  for (const std::string& name : names_.names()) rows->tensors.Add(name);
  RunJudge judge(JudgeOptions(), run);
  judge.SetRows(rows);
  std::vector<AlertTransition> out;
  for (int i = 0; i < 30; ++i) judge.Observe(Next(), &out);
  EXPECT_THAT(out, IsEmpty());
  Push(0.03, {"layers.2.self_attn.o_proj.weight"});
  for (int i = 0; i < 4; ++i) judge.Observe(Next(), &out);
  ASSERT_THAT(out, SizeIs(1));
  EXPECT_EQ(out[0].rule, "parameters");
  EXPECT_EQ(out[0].cause, "residual growth");
  EXPECT_EQ(out[0].strongest, (Head{2, -1}));
  EXPECT_THAT(out[0].advice, testing::StartsWith("Look at the weight decay and the learning rate"));
  const std::string saved = judge.Save();
  RunJudge restored(JudgeOptions(), run);
  restored.SetRows(rows);
  ASSERT_TRUE(restored.Restore(saved));
  EXPECT_EQ(restored.Save(), saved);
  restored.Observe(Next(), &out);
  EXPECT_THAT(out, SizeIs(1)) << "it was told";
}

}  // namespace
}  // namespace bellwether::server
