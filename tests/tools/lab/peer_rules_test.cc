// Goal: each rule of others fires where its authors would say so, and only there.
// Method: made-up series.

#include "tools/lab/peer_rules.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int64_t> Alarms(const std::string& name, SignalId signal, const std::function<double(int64_t)>& value) {
  for (const auto& rule : MakePeerRules()) {
    if (rule->name() != name) continue;
    StepSample sample;
    for (int64_t step = 0; step < 1000; ++step) {
      sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1});
      sample.step = step;
      sample.Add(signal)[0] = static_cast<float>(value(step));
      rule->Observe(sample);
    }
    return rule->alarms();
  }
  ADD_FAILURE() << "no rule " << name;
  return {};
}

// 2 with noise between -0.1 and 0.1, and `spike` at the steps from 500 on that
// lie `steps` near.
auto Spike(double spike, int64_t steps) {
  return [=](int64_t step) {
    const double noise = 0.1 * std::sin(static_cast<double>(step * step));
    return step >= 500 && step < 500 + steps ? spike : 2 + noise;
  };
}

TEST(PeerRulesTest, SixSigmaSeesOneValue) {
  EXPECT_THAT(Alarms("loss 6 sigma", SignalId::kLoss, Spike(3, 1)), ElementsAre(500));
  EXPECT_THAT(Alarms("loss 6 sigma", SignalId::kLoss, Spike(2.3, 1)), IsEmpty());
}

TEST(PeerRulesTest, TwiceTheMeanWaitsForFive) {
  EXPECT_THAT(Alarms("loss 2x mean", SignalId::kLoss, Spike(5, 5)), ElementsAre(504));
  EXPECT_THAT(Alarms("loss 2x mean", SignalId::kLoss, Spike(5, 4)), IsEmpty());
  EXPECT_THAT(Alarms("gradient 2x mean", SignalId::kGradNorm, Spike(5, 1)), ElementsAre(500));
}

// Doubling every 30 steps is 2.6 times the mean of 100 values, 1.1 of 10.
TEST(PeerRulesTest, TheMeanOfAHundredLossesLagsBehindARamp) {
  const auto ramp = [](int64_t step) { return step < 500 ? 2 : 2 * std::exp2(static_cast<double>(step - 500) / 30); };
  EXPECT_FALSE(Alarms("loss 2x mean", SignalId::kLoss, ramp).empty());
}

TEST(PeerRulesTest, TenTimesTheFirstMaximum) {
  EXPECT_THAT(Alarms("loss 10x max", SignalId::kLoss, Spike(22, 3)), ElementsAre(500));
  EXPECT_THAT(Alarms("loss 10x max", SignalId::kLoss, Spike(20, 3)), IsEmpty());
}

TEST(PeerRulesTest, GradientsAreHeldAgainstTheirExponentialMean) {
  EXPECT_THAT(Alarms("gradient z 2.5", SignalId::kGradNorm, Spike(3, 1)), ElementsAre(500));
  EXPECT_THAT(Alarms("gradient z 2.5", SignalId::kGradNorm, Spike(2.1, 1)), IsEmpty());
}

TEST(PeerRulesTest, LogitsHaveAFixedLimit) {
  EXPECT_THAT(Alarms("max logit 100", SignalId::kLogitMax, Spike(101, 1)), ElementsAre(500));
  EXPECT_THAT(Alarms("max logit 100", SignalId::kLogitMax, Spike(100, 1)), IsEmpty());
}

TEST(PeerRulesTest, AnAlarmIsCountedAgainAfterAHundredQuietSteps) {
  const auto at = [](std::vector<int64_t> steps) {
    return [steps](int64_t step) { return std::find(steps.begin(), steps.end(), step) == steps.end() ? 2. : 200.; };
  };
  EXPECT_THAT(Alarms("max logit 100", SignalId::kLogitMax, at({300, 400, 501})), ElementsAre(300, 501));
}

TEST(PeerRulesTest, NonfiniteValueFiresAfterTheFirstHundredValues) {
  for (const auto& [rule, signal] :
       {std::pair{"loss 6 sigma", SignalId::kLoss}, {"gradient z 2.5", SignalId::kGradNorm}}) {
    EXPECT_THAT(Alarms(rule, signal, Spike(NAN, 1)), ElementsAre(500)) << rule;
    EXPECT_THAT(Alarms(rule, signal, [](int64_t step) { return step == 50 ? NAN : 2.; }), IsEmpty()) << rule;
  }
}

}  // namespace
}  // namespace bellwether::server
