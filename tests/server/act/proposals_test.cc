// Goal: an alert says what was proposed for it, at what price and how to
// approve it, and nothing of what is done about other alerts.
// Method: actions as an engine would leave them.
#include "server/act/proposals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/alert_words.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

Action Centring(const std::string& id, ActionState state) {
  Action action;
  action.id = id;
  action.kind = ActionKind::kCenterK;
  action.value = 1;
  action.scope.layers = {3};
  action.cost = "1 % of attention";
  action.alert_key = "drift/3/5/1200";
  action.state = state;
  return action;
}

TEST(ProposalsTest, AnAlertSaysWhatWaitsForIt) {
  AlertTransition transition;
  transition.run_name = "r";
  transition.key = "drift/3/5/1200";
  transition.advice = "Centre the keys.";
  // It changed twice: as it is now is its last.
  AddProposals({Centring("aa-1", ActionState::kApproved), Centring("aa-1", ActionState::kProposed)}, *DefaultPolicy(),
               &transition);
  EXPECT_THAT(transition.advice, AllOf(HasSubstr("Centre the keys. Proposed: attention.center_k"), HasSubstr("layer 3"),
                                       HasSubstr("bellwether action approve r aa-1"),
                                       HasSubstr("cost: 1 % of attention"), Not(HasSubstr("On its way"))));
}

TEST(ProposalsTest, AdviceSaysThatApprovedActionIsOnItsWay) {
  AlertTransition transition;
  transition.key = "drift/3/5/1200";
  AddProposals({Centring("aa-1", ActionState::kApproved)}, *DefaultPolicy(), &transition);
  EXPECT_THAT(transition.advice, AllOf(HasSubstr("On its way"), HasSubstr("action aa-1")));
}

TEST(ProposalsTest, ActionNamedInAdviceIsNotRepeated) {
  AlertTransition transition;
  transition.run_name = "r";
  transition.key = "drift/3/5/1200";
  const std::string text = ProposalText({Centring("aa-1", ActionState::kProposed)}, transition);
  EXPECT_THAT(text, AllOf(HasSubstr("action approve r aa-1"), HasSubstr("cost: 1 % of attention")));
  transition.advice = text;
  EXPECT_EQ(ProposalText({Centring("aa-1", ActionState::kSent)}, transition), "");
  EXPECT_THAT(ProposalText({Centring("aa-11", ActionState::kProposed)}, transition), HasSubstr("aa-11"));
}

TEST(ProposalsTest, DecidedProposalsAreRemovedFromAdvice) {
  AlertTransition transition;
  transition.run_name = "r";
  transition.key = "drift/3/5/1200";
  transition.advice = "Centre the keys.";
  const std::vector<Action> proposed = {Centring("aa-1", ActionState::kProposed),
                                        Centring("aa-2", ActionState::kProposed)};
  AddProposals(proposed, *DefaultPolicy(), &transition);
  std::string advice = transition.advice;
  HideEndedProposals("r", proposed, &advice);
  EXPECT_EQ(advice, transition.advice);
  HideEndedProposals("r", {Centring("aa-1", ActionState::kExpired), proposed[1]}, &advice);
  EXPECT_THAT(advice, AllOf(Not(HasSubstr("aa-1")), HasSubstr("action approve r aa-2")));
  HideEndedProposals("r", {Centring("aa-2", ActionState::kApproved)}, &advice);
  EXPECT_EQ(advice, "Centre the keys.");
  EXPECT_FALSE(SpeaksOfProposals(advice));
}

TEST(ProposalsTest, ProposalTheJobForbidsHasNoCommand) {
  AlertTransition transition;
  transition.run_name = "r";
  transition.key = "drift/3/5/1200";
  transition.advice = "Switch.";
  Action action = Centring("aa-1", ActionState::kProposed);
  action.not_allowed = "rank 0 did not allow attention.center_k";
  AddProposals({action}, *DefaultPolicy(), &transition);
  const std::string words =
      "Switch. Cannot be approved: attention.center_k of layer 3 (action aa-1): rank 0 did not allow "
      "attention.center_k.";
  EXPECT_EQ(transition.advice, words);
  EXPECT_EQ(AdviceNow({action}, transition), words);
  action.not_allowed.clear();
  EXPECT_THAT(AdviceNow({action}, transition),
              HasSubstr("Switch. Proposed: attention.center_k of layer 3; `bellwether"));
  action.state = ActionState::kRefused;
  EXPECT_EQ(AdviceNow({action}, transition), "Switch.");
}

TEST(ProposalsTest, RepairOnTrialIsToBeWaitedFor) {
  AlertTransition transition;
  transition.key = "drift/3/5/1200";
  transition.state = AlertState::kFiring;
  transition.advice = "Stop.";
  EXPECT_EQ(AdviceNow({Centring("aa-1", ActionState::kApplied)}, transition), absl::StrCat(kOnTrialWords, " Stop."));
  EXPECT_EQ(AdviceNow({Centring("aa-1", ActionState::kHelped)}, transition), "Stop.");
  // Of an action for no alert: not where all is lost, nor for what began later.
  Action other = Centring("aa-2", ActionState::kApplied);
  other.alert_key.clear();
  other.history.push_back({.state = ActionState::kApplied, .step = 90});
  EXPECT_EQ(AdviceNow({other}, transition), "Stop.");
  transition.advice = "Clip.";
  transition.first_step = 80;
  EXPECT_EQ(AdviceNow({other}, transition), absl::StrCat(kOnTrialWords, " Clip."));
  transition.first_step = 100;
  EXPECT_EQ(AdviceNow({other}, transition), "Clip.");
}

TEST(ProposalsTest, ProposalsOfOtherAlertsOrStatesAddNothing) {
  AlertTransition transition;
  transition.key = "ties/0/0/10";
  transition.advice = "as it was";
  AddProposals({Centring("aa-1", ActionState::kProposed)}, *DefaultPolicy(), &transition);
  EXPECT_EQ(transition.advice, "as it was");
  transition.key = "drift/3/5/1200";
  AddProposals({Centring("aa-1", ActionState::kRefused), Centring("aa-2", ActionState::kApplied)}, *DefaultPolicy(),
               &transition);
  EXPECT_EQ(transition.advice, "as it was");
}

TEST(ProposalsTest, ANewAlertSaysWhatThePolicyWillDo) {
  AlertTransition transition;
  transition.key = "drift/3/5/1200";
  transition.rule = "drift";
  transition.stage = 1;
  transition.state = AlertState::kFiring;
  transition.severity = Severity::kWarning;
  AddProposals({}, *DefaultPolicy(), &transition);
  EXPECT_EQ(transition.advice, "");  // It observes.
  const char* const kText =
      "rules:\n- when: {rule: [drift]}\n  confirm_steps: 40\n  ladder: [{do: attention.mode, mode: hp, scope: all}]\n";
  const auto propose = ParsePolicy(std::string("mode: propose\n") + kText, "test");
  ASSERT_TRUE(propose.ok()) << propose.status();
  AddProposals({}, **propose, &transition);
  EXPECT_THAT(transition.advice,
              AllOf(HasSubstr("for 40 steps, the policy proposes attention.mode hp"), HasSubstr("cost: ")));
  transition.advice.clear();
  transition.k = 1;
  AddProposals({}, **propose, &transition);
  EXPECT_EQ(transition.advice, "");
}

}  // namespace
}  // namespace bellwether::server
