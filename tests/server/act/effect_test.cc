// Goal: what an action did is said with numbers and rightly: a growth that
// stops helped, one that goes on did not, and what means something else than
// before does not count against it.
// Method: made-up indicators that grow at known rates; the ladder is climbed
// by the verdicts.

#include "server/act/effect.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/server/act/act_run.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Indicators of head 1/0; the other heads rest, but for their W_Q where it grows.
struct Ill {
  double sigma = 4, sigma_growth = 0;  // Of ln, in 1,000 steps.
  double common = 50, common_growth = 0;
  double loss = 2;
  double leak = 0;  // 0: not measured.
  bool has_sigma = true, has_common = true;
};

RunDescription RunOf(int32_t heads) {
  RunDescription run = SmallRun();
  run.layout.heads = run.layout.kv_heads = heads;
  return run;
}

struct IllRun : ActRun {
  explicit IllRun(PolicyPtr policy, int32_t heads = 4) : ActRun(std::move(policy), RunOf(heads)) {}

  // One step with a sample of the heads.
  void Sample() {
    ++step;
    ++time_s;
    ill.sigma *= std::exp(ill.sigma_growth / 1000);
    ill.common *= std::exp(ill.common_growth / 1000);
    sigma_of_others *= std::exp(growth_of_others / 1000);
    StepSample sample;
    sample.Reset(run.layout);
    sample.attempt = run.attempt;
    sample.step = step;
    const auto fill = [&](SignalId id, double usual, double value) {
      const auto to = sample.Add(id);
      std::fill(to.begin(), to.end(), static_cast<float>(usual));
      to[static_cast<size_t>(run.layout.heads)] = static_cast<float>(value);
    };
    if (ill.has_sigma) fill(SignalId::kWqSigma, sigma_of_others, ill.sigma);
    if (ill.has_common) {
      fill(SignalId::kCommonModeSum, 5 * 64, ill.common * 64);
      fill(SignalId::kRows, 64, 64);
    }
    if (ill.leak > 0) {
      fill(SignalId::kKeyLeakSum, 1e-5, ill.leak);
      fill(SignalId::kKeyGradientSum, 1, 1);
    }
    sample.Add(SignalId::kLoss)[0] = static_cast<float>(ill.loss);
    engine->OnStep(sample, now(), &changed);
  }
  void Samples(int64_t count) {
    for (int64_t i = 0; i < count; ++i) Sample();
  }
  // Its action, applied: the ladder's first.
  void ActOn(const AlertTransition& alert) {
    Samples(700);
    Fire(alert);
    ASSERT_EQ(count(), 1u);
    Deliver(Id(1));
    ASSERT_EQ(At(1).state, ActionState::kApplied);
  }
  std::string WhyOf(size_t number, ActionState state) const {
    for (const ActionChange& change : At(number).history) {
      if (change.state == state) return change.reason;
    }
    return "never " + std::string(NameOf(state));
  }
  Ill ill;
  double sigma_of_others = 3, growth_of_others = 0;
};

constexpr char kCentreThenHp[] =
    "{mode: enforce, rules: [{ladder: [{do: attention.center_k, scope: layers}, {do: attention.mode, mode: hp}]}]}";
constexpr char kHpThenCentre[] =
    "{mode: enforce, rules: [{ladder: [{do: attention.mode, mode: hp}, {do: attention.center_k}]}]}";

TEST(EffectTest, AGrowthThatStopsHelpedAndIsKept) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 0.02;
  r.Samples(1001);
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied, helped, kept");
  const std::string why = r.WhyOf(1, ActionState::kHelped);
  EXPECT_THAT(why, HasSubstr("wq_sigma of layer 1 head 0: "));
  EXPECT_THAT(why, HasSubstr("growth per 1,000 steps 0.02, before 0.8"));
  r.Samples(3000);
  EXPECT_EQ(r.count(), 1u);
}

TEST(EffectTest, UnhelpfulCentringEscalatesWithoutUndo) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.Samples(1001);
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied, did not help, escalated");
  EXPECT_THAT(r.WhyOf(1, ActionState::kEscalated), HasSubstr("without centring the kernel would see what has grown"));
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kAttentionMode);
  EXPECT_EQ(r.At(2).state, ActionState::kApproved);
}

TEST(EffectTest, UnhelpfulActionIsUndoneAndNextRungFollows) {
  IllRun r(PolicyOf(kHpThenCentre));
  r.Hello();
  r.ill.common_growth = 2;
  r.ActOn(r.Alert());
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kDidNotHelp);
  EXPECT_THAT(r.WhyOf(1, ActionState::kDidNotHelp), HasSubstr("common_mode of layer 1 head 0: "));
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).undoes, r.Id(1));
  EXPECT_EQ(r.At(2).state, ActionState::kApproved);
  r.Deliver(r.Id(2));
  EXPECT_EQ(r.At(1).state, ActionState::kUndone);
  ASSERT_EQ(r.count(), 3u);
  EXPECT_EQ(r.At(3).kind, ActionKind::kCenterK);
  EXPECT_EQ(r.At(3).state, ActionState::kApproved);
}

TEST(EffectTest, SharedGrowthDoesNotCountAgainstAnAction) {
  IllRun r(PolicyOf(kHpThenCentre));
  r.Hello();
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 0.8;
  r.growth_of_others = 0.7;
  r.Resolve(r.Alert());
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
  EXPECT_THAT(r.WhyOf(1, ActionState::kHelped), HasSubstr("; times the median head 1.4"));
}

TEST(EffectTest, GrowthOfOneHeadCountsAgainstAnAction) {
  IllRun r(PolicyOf(kHpThenCentre));
  r.Hello();
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 1.5;
  r.growth_of_others = 0.7;
  r.Resolve(r.Alert());
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kDidNotHelp);
}

TEST(EffectTest, GrowthWithinHealthyScoresIsIgnored) {
  IllRun r(PolicyOf(kHpThenCentre));
  r.Hello();
  r.ill.has_sigma = false;
  r.ill.common = 5;
  r.ActOn(r.Alert());
  r.ill.common_growth = 1.5;
  r.Resolve(r.Alert());
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
}

// Two layers of two heads: three others are no peers.
TEST(EffectTest, WithoutPeersGrowthCountsOnlyWithALeak) {
  for (const bool silent : {true, false}) {
    IllRun r(PolicyOf(kHpThenCentre), 2);
    r.Hello();
    r.ill.leak = 0.01;
    r.ActOn(r.Alert());
    r.ill.sigma_growth = 1.5;
    if (silent) r.ill.leak = 3e-4;
    r.Resolve(r.Alert());
    r.Samples(1001);
    EXPECT_EQ(r.At(1).state, silent ? ActionState::kKept : ActionState::kDidNotHelp);
  }
}

TEST(EffectTest, WithoutPeersAndLeakOnlyDoublingCounts) {
  for (const double growth : {0.6, 1.0}) {
    IllRun r(PolicyOf(kCentreThenHp), 2);
    r.Hello();
    r.ActOn(r.Alert());
    r.ill.sigma_growth = growth;
    r.Resolve(r.Alert());
    r.Samples(1001);
    EXPECT_EQ(r.At(1).state, growth < 0.8 ? ActionState::kKept : ActionState::kEscalated);
  }
}

TEST(EffectTest, InModeProposeTheUndoWaitsForAPersonToo) {
  IllRun r(PolicyOf("{mode: propose, rules: [{ladder: [{do: attention.mode, mode: hp}, {do: attention.center_k}]}]}"));
  r.Hello();
  r.ill.common_growth = 2;
  r.Samples(700);
  r.Fire(r.Alert());
  ASSERT_TRUE(r.Ask(ActionRequest::Verb::kApprove, r.Id(1)).ok());
  r.Deliver(r.Id(1));
  r.Samples(1500);
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).undoes, r.Id(1));
  EXPECT_EQ(r.At(2).state, ActionState::kProposed);
  ASSERT_TRUE(r.Ask(ActionRequest::Verb::kReject, r.Id(2)).ok());
  EXPECT_EQ(r.At(1).state, ActionState::kEscalated);
  r.Samples(1);
  ASSERT_EQ(r.count(), 3u);
  EXPECT_EQ(r.At(3).kind, ActionKind::kCenterK);
  EXPECT_EQ(r.At(3).state, ActionState::kProposed);
}

TEST(EffectTest, PersonsActionIsJudgedButNotUndone) {
  IllRun r(DefaultPolicy());
  r.Hello();
  Action action;
  action.kind = ActionKind::kAttentionMode;
  action.mode = "hp";
  ASSERT_TRUE(r.Propose(action).ok());
  r.ill.common_growth = 2;
  r.Samples(700);
  ASSERT_TRUE(r.Ask(ActionRequest::Verb::kApprove, r.Id(1)).ok());
  r.Deliver(r.Id(1));
  r.Samples(1001);
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied, did not help, kept");
  EXPECT_EQ(r.count(), 1u);
}

TEST(EffectTest, CommonModeOfCentredKeysDoesNotCountAgainstCentring) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.common_growth = 2;
  r.ActOn(r.Alert());
  r.Samples(3001);
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied, kept");
  EXPECT_THAT(r.WhyOf(1, ActionState::kKept), HasSubstr("whether it helped cannot be told"));
}

TEST(EffectTest, AlertEndAfterRuleChangeIsNoEvidence) {
  const auto why = [](int64_t changed_after, bool restart) {
    IllRun r(PolicyOf("{mode: enforce, rules: [{ladder: [{do: attention.mode, mode: hp}]}]}"));
    r.Hello();
    r.ill.sigma = 20;
    if (changed_after < 0) r.engine->OnRules(r.now());
    r.ActOn(r.Alert("drift", 3, Severity::kCritical));
    r.Samples(changed_after < 0 ? 300 : changed_after);
    if (changed_after >= 0) r.engine->OnRules(r.now());
    if (restart) {
      EXPECT_TRUE(r.engine->Restore(r.engine->Save()));
    }
    r.Samples(10);
    r.Resolve(r.Alert("drift"));
    r.Samples(1001);
    EXPECT_EQ(r.At(1).state, ActionState::kKept);
    return r.WhyOf(1, ActionState::kHelped) + " | " + r.WhyOf(1, ActionState::kKept);
  };
  EXPECT_THAT(why(-1, false), HasSubstr("the alert is over; "));
  for (const bool restart : {false, true}) {
    EXPECT_THAT(why(300, restart), HasSubstr("never helped"));
    EXPECT_THAT(why(300, restart), HasSubstr("cannot be told: the alert is over, but the rules were changed"));
  }
}

TEST(EffectTest, AlertEndIsEvidenceOnlyIfActionLeavesRuleUntouched) {
  const struct {
    const char* action;
    const char* rule;
    bool helped;
  } cases[] = {{"attention.center_k", "drift", false},
               {"attention.center_k", "ties", false},
               {"attention.center_k", "logits", false},
               {"attention.center_k", "norm", true},
               {"attention.center_k", "my_own_rule", false},
               {"qk.clip, gamma: 0.5", "norm", false},
               {"qk.clip, gamma: 0.5", "logits", false},
               {"lr.scale, factor: 0.5", "loss", false},
               {"lr.scale, factor: 0.5", "logits", true},
               {"attention.mode, mode: hp", "drift", true},
               {"attention.mode, mode: hp", "my_own_rule", false}};
  for (const auto& c : cases) {
    SCOPED_TRACE(std::string(c.action) + " for " + c.rule);
    IllRun r(PolicyOf("{mode: enforce, rules: [{ladder: [{do: " + std::string(c.action) + "}]}]}"));
    r.Hello();
    r.ill.sigma = 20;  // Stands out, and stands still: nothing to be told by the numbers.
    r.ActOn(r.Alert(c.rule, 3, Severity::kCritical));
    if (std::string(c.action).starts_with("qk.clip")) r.ill.sigma *= std::sqrt(0.5);
    r.Resolve(r.Alert(c.rule));
    r.Samples(1001);
    EXPECT_EQ(r.At(1).state, ActionState::kKept);
    if (c.helped) {
      EXPECT_THAT(r.WhyOf(1, ActionState::kHelped), HasSubstr("the alert is over; "));
    } else {
      EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied, kept");
      EXPECT_THAT(r.WhyOf(1, ActionState::kKept), HasSubstr("cannot be told: the alert is over, but "));
    }
    EXPECT_EQ(r.count(), 1u) << "nothing is proposed for what is over";
  }
}

TEST(EffectTest, UnclearTrialIsExtendedThenNextRungFollows) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ActOn(r.Alert());
  r.Samples(2500);
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
  r.Samples(600);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
  EXPECT_THAT(r.At(1).history.back().reason, HasSubstr("whether it helped cannot be told"));
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kAttentionMode);
}

TEST(EffectTest, NanSignalEndsTheTrial) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.Samples(100);
  r.ill.sigma = kNan;
  r.Samples(2);
  EXPECT_EQ(r.At(1).state, ActionState::kEscalated);
  EXPECT_EQ(r.WhyOf(1, ActionState::kDidNotHelp), "wq_sigma of layer 1 head 0 is not a number at step 901");
}

TEST(EffectTest, SingleNanSampleEndsNoTrial) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 0;
  r.Samples(100);
  const double loss = r.ill.loss;
  r.ill.loss = kNan;
  r.Samples(1);
  r.ill.loss = loss;
  r.Samples(1000);
  EXPECT_EQ(r.WhyOf(1, ActionState::kHelped).substr(0, 8), "wq_sigma");
}

TEST(EffectTest, WorseLossOutweighsABetterSignal) {
  IllRun r(PolicyOf(kHpThenCentre));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 0;
  r.ill.loss = 3;
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kDidNotHelp);
  EXPECT_EQ(r.WhyOf(1, ActionState::kDidNotHelp), "loss: 3 and more, before 2, at most 2");
}

TEST(EffectTest, LossSpikeAtTrialEndDecidesNothing) {
  IllRun r(PolicyOf(kHpThenCentre));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 0;
  r.Samples(950);
  r.ill.loss = 30;
  r.Samples(51);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
  EXPECT_THAT(r.WhyOf(1, ActionState::kHelped), HasSubstr("wq_sigma"));
}

TEST(EffectTest, ClipIsJudgedAgainstTheClippedNorm) {
  IllRun r(PolicyOf("{mode: enforce, rules: [{ladder: [{do: qk.clip, gamma: 0.25}, {do: attention.center_k}]}]}"));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ill.sigma = 20;
  r.ActOn(r.Alert("norm", 3, Severity::kCritical));
  // Only the head that stands out, not the other one that the alert names.
  EXPECT_THAT(r.At(1).scope.heads, testing::ElementsAre(Head{1, 0}));
  r.ill.sigma /= 2;
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kEscalated);  // It grows on from there.
  EXPECT_THAT(r.WhyOf(1, ActionState::kEscalated), HasSubstr("cannot be undone"));
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kCenterK);
}

TEST(EffectTest, AClipToTheMedianIsHeldAgainstTheMedian) {
  IllRun r(PolicyOf("{mode: enforce, rules: [{ladder: [{do: qk.clip, gamma: 0}, {do: attention.center_k}]}]}"));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ill.sigma = 20;
  r.ActOn(r.Alert("norm", 3, Severity::kCritical));
  ASSERT_EQ(r.At(1).value, 0);
  r.ill.sigma = 3;  // As the other heads are, and it stays there.
  r.ill.sigma_growth = 0;
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
  EXPECT_THAT(r.WhyOf(1, ActionState::kHelped), HasSubstr("wq_sigma of layer 1 head 0: 3, was to be"));
}

TEST(EffectTest, NextAlwaysFollowsHelpfulRungUnlessAlertIsOver) {
  for (const bool over : {false, true}) {
    IllRun r(
        PolicyOf("{mode: enforce, rules: [{ladder: [{do: attention.center_k, trial_steps: 200, next: always}, {do: "
                 "qk.clip, gamma: 0.25}]}]}"));
    r.Hello();
    r.ill.sigma_growth = 0.8;
    r.ill.sigma = 30;
    r.ActOn(r.Alert("norm", 3, Severity::kCritical));
    if (over) r.Resolve(r.Alert("norm"));
    r.ill.sigma_growth = 0;
    r.Samples(400);
    EXPECT_EQ(r.At(1).state, ActionState::kKept);
    ASSERT_EQ(r.count(), over ? 1u : 2u);
    if (over) continue;
    EXPECT_EQ(r.At(2).kind, ActionKind::kQkClip);
    EXPECT_EQ(r.At(2).state, ActionState::kApproved);
  }
}

TEST(EffectTest, CommonModeDecidesWhereSigmaIsNotMeasured) {
  IllRun r(PolicyOf(kHpThenCentre));
  r.Hello();
  r.ill.has_sigma = false;
  r.ill.common_growth = 2;
  r.ActOn(r.Alert());
  r.ill.common_growth = 0;
  r.Samples(1001);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
  EXPECT_THAT(r.WhyOf(1, ActionState::kHelped), HasSubstr("common_mode of layer 1 head 0"));
}

TEST(EffectTest, RisingAlertAfterHelpfulActionTakesNextRung) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 0;
  r.Samples(1500);
  ASSERT_EQ(r.At(1).state, ActionState::kKept);
  r.Fire(r.Alert("drift", 2));
  r.Samples(1);
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kAttentionMode);
}

TEST(EffectTest, CriticalAlertEndsUnhelpfulTrial) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 4;
  r.Samples(200);
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
  r.Fire(r.Alert("drift", 3, Severity::kCritical));
  r.Samples(20);
  EXPECT_EQ(r.At(1).state, ActionState::kEscalated);
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kAttentionMode);
}

TEST(EffectTest, CriticalAlertDoesNotEndHelpfulTrial) {
  IllRun r(PolicyOf(kCentreThenHp));
  r.Hello();
  r.ill.sigma_growth = 0.8;
  r.ActOn(r.Alert());
  r.ill.sigma_growth = 0;
  r.Samples(200);
  r.Fire(r.Alert("drift", 3, Severity::kCritical));
  r.Samples(700);
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
  r.Samples(200);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
  EXPECT_EQ(r.count(), 1u);
}

TEST(EffectTest, RareSamplesAreWaitedFor) {
  EffectWatch watch(SmallRun().layout);
  StepSample sample;
  for (int i = 1; i <= 6; ++i) {
    sample.Reset(SmallRun().layout);
    sample.step = 500 * i;
    const auto sigma = sample.Add(SignalId::kWqSigma);
    std::fill(sigma.begin(), sigma.end(), 3.0f);
    EXPECT_EQ(watch.CanJudge(), i == 1);  // Nothing was measured so far: nothing to wait for.
    watch.Observe(sample);
  }
  EXPECT_TRUE(watch.CanJudge());  // From the second on a sample is a batch of its own.
}

}  // namespace
}  // namespace bellwether::server
