// Goal: one alert per family, that opens once, rises only when it is worse,
// resolves after a quiet time and then holds its peace.
// Method: findings by hand, step by step.

#include "server/detect/alert_engine.h"

#include <gtest/gtest.h>

namespace bellwether::server {
namespace {

class AlertEngineTest : public ::testing::Test {
 protected:
  AlertEngineTest() { run_.name = std::string("r"); }

  Finding Drift(Severity severity, int32_t stage, Head where, double score) {
    Finding finding;
    finding.rule = Rule::kDrift;
    finding.severity = severity;
    finding.stage = stage;
    finding.where = where;
    finding.score = score;
    finding.first_step = 90;
    finding.Add({.signal = "drift_ratio", .where = where, .value = 10, .threshold = 4, .detector = "growth"});
    return finding;
  }
  std::vector<AlertTransition> At(int64_t step, std::vector<Finding> findings) {
    std::vector<AlertTransition> out;
    engine_.Update(Family::kRounding, step, run_, &findings, &out);
    return out;
  }

  AlertOptions options_;
  AlertEngine engine_{options_};
  RunDescription run_;
};

TEST_F(AlertEngineTest, OpensOnceAndNamesTheStrongestFirst) {
  const auto opened = At(100, {Drift(Severity::kWarning, 1, {1, 2}, 5), Drift(Severity::kWarning, 1, {1, 4}, 9)});
  ASSERT_EQ(opened.size(), 1u);
  const AlertTransition& t = opened[0];
  EXPECT_EQ(t.state, AlertState::kFiring);
  EXPECT_EQ(t.key, "a1");
  EXPECT_EQ(t.k, 0u);
  EXPECT_EQ(t.strongest, (Head{1, 4}));
  EXPECT_EQ(t.heads, (std::vector<Head>{{1, 4}, {1, 2}}));
  EXPECT_EQ(t.heads_total, 2u);
  EXPECT_EQ(t.evidence.size(), 2u);
  EXPECT_EQ(t.cause, "biased delta");
  EXPECT_NE(t.summary.find("layer 1 head 4"), std::string::npos) << t.summary;
  EXPECT_NE(t.advice.find("center_k"), std::string::npos) << t.advice;
  EXPECT_TRUE(At(120, {Drift(Severity::kWarning, 1, {1, 2}, 50)}).empty());
}

TEST_F(AlertEngineTest, RisesUnderTheSameKey) {
  At(100, {Drift(Severity::kWarning, 1, {1, 4}, 9)});
  const auto stage = At(120, {Drift(Severity::kWarning, 2, {1, 4}, 9)});
  ASSERT_EQ(stage.size(), 1u);
  EXPECT_EQ(stage[0].k, 1u);
  EXPECT_EQ(stage[0].stage, 2);
  const auto severe = At(140, {Drift(Severity::kCritical, 1, {1, 0}, 9)});
  ASSERT_EQ(severe.size(), 1u);
  EXPECT_EQ(severe[0].key, "a1") << "it is the same alert, whose head is another one now";
  EXPECT_EQ(severe[0].k, 2u);
  EXPECT_EQ(severe[0].stage, 2);  // A stage once reached stays said.
  EXPECT_EQ(severe[0].severity, Severity::kCritical);
  EXPECT_TRUE(At(160, {Drift(Severity::kWarning, 1, {1, 4}, 9)}).empty());
}

TEST_F(AlertEngineTest, ResolvesAfterTheQuietTimeThenCoolsDown) {
  At(100, {Drift(Severity::kWarning, 1, {1, 4}, 9)});
  EXPECT_TRUE(At(100 + options_.resolve_steps - 1, {}).empty());
  const int64_t end = 100 + options_.resolve_steps;
  const auto resolved = At(end, {});
  ASSERT_EQ(resolved.size(), 1u);
  EXPECT_EQ(resolved[0].state, AlertState::kResolved);
  EXPECT_EQ(resolved[0].k, 1u);
  EXPECT_EQ(engine_.alerts_firing(), 0u);
  // Within the cool-down only something worse opens it.
  EXPECT_TRUE(At(end + options_.cooldown_steps - 1, {Drift(Severity::kWarning, 1, {1, 4}, 9)}).empty());
  EXPECT_EQ(At(end + options_.cooldown_steps, {Drift(Severity::kWarning, 1, {1, 4}, 9)}).size(), 1u);
}

TEST_F(AlertEngineTest, SomethingWorseOpensDuringTheCoolDown) {
  At(100, {Drift(Severity::kWarning, 1, {1, 4}, 9)});
  const int64_t end = 100 + options_.resolve_steps;
  At(end, {});
  EXPECT_EQ(At(end + 20, {Drift(Severity::kCritical, 1, {1, 4}, 9)}).size(), 1u);
}

TEST_F(AlertEngineTest, KeysAreGivenOnceAndCountedByFamily) {
  EXPECT_EQ(At(100, {Drift(Severity::kWarning, 1, {1, 4}, 9)})[0].key, "a1");
  std::vector<Finding> silent(1);
  silent[0].rule = Rule::kSilent;
  silent[0].severity = Severity::kWarning;
  std::vector<AlertTransition> out;
  engine_.Update(Family::kSilent, 110, run_, &silent, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].key, "g1");
  At(100 + options_.resolve_steps, {});
  // The same head at the same step, as after a restore.
  const int64_t again = 100 + options_.resolve_steps + options_.cooldown_steps;
  EXPECT_EQ(At(again, {Drift(Severity::kWarning, 1, {1, 4}, 9)})[0].key, "a2") << "whoever was silent meanwhile";
}

TEST_F(AlertEngineTest, AlertUnderRepairStaysUntilItsHeadsStandStill) {
  const AlertTransition opened = At(100, {Drift(Severity::kCritical, 2, {1, 4}, 9)}).front();
  std::vector<AlertTransition> out;
  engine_.BeginRepair(Family::kRounding, 200, run_, &out);
  engine_.BeginRepair(Family::kRounding, 210, run_, &out);
  ASSERT_EQ(out.size(), 1u) << "said once";
  const AlertTransition& repaired = out.front();
  EXPECT_EQ(repaired.state, AlertState::kFiring);
  EXPECT_EQ(repaired.key, opened.key);
  EXPECT_EQ(repaired.k, opened.k + 1);
  EXPECT_EQ(repaired.severity, opened.severity);
  EXPECT_EQ(repaired.stage, opened.stage);
  EXPECT_EQ(repaired.cause, opened.cause);
  EXPECT_EQ(repaired.first_step, opened.first_step);
  EXPECT_EQ(repaired.heads, opened.heads);
  EXPECT_EQ(repaired.evidence.size(), opened.evidence.size());
  EXPECT_NE(repaired.summary.find("under repair since step 200"), std::string::npos) << repaired.summary;
  const int64_t late = 200 + 5 * options_.resolve_steps;
  EXPECT_TRUE(At(late, {}).empty()) << "its rules are off: that they find nothing says nothing";
  out.clear();
  bool still = false;
  const auto stand_still = [&](const std::vector<Head>& heads, int64_t steps) {
    EXPECT_EQ(heads, opened.heads);
    EXPECT_EQ(steps, options_.resolve_steps);
    return still;
  };
  engine_.ResolveRepaired(late, run_, stand_still, &out);
  EXPECT_TRUE(out.empty());
  still = true;
  engine_.ResolveRepaired(late, run_, stand_still, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].state, AlertState::kResolved);
}

TEST_F(AlertEngineTest, FindingUnderRepairRaisesTheSameAlert) {
  const AlertTransition opened = At(100, {Drift(Severity::kWarning, 1, {1, 4}, 9)}).front();
  std::vector<AlertTransition> out;
  engine_.BeginRepair(Family::kRounding, 200, run_, &out);
  Finding scores = Drift(Severity::kCritical, 4, {1, 0}, 3);
  scores.rule = Rule::kLogits;
  const auto risen = At(300, {scores});
  ASSERT_EQ(risen.size(), 1u);
  EXPECT_EQ(risen[0].key, opened.key);
  EXPECT_EQ(risen[0].cause, opened.cause);
  EXPECT_EQ(risen[0].first_step, opened.first_step);
  EXPECT_EQ(risen[0].severity, Severity::kCritical);
}

TEST_F(AlertEngineTest, NamesNoMoreHeadsThanItMay) {
  for (const int32_t heads : {options_.heads_max, options_.heads_max + 1}) {
    AlertEngine engine(options_);
    std::vector<Finding> findings;
    for (int32_t head = 0; head < heads; ++head) findings.push_back(Drift(Severity::kWarning, 1, {0, head}, 1));
    std::vector<AlertTransition> out;
    engine.Update(Family::kRounding, 100, run_, &findings, &out);
    ASSERT_EQ(out.size(), 1u);
    EXPECT_EQ(out[0].heads.size(), static_cast<size_t>(options_.heads_max));
    EXPECT_EQ(out[0].heads_total, static_cast<uint32_t>(heads));
    EXPECT_LE(out[0].evidence.size(), static_cast<size_t>(options_.evidence_max));
  }
}

TEST_F(AlertEngineTest, AHeadOfTwoFindingsIsNamedOnce) {
  const auto told = At(100, {Drift(Severity::kWarning, 1, {1, 4}, 9), Drift(Severity::kWarning, 1, {1, 2}, 5),
                             Drift(Severity::kWarning, 1, {1, 4}, 3)});
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].heads, (std::vector<Head>{{1, 4}, {1, 2}}));
  EXPECT_EQ(told[0].heads_total, 2u);
}

TEST_F(AlertEngineTest, TheEtaCountsDownBetweenFindings) {
  Finding finding = Drift(Severity::kWarning, 1, {1, 4}, 9);
  finding.eta = {.known = true, .steps = 500, .lower_steps = 400, .upper_steps = 900};
  At(100, {finding});
  EXPECT_EQ(engine_.eta(100).steps, 500);
  EXPECT_EQ(engine_.eta(150).steps, 450);
  EXPECT_EQ(engine_.eta(550).lower_steps, 0);
}

}  // namespace
}  // namespace bellwether::server
