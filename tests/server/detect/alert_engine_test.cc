// Goal: one alert per illness, that opens once, rises only when it is worse or its
// cause becomes known, resolves after a quiet time and then holds its peace.
// Method: findings by hand, step by step.

#include "server/detect/alert_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bellwether/time_text.h"
#include "server/detect/alert_text.h"
#include "server/model/alert_words.h"

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
    engine_.Update(Family::kRounding, step, run_, findings, &out);
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
  EXPECT_EQ(t.cause, "rounding drift");
  EXPECT_NE(t.summary.find("layer 1 head 4"), std::string::npos) << t.summary;
  EXPECT_NE(t.advice.find("center_k"), std::string::npos) << t.advice;
  EXPECT_TRUE(At(120, {Drift(Severity::kWarning, 1, {1, 2}, 50)}).empty());
}

TEST_F(AlertEngineTest, EvidenceNamesOfEachSignalTheWorstHeadFirst) {
  const auto infinite = std::numeric_limits<double>::infinity();
  std::vector<Evidence> evidence = {
      {.signal = "drift_ratio", .where = {0, 1}, .value = 8, .threshold = 4},
      {.signal = "common_mode", .where = {0, 1}, .value = 7, .threshold = 100, .detector = kNextInLine},
      {.signal = "drift_ratio", .where = {0, 2}, .value = 9, .threshold = 4},
      {.signal = "no_limit", .where = {0, 1}, .value = 9, .threshold = 0},
      {.signal = "common_mode", .where = {0, 2}, .value = 700, .threshold = 100},
      {.signal = "must_not_fall", .where = {0, 1}, .value = 4, .threshold = 5},
      {.signal = "must_not_fall", .where = {0, 2}, .value = 1, .threshold = 5},
      {.signal = "loss", .value = 2.2, .threshold = 2},
      {.signal = "drift_ratio", .where = {0, 3}, .value = infinite, .threshold = 4}};
  const auto told = [&evidence] {
    std::string text;
    for (const Evidence& piece : evidence) absl::StrAppend(&text, " ", piece.signal, piece.where.head);
    return text;
  };
  const std::string others =
      " drift_ratio3 drift_ratio2 drift_ratio1 common_mode2 common_mode1 no_limit1 must_not_fall2 must_not_fall1";
  OrderEvidence(4, /*by_limits=*/true, &evidence);
  EXPECT_EQ(told(), others + " loss-1");
  OrderEvidence(5, /*by_limits=*/false, &evidence);
  EXPECT_EQ(told(), " loss-1" + others);
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
  engine_.Update(Family::kSilent, 110, run_, silent, &out);
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
    engine.Update(Family::kRounding, 100, run_, findings, &out);
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

TEST_F(AlertEngineTest, TimeLeftFollowsAnOwnSummary) {
  engine_.SetStepSeconds(3);
  Finding finding = Drift(Severity::kWarning, 1, {1, 4}, 9);
  finding.summary = "it grows";
  finding.eta = {.known = true, .steps = 500, .lower_steps = 400, .upper_steps = 900};
  finding.eta_words = "the loss is expected to be 5 % higher";
  EXPECT_EQ(At(100, {finding})[0].summary,
            "r: it grows. In ~500 steps (~25 min) the loss is expected to be 5 % higher.");
  engine_ = AlertEngine(options_);
  finding.eta_words = "";
  EXPECT_EQ(At(100, {finding})[0].summary, "r: it grows. ~500 steps left.");
  engine_ = AlertEngine(options_);
  finding.eta.known = false;
  finding.eta_words = "the loss is expected to be 5 % higher";
  EXPECT_EQ(At(100, {finding})[0].summary, "r: it grows.") << "nothing is left to say";
}

TEST_F(AlertEngineTest, SentenceSaysWhetherTheLossIsStillNormal) {
  Finding finding = Drift(Severity::kWarning, 1, {1, 4}, 9);
  finding.first_step = 12345;
  finding.eta = {.known = true, .steps = 269.1};
  const std::string drifts = "r: layer 1 head 4 is drifting since step 12,345.";
  EXPECT_EQ(At(12400, {finding})[0].summary, drifts + " ~269 steps left.") << "it is not known";
  engine_ = AlertEngine(options_);
  engine_.SetLossNormal(true);
  EXPECT_EQ(At(12400, {finding})[0].summary, drifts + " ~269 steps left. Loss still normal.");
  finding.severity = Severity::kCritical;
  finding.stage = 5;
  EXPECT_EQ(At(12500, {finding})[0].summary, drifts + " The loss has left its course.") << "nothing is left";
}

TEST_F(AlertEngineTest, AnEndSaysAfterHowLongAndWhy) {
  engine_.SetStepSeconds(3);
  Finding finding = Drift(Severity::kWarning, 1, {1, 4}, 9);
  At(1000, {finding});
  const int64_t end = 1000 + options_.resolve_steps;
  EXPECT_EQ(
      At(end, {})[0].summary,
      absl::StrCat("r: drift of layer 1 head 4 is over at step ", CountText(end), ", after ", CountText(end - 90),
                   " steps (~", TimeText(static_cast<double>(end - 90) * 3), "): no sign of it since step 1,000."));
}

TEST_F(AlertEngineTest, SpikeAndFirstSampleAreToldAsSuch) {
  std::vector<AlertTransition> out;
  Finding spike = Finding::OfRun(Rule::kLoss, Severity::kInfo, {.signal = "loss", .value = 9, .first_step = 1072});
  engine_.Update(Family::kLoss, 1072, run_, {spike}, &out);
  EXPECT_EQ(out.at(0).summary, "r: the loss has a spike at step 1,072.");
  engine_ = AlertEngine(options_);
  Finding found = Drift(Severity::kInfo, 0, {0, 2}, 9);
  found.facts[0].detector = kFoundDetector;
  EXPECT_EQ(At(1100, {found})[0].summary, "r: layer 0 head 2 was beyond its limits in the first sample at step 90.");
}

class IllnessTest : public testing::Test {
 protected:
  IllnessTest() { run_.name = std::string("r"); }
  static Finding Found(Rule rule, int64_t first_step, const char* cause = "", Severity severity = Severity::kWarning,
                       Head where = {}) {
    Finding finding =
        Finding::OfRun(rule, severity, {.signal = NameOf(rule), .where = where, .first_step = first_step});
    finding.where = where;
    finding.cause = cause;
    if (*cause != '\0') finding.summary = std::string("it is ") + cause;
    return finding;
  }
  // What was found at one step, by family.
  using Signs = std::vector<std::pair<Family, Finding>>;
  std::vector<AlertTransition> At(int64_t step, const Signs& signs) {
    std::vector<AlertTransition> out;
    for (const auto& [family, finding] : signs) engine_.Collect(family, {finding});
    for (int i = 0; i < kFamilies; ++i) {
      const auto family = static_cast<Family>(i);
      if (std::none_of(signs.begin(), signs.end(), [&](const auto& sign) { return sign.first == family; })) {
        engine_.Collect(family, {});
      }
    }
    engine_.Flush(step, run_, &out);
    return out;
  }

  AlertEngine engine_{AlertOptions()};
  RunDescription run_;
};

TEST_F(IllnessTest, SignsOfOneSampleAreToldOnceByBestCause) {
  const auto told = At(800, {{Family::kNonfinite, Found(Rule::kNonfinite, 800)},
                             {Family::kGradient, Found(Rule::kGradient, 800)},
                             {Family::kCorruption, Found(Rule::kCorruption, 800, "corruption")}});
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].cause, "corruption");
  EXPECT_EQ(told[0].rule, "corruption");
  EXPECT_EQ(told[0].evidence.size(), 3u);
  EXPECT_EQ(
      told[0].summary,
      "r: it is corruption. Of the same illness: values not finite since step 800, large gradient norm since step "
      "800.");
  EXPECT_EQ(engine_.alerts_firing(), 1u);
}

TEST_F(IllnessTest, AlertKeepsItsKeyWhenItsCauseBecomesKnown) {
  const auto first = At(606, {{Family::kLogits, Found(Rule::kLogits, 604, "", Severity::kWarning, {0, 1})}});
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first[0].cause, "logit growth");
  const auto known = At(612, {{Family::kLoss, Found(Rule::kLoss, 600, "learning rate too high")}});
  ASSERT_EQ(known.size(), 1u);
  EXPECT_EQ(known[0].key, first[0].key);
  EXPECT_EQ(known[0].k, 1u);
  EXPECT_EQ(known[0].cause, "learning rate too high");
  EXPECT_EQ(known[0].rule, "loss");
  EXPECT_EQ(known[0].first_step, 600);
  EXPECT_EQ(known[0].evidence[0].signal, "loss") << "what began first comes first";
}

TEST_F(IllnessTest, EvidenceIsTheNewestWithTheLossFirst) {
  const auto logits = [](double value, double other) {
    Finding finding = Found(Rule::kLogits, 600, "", Severity::kCritical, {0, 1});
    finding.stage = 4;
    finding.facts[0] = {.signal = "logit_max", .where = {0, 1}, .value = value, .threshold = 50, .first_step = 600};
    finding.Add({.signal = "wq_sigma", .where = {0, 3}, .value = other, .threshold = 10, .first_step = 600});
    return finding;
  };
  EXPECT_EQ(At(600, {{Family::kLogits, logits(60, 11)}}).at(0).evidence.at(0).signal, "logit_max");
  EXPECT_TRUE(At(640, {{Family::kLogits, logits(100, 90)}}).empty()) << "values alone are no news";
  Finding lost = Found(Rule::kLoss, 641);
  lost.stage = 5;
  lost.facts[0] = {.signal = "loss", .value = 4, .threshold = 3.9, .first_step = 641};
  std::vector<AlertTransition> told;
  engine_.Collect(Family::kLoss, {lost});
  engine_.Flush(641, run_, &told);
  ASSERT_EQ(told.size(), 1u);
  ASSERT_EQ(told[0].evidence.size(), 3u);
  EXPECT_EQ(told[0].evidence[0].signal, "loss") << "it was found last";
  EXPECT_EQ(told[0].evidence[1].value, 100);
  EXPECT_EQ(told[0].evidence[2].signal, "wq_sigma");
  EXPECT_EQ(told[0].evidence[2].value, 90);
}

TEST_F(IllnessTest, FollowingSignsChangeNoKnownCause) {
  const auto first = At(606, {{Family::kLoss, Found(Rule::kLoss, 600, "learning rate too high")}});
  const auto later = At(900, {{Family::kLogits, Found(Rule::kLogits, 880, "", Severity::kCritical, {0, 1})}});
  ASSERT_EQ(later.size(), 1u);
  EXPECT_EQ(later[0].key, first[0].key);
  EXPECT_EQ(later[0].cause, "learning rate too high");
  EXPECT_EQ(later[0].severity, Severity::kCritical) << "the worst of its signs";
  EXPECT_TRUE(At(920, {{Family::kLogits, Found(Rule::kLogits, 880, "", Severity::kCritical, {0, 1})}}).empty());
}

TEST_F(IllnessTest, KnownCauseOfASignIsNotLost) {
  Finding kernel = Found(Rule::kNonfinite, 800, "faulty kernel", Severity::kCritical, {1, 2});
  kernel.advice = "Switch";
  const auto first = At(800, {{Family::kNonfinite, kernel}});
  Finding loss = Found(Rule::kNonfinite, 801, "", Severity::kCritical);
  loss.stage = 5;
  const auto next = At(801, {{Family::kNonfinite, loss}});
  ASSERT_EQ(next.size(), 1u) << "the stage has risen";
  EXPECT_EQ(next[0].cause, "faulty kernel");
  EXPECT_EQ(next[0].strongest, (Head{1, 2}));
  EXPECT_EQ(next[0].advice, "Switch");
  EXPECT_EQ(next[0].evidence.size(), 2u);
}

TEST_F(IllnessTest, SpikeOfLongAgoIsNoBeginningOfAWarning) {
  At(300, {{Family::kLoss, Found(Rule::kLoss, 299, "", Severity::kInfo)}});
  EXPECT_TRUE(At(800, {{Family::kLoss, Found(Rule::kLoss, 799, "", Severity::kInfo)}}).empty());
  const auto told = At(810, {{Family::kLoss, Found(Rule::kLoss, 799)}});
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].key, "c1");
  EXPECT_EQ(told[0].first_step, 799);
}

// What grows in a place, as warnings; the loss follows, as critical.
TEST_F(IllnessTest, CauseAndPlaceStayWhenTheLossJumps) {
  const struct {
    Family family;
    Rule rule;
    const char* cause;
    Head where;
  } growths[] = {{Family::kLogits, Rule::kLogits, "", {1, 2}},
                 {Family::kRounding, Rule::kDrift, "", {1, 2}},
                 {Family::kParameters, Rule::kParameters, "logit growth", {1, -1}},
                 {Family::kParameters, Rule::kParameters, "residual growth", {0, -1}},
                 {Family::kParameters, Rule::kParameters, "head growth", {}}};
  for (const auto& growth : growths) {
    engine_ = AlertEngine(AlertOptions());
    const Finding grows = Found(growth.rule, 590, growth.cause, Severity::kWarning, growth.where);
    const AlertTransition first = At(600, {{growth.family, grows}}).at(0);
    SCOPED_TRACE(first.cause);
    Finding jump = Found(Rule::kLoss, 630, "step change of the loss", Severity::kCritical);
    jump.stage = 5;
    jump.advice = "Look at the data";
    const auto told = At(640, {{growth.family, grows}, {Family::kLoss, jump}});
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0].key, first.key);
    EXPECT_EQ(told[0].cause, first.cause);
    EXPECT_EQ(told[0].rule, first.rule);
    EXPECT_EQ(told[0].strongest, growth.where);
    EXPECT_EQ(told[0].first_step, 590);
    EXPECT_EQ(told[0].severity, Severity::kCritical);
    EXPECT_EQ(told[0].stage, 5);
    EXPECT_EQ(told[0].evidence.size(), 2u) << "the loss is evidence";
    EXPECT_EQ(told[0].summary.find(first.summary), 0u) << told[0].summary;
    EXPECT_NE(told[0].summary.find("The loss has left its course."), std::string::npos) << told[0].summary;
    EXPECT_NE(told[0].summary.find("loss off its course since step 630"), std::string::npos) << told[0].summary;
    EXPECT_EQ(told[0].advice.find("the data"), std::string::npos) << told[0].advice;
  }
}

TEST_F(IllnessTest, UnderRepairACauseIsNotToldEachStep) {
  const Finding drift = Found(Rule::kDrift, 590, "", Severity::kWarning, {1, 2});
  At(600, {{Family::kRounding, drift}});
  std::vector<AlertTransition> repaired;
  engine_.BeginRepair(Family::kRounding, 610, run_, &repaired);
  At(700, {{Family::kRounding, drift}, {Family::kLoss, Found(Rule::kLoss, 690)}});
  const Finding jump = Found(Rule::kLoss, 690, "step change of the loss");
  for (int64_t step = 701; step < 710; ++step) {
    EXPECT_TRUE(At(step, {{Family::kRounding, drift}, {Family::kLoss, jump}}).empty()) << step;
  }
}

TEST_F(IllnessTest, AJumpOfTheLossAloneSaysSo) {
  const auto first = At(640, {{Family::kLoss, Found(Rule::kLoss, 630)}});
  const Finding jump = Found(Rule::kLoss, 630, "step change of the loss", Severity::kCritical);
  const auto told = At(650, {{Family::kLoss, jump}});
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].key, first[0].key);
  EXPECT_EQ(told[0].cause, "step change of the loss");
  EXPECT_EQ(told[0].summary, "r: it is step change of the loss.");
  const Finding scores = Found(Rule::kLogits, 610, "", Severity::kWarning, {1, 2});
  const auto known = At(660, {{Family::kLoss, jump}, {Family::kLogits, scores}});
  ASSERT_EQ(known.size(), 1u) << "what makes it is found later";
  EXPECT_EQ(known[0].key, first[0].key);
  EXPECT_EQ(known[0].cause, "logit growth");
  EXPECT_EQ(known[0].strongest, (Head{1, 2}));
}

TEST_F(IllnessTest, WordsOfAKnownCauseStayWhenItIsWorse) {
  Finding rate = Found(Rule::kLoss, 600, "learning rate too high");
  rate.advice = "Lower it";
  const auto first = At(606, {{Family::kLoss, rate}});
  Finding jump = Found(Rule::kLoss, 600, "step change of the loss", Severity::kCritical);
  jump.advice = "Look at the data";
  const auto told = At(900, {{Family::kLoss, jump}});
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].severity, Severity::kCritical);
  EXPECT_EQ(told[0].cause, "learning rate too high");
  EXPECT_EQ(told[0].summary, "r: it is learning rate too high.");
  EXPECT_EQ(told[0].advice, "Lower it");
}

TEST_F(IllnessTest, SpikeOfLongAgoKeepsNoJumpFromItsCause) {
  const auto spike = At(300, {{Family::kLoss, Found(Rule::kLoss, 299, "", Severity::kInfo)}});
  const Finding scores = Found(Rule::kLogits, 600, "", Severity::kWarning, {1, 2});
  const auto growth = At(610, {{Family::kLogits, scores}});
  ASSERT_EQ(growth.at(0).key, "b1") << "it began long after the spike";
  const Finding jump = Found(Rule::kLoss, 650, "step change of the loss", Severity::kCritical);
  const auto told = At(660, {{Family::kLogits, scores}, {Family::kLoss, jump}});
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0].key, spike.at(0).key);
  EXPECT_EQ(told[0].state, AlertState::kResolved);
  EXPECT_EQ(told[1].key, "b1");
  EXPECT_EQ(told[1].cause, "logit growth");
  EXPECT_EQ(told[1].severity, Severity::kCritical);
  EXPECT_EQ(engine_.alerts_firing(), 1u);
  EXPECT_TRUE(At(661, {{Family::kLogits, scores}, {Family::kLoss, jump}}).empty()) << "told once";
}

TEST_F(IllnessTest, SignsFromLongBeforeTheirExplanationAreAnother) {
  At(300, {{Family::kLoss, Found(Rule::kLoss, 300)}});
  const auto drift = At(900, {{Family::kRounding, Found(Rule::kDrift, 880, "", Severity::kWarning, {1, 2})},
                              {Family::kLoss, Found(Rule::kLoss, 300)}});
  ASSERT_EQ(drift.size(), 1u);
  EXPECT_EQ(drift[0].key, "a1");
  EXPECT_EQ(engine_.alerts_firing(), 2u);
}

TEST_F(IllnessTest, HeadsOfTwoLayersAreTwoIllnesses) {
  At(800, {{Family::kRounding, Found(Rule::kDrift, 780, "", Severity::kWarning, {1, 2})}});
  EXPECT_EQ(At(820, {{Family::kLogits, Found(Rule::kLogits, 800, "", Severity::kWarning, {3, 0})}})[0].key, "b1");
}

TEST_F(IllnessTest, AlertsThatOneCauseExplainsBecomeOne) {
  At(790, {{Family::kLogits, Found(Rule::kLogits, 790, "", Severity::kWarning, {1, 2})}});
  At(800, {{Family::kFrozen, Found(Rule::kFrozen, 780, "optimizer does not move", Severity::kInfo)}});
  At(805, {{Family::kSequences, Found(Rule::kSequences, 805, "bad data")}});
  ASSERT_EQ(engine_.alerts_firing(), 2u) << "scores that grow explain the sequences";
  const auto told = At(810, {{Family::kLearning, Found(Rule::kLearning, 780, "gradients not cleared")}});
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].key, "b1");
  const auto kernel = At(820, {{Family::kDisagreement, Found(Rule::kDisagreement, 820, "replicas apart")}});
  ASSERT_EQ(kernel.size(), 1u);
  EXPECT_EQ(kernel[0].key, "b1");
  EXPECT_EQ(engine_.alerts_firing(), 2u) << "what does not move is another illness";
}

TEST_F(IllnessTest, EndsWithItsLastSignAndCoolsDownWithAll) {
  const int64_t quiet = AlertOptions().resolve_steps;
  At(600, {{Family::kLoss, Found(Rule::kLoss, 600, "learning rate too high")}});
  At(700, {{Family::kGradient, Found(Rule::kGradient, 700)}});
  EXPECT_TRUE(At(600 + quiet, {}).empty()) << "the gradient was bad later";
  const auto over = At(700 + quiet, {});
  ASSERT_EQ(over.size(), 1u);
  EXPECT_EQ(over[0].state, AlertState::kResolved);
  EXPECT_TRUE(At(720 + quiet, {{Family::kGradient, Found(Rule::kGradient, 720 + quiet)}}).empty());
  EXPECT_EQ(engine_.alerts_firing(), 0u);
}

}  // namespace
}  // namespace bellwether::server
