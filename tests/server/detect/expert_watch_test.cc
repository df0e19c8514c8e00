// Goal: experts that lose their tokens and routers that collapse are named within some samples, in their
// layer.  Healthy routers are not, however they share out their tokens: balanced, skewed, with experts that
// most batches do not need, and over padding.
// Method: loads of four layers of sixteen experts, drawn at random, with one thing planted.

#include "server/detect/expert_watch.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
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

constexpr int kExpertLayers = 4, kExpertsOfLayer = 16, kChosen = 2;
constexpr double kRoutedTokens = 1024;
constexpr int64_t kQuietSteps = 1000;

// A router's choices of a step: shares of the tokens, by layer and expert, which need not add up to one.
using Shares = std::vector<std::vector<double>>;

Shares Balanced() { return Shares(kExpertLayers, std::vector<double>(kExpertsOfLayer, 1.0)); }

StepSample Routed(int64_t step, const Shares& shares, double tokens = kRoutedTokens) {
  StepSample sample;
  Layout layout{.layers = kExpertLayers, .heads = 1, .kv_heads = 1};
  layout.experts = kExpertsOfLayer;
  sample.Reset(layout);
  sample.step = step;
  std::mt19937 random(static_cast<uint32_t>(step));
  for (const SignalId signal : {SignalId::kExpertLoad, SignalId::kRouterTokens, SignalId::kRouterEntropySum,
                                SignalId::kRouterEntropyLargestSum}) {
    sample.Add(signal);
  }
  for (size_t layer = 0; layer < kExpertLayers; ++layer) {
    double sum = 0;
    for (const double share : shares[layer]) sum += share;
    for (size_t i = 0; i < kExpertsOfLayer; ++i) {
      const double mean = kChosen * tokens * shares[layer][i] / sum;
      const double load = mean > 0 ? std::poisson_distribution<int>(mean)(random) : 0;
      sample.Add(SignalId::kExpertLoad)[layer * kExpertsOfLayer + i] = static_cast<float>(std::min(load, tokens));
    }
    sample.Add(SignalId::kRouterTokens)[layer] = static_cast<float>(tokens);
    sample.Add(SignalId::kRouterEntropySum)[layer] = static_cast<float>(tokens);
    sample.Add(SignalId::kRouterEntropyLargestSum)[layer] = static_cast<float>(4 * tokens);
  }
  return sample;
}

Shares WithDead(size_t layer, std::vector<size_t> dead) {
  Shares shares = Balanced();
  for (const size_t i : dead) shares[layer][i] = 0;
  return shares;
}

Shares WithCollapsed(size_t layer) {
  Shares shares = Balanced();
  shares[layer].assign(kExpertsOfLayer, 1e-4);
  shares[layer][3] = shares[layer][7] = 1;
  return shares;
}

class ExpertWatchTest : public testing::Test {
 protected:
  const std::vector<Finding>& Judge(const StepSample& sample) {
    watch_.Observe(sample, kQuietSteps);
    return *watch_.findings();
  }
  // From step_ on; all must be silent.
  void JudgeHealthy(int samples, const Shares& shares = Balanced()) {
    for (int i = 0; i < samples; ++i) ASSERT_THAT(Judge(Routed(step_++, shares)), IsEmpty()) << "step " << step_;
  }
  // Samples until something is found, at most `most`.
  int Until(int most, const Shares& shares) {
    for (int i = 1; i <= most; ++i) {
      if (!Judge(Routed(step_++, shares)).empty()) return i;
    }
    return most + 1;
  }

  int64_t step_ = 1000;
  ExpertWatch watch_{ExpertsOptions{}};
};

TEST_F(ExpertWatchTest, AnExpertThatHadTokensIsNamedInTwoSamples) {
  JudgeHealthy(100);
  EXPECT_EQ(Until(20, WithDead(2, {5})), 2);
  const std::vector<Finding>& found = *watch_.findings();
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].rule, Rule::kExperts);
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_EQ(found[0].where, (Head{2, -1}));
  EXPECT_EQ(found[0].facts[0].where, (Head{2, 5}));
  EXPECT_EQ(found[0].facts[0].signal, std::string("expert_load"));
  EXPECT_EQ(found[0].first_step, 1100);
  EXPECT_EQ(found[0].summary,
            "1 of 16 experts of layer 2 has had no token in 2 samples, after having some: expert 5, since step 1100");
  EXPECT_THAT(Judge(Routed(step_, Balanced())), IsEmpty());
}

TEST_F(ExpertWatchTest, AnExpertWithoutTokensFromTheStartIsInformation) {
  EXPECT_EQ(Until(100, WithDead(1, {4, 9})), 64);
  ASSERT_THAT(*watch_.findings(), SizeIs(1));
  EXPECT_EQ(watch_.findings()->front().severity, Severity::kInfo);
  EXPECT_THAT(watch_.findings()->front().summary,
              HasSubstr("2 of 16 experts of layer 1 have had no token in 64 samples: experts 4, 9, since step 1000"));
}

TEST_F(ExpertWatchTest, OneThatHadTokensFewTimesIsInformation) {
  JudgeHealthy(10);
  EXPECT_EQ(Until(100, WithDead(1, {4})), 64);
  EXPECT_EQ(watch_.findings()->front().severity, Severity::kInfo);
}

TEST_F(ExpertWatchTest, DeadExpertsStaySoBehindAChange) {
  JudgeHealthy(100);
  ASSERT_EQ(Until(20, WithDead(2, {5})), 2);
  watch_.Forget();
  EXPECT_THAT(Judge(Routed(step_++, WithDead(2, {5}))), SizeIs(1));
}

TEST_F(ExpertWatchTest, DeadExpertsStaySoInANewAttempt) {
  JudgeHealthy(100);
  ASSERT_EQ(Until(20, WithDead(2, {5})), 2);
  watch_.Rewind();
  step_ = 50;  // From a checkpoint.
  ASSERT_THAT(Judge(Routed(step_++, WithDead(2, {5}))), SizeIs(1));
  EXPECT_FALSE(watch_.findings()->front().news);
  EXPECT_EQ(watch_.findings()->front().first_step, 50);
  JudgeHealthy(1);
}

TEST_F(ExpertWatchTest, ARouterThatComesAndGoesIsToldOnce) {
  JudgeHealthy(100);
  int news = 0;
  for (int i = 0; i < 20; ++i) {
    for (int j = 0; j < 10; ++j) {
      for (const Finding& found : Judge(Routed(step_++, WithCollapsed(1)))) {
        news += found.news && found.facts[0].detector == std::string("breadth");
      }
    }
    JudgeHealthy(5);
  }
  EXPECT_EQ(news, 1);
  JudgeHealthy(static_cast<int>(kQuietSteps) + 1);
  ASSERT_EQ(Until(20, WithCollapsed(1)), 2);
  EXPECT_TRUE(watch_.findings()->front().news) << "its alert has ended";
}

TEST_F(ExpertWatchTest, ManyDeadExpertsOfALayerAreToldOnce) {
  JudgeHealthy(100);
  Shares shares = WithDead(0, {0, 1, 2, 3, 4, 5, 6, 7, 8});
  ASSERT_EQ(Until(20, shares), 2);
  shares[2][5] = 0;
  int news = 0;
  for (int i = 0; i < 8; ++i) news += Judge(Routed(step_++, shares))[0].news;
  EXPECT_EQ(news, 1);
}

TEST_F(ExpertWatchTest, ExpertsThatComeAndGoAreToldOnce) {
  JudgeHealthy(100);
  int news = 0;
  for (const int idle : {8, 80}) {  // Its habit makes it wait longer.
    for (int j = 0; j < idle; ++j) {
      for (const Finding& found : Judge(Routed(step_++, WithDead(2, {5})))) news += found.news;
    }
    JudgeHealthy(5);
  }
  EXPECT_EQ(news, 1);
}

TEST(ExpertJudgeTest, ARestartResolvesNoDeadExpert) {
  RunDescription run;
  run.name = "r";
  run.layout = {.layers = kExpertLayers, .heads = 1, .kv_heads = 1};
  run.layout.experts = kExpertsOfLayer;
  RunJudge judge(JudgeOptions(), run);
  std::vector<AlertTransition> out;
  int64_t step = 1000;
  const auto to = [&](int samples, const Shares& shares, uint32_t attempt) {
    for (int i = 0; i < samples; ++i, step += 20) {
      StepSample sample = Routed(step, shares);
      sample.attempt = attempt;
      judge.Observe(sample, &out);
    }
  };
  to(100, Balanced(), 0);
  to(20, WithDead(2, {5}), 0);
  ASSERT_THAT(out, SizeIs(1));
  EXPECT_EQ(out[0].rule, "experts");
  step = 2000;
  to(300, WithDead(2, {5}), 1);
  EXPECT_THAT(out, SizeIs(1)) << out.back().summary;
  to(60, Balanced(), 1);
  ASSERT_THAT(out, SizeIs(2));
  EXPECT_EQ(out[1].state, AlertState::kResolved);
}

TEST_F(ExpertWatchTest, OneThatDiesLaterIsNewsAndNamedFirst) {
  JudgeHealthy(100);
  ASSERT_EQ(Until(20, WithDead(2, {5})), 2);
  EXPECT_TRUE(watch_.findings()->front().news);
  Shares shares = WithDead(2, {5});
  EXPECT_FALSE(Judge(Routed(step_++, shares))[0].news);
  shares[3][1] = 0;
  for (int i = 0; i < 2; ++i) Judge(Routed(step_++, shares));
  ASSERT_THAT(*watch_.findings(), SizeIs(2));
  EXPECT_TRUE(watch_.findings()->front().news);
  EXPECT_THAT(watch_.findings()->front().summary,
              AllOf(HasSubstr("of layer 3 has"), HasSubstr("; 1 of 16 experts of layer 2 has")));
}

TEST_F(ExpertWatchTest, ARouterThatCollapsesIsNamedInTwoSamples) {
  JudgeHealthy(100);
  EXPECT_EQ(Until(20, WithCollapsed(1)), 2);
  const Finding& found = watch_.findings()->front();
  EXPECT_EQ(found.where, (Head{1, -1}));
  EXPECT_EQ(found.severity, Severity::kWarning);
  EXPECT_EQ(found.cause, "dead experts");
  EXPECT_EQ(found.facts[1].signal, std::string("expert_share"));
  EXPECT_THAT(found.facts[1].where, testing::AnyOf(Head{1, 3}, Head{1, 7}));
  EXPECT_THAT(found.summary, AllOf(HasSubstr("the router of layer 1 sends its tokens to the same few experts"),
                                   HasSubstr("the entropy of its softmax is 0.25 of the largest, since step 1100")));
  EXPECT_NEAR(found.facts[0].value, 8, 0.2);
}

TEST_F(ExpertWatchTest, OneExpertThatAllTokensTakeIsACollapse) {
  JudgeHealthy(100);
  Shares shares = Balanced();
  shares[0][6] = kExpertsOfLayer - 1;  // Every token's first choice; the second varies.
  for (const double entropy : {1.0, 0.01}) {
    for (int i = 1; i <= 8; ++i) {
      StepSample sample = Routed(step_++, shares);
      sample.Add(SignalId::kExpertLoad)[6] = static_cast<float>(kRoutedTokens);
      sample.Add(SignalId::kRouterEntropySum)[0] = static_cast<float>(entropy * kRoutedTokens);
      EXPECT_THAT(Judge(sample), SizeIs(entropy < 1 && i >= 2 ? 1 : 0)) << entropy << " " << i;
    }
  }
}

TEST_F(ExpertWatchTest, ACollapseIsNamedHoweverSlowItComes) {
  JudgeHealthy(100);
  for (double share = 1; share > 1e-4; share *= 0.999) {
    Shares shares = Balanced();
    for (size_t i = 2; i < kExpertsOfLayer; ++i) shares[0][i] = share;
    if (!Judge(Routed(step_++, shares)).empty()) break;
  }
  EXPECT_THAT(*watch_.findings(), SizeIs(1));
}

TEST_F(ExpertWatchTest, ABatchOfOneTokenAloneIsNoCollapse) {
  JudgeHealthy(100);
  for (int i = 0; i < 20; ++i) {
    EXPECT_THAT(Judge(Routed(step_++, WithCollapsed(1))), IsEmpty());
    JudgeHealthy(5);
  }
}

TEST_F(ExpertWatchTest, SkewedRoutersAreHealthy) {
  Shares shares = Balanced();
  for (size_t i = 0; i < kExpertsOfLayer; ++i) shares[1][i] = std::pow(1.5, -static_cast<double>(i));
  JudgeHealthy(3000, shares);
}

// An expert of a language that few documents have.
TEST_F(ExpertWatchTest, ExpertsThatFewBatchesNeedAreHealthy) {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    Shares shares = Balanced();
    for (size_t layer = 0; layer < kExpertLayers; ++layer) {
      for (size_t e = 0; e < 8; ++e) {
        shares[layer][e] = std::bernoulli_distribution(0.5 / static_cast<double>(1 << e))(random) ? 1 : 0;
      }
    }
    // The rarest may have none in the first 64 samples, which is information.
    for (const Finding& finding : Judge(Routed(step_++, shares))) {
      ASSERT_EQ(finding.severity, Severity::kInfo) << finding.summary;
    }
  }
}

TEST_F(ExpertWatchTest, BatchesOfPaddingAreHealthy) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> padding(0, 0.95);
  for (int i = 0; i < 5000; ++i) {
    Shares shares = Balanced();
    const double of_pads = padding(random);
    for (std::vector<double>& row : shares) {
      for (double& share : row) share *= (1 - of_pads) / kExpertsOfLayer;
      row[3] += of_pads / 2;
      row[7] += of_pads / 2;
    }
    ASSERT_THAT(Judge(Routed(step_++, shares)), IsEmpty());
  }
}

TEST_F(ExpertWatchTest, FewTokensAreHealthy) {
  for (int i = 0; i < 5000; ++i) ASSERT_THAT(Judge(Routed(step_++, Balanced(), 8)), IsEmpty()) << i;
}

TEST_F(ExpertWatchTest, SamplesThatLackARankSayNothing) {
  JudgeHealthy(100);
  for (int i = 0; i < 50; ++i) {
    StepSample sample = Routed(step_++, WithDead(2, {5}));
    sample.complete = false;
    EXPECT_FALSE(watch_.Observe(sample, kQuietSteps));
    EXPECT_THAT(*watch_.findings(), IsEmpty());
  }
}

TEST_F(ExpertWatchTest, FewTokensNeedMoreSamples) {
  Shares shares = Balanced();
  shares[2][5] = 0.1;  // Of 128 tokens at a mean expert, some 13; its lowest share gives fewer.
  JudgeHealthy(100, shares);
  shares[2][5] = 0;
  const int samples = Until(20, shares);
  EXPECT_GT(samples, 2);
  EXPECT_LE(samples, 8);
}

TEST_F(ExpertWatchTest, AnExpertThatWasIdleBeforeWaitsByItsHabit) {
  JudgeHealthy(50);
  ASSERT_THAT(Judge(Routed(step_++, WithDead(2, {5}))), IsEmpty());
  JudgeHealthy(50);
  EXPECT_EQ(Until(30, WithDead(2, {5})), 16);
}

TEST_F(ExpertWatchTest, FirstStepsTellInTwoSamplesAndLeaveNoHabit) {
  const auto warm = [this](const Shares& shares) -> const std::vector<Finding>& {
    watch_.Observe(Routed(step_++, shares), kQuietSteps, true);
    return *watch_.findings();
  };
  for (int i = 0; i < 20; ++i) ASSERT_THAT(warm(Balanced()), IsEmpty());
  for (const Shares& wrong : {WithDead(2, {5}), WithCollapsed(1)}) {
    EXPECT_THAT(warm(wrong), IsEmpty());
    EXPECT_FALSE(warm(wrong).empty());
    EXPECT_THAT(warm(Balanced()), IsEmpty());
  }
  for (int i = 0; i < 100; ++i) ASSERT_THAT(warm(WithDead(3, {0, 5})), SizeIs(i < 1 ? 0 : 1)) << i;
  JudgeHealthy(20);
  EXPECT_EQ(Until(20, WithDead(2, {5})), 2) << "what it did in the first steps is forgotten";
}

TEST_F(ExpertWatchTest, LayersWithFewerExpertsAreJudgedByThose) {
  for (int i = 0; i < 200; ++i) {
    StepSample sample = Routed(step_++, Balanced());
    for (size_t e = 4; e < kExpertsOfLayer; ++e) sample.Add(SignalId::kExpertLoad)[e] = NotMeasured();
    ASSERT_THAT(Judge(sample), IsEmpty());
  }
}

TEST_F(ExpertWatchTest, ASavedStateGoesOn) {
  JudgeHealthy(100);
  ASSERT_EQ(Until(1, WithDead(2, {5})), 2);
  std::string saved;
  StateWriter writer(&saved);
  writer(watch_);
  watch_.VisitLatest(writer);
  ExpertWatch restored{ExpertsOptions{}};
  StateReader reader(saved);
  reader(restored);
  restored.VisitLatest(reader);
  ASSERT_TRUE(reader.at_end() && restored.Consistent());
  EXPECT_TRUE(restored.Observe(Routed(step_, WithDead(2, {5})), kQuietSteps));
  EXPECT_THAT(*restored.findings(), SizeIs(1));
}

}  // namespace
}  // namespace bellwether::server
