// Goal: an action is in force on all ranks at the same step or on none, also
// when answers are late, partial, repeated or missing, and after a restart.
// Method: made-up runs of several ranks; every message is a call.

#include <gmock/gmock.h>

#include "tests/server/act/act_run.h"

namespace bellwether::server {
namespace {

using Verb = ActionRequest::Verb;
using testing::HasSubstr;

RunDescription Ranks(uint32_t world, uint32_t reporters) {
  RunDescription run = SmallRun();
  run.world = world;
  run.reporters = reporters;
  return run;
}

Action Approved(Action action) {
  action.state = ActionState::kApproved;
  return action;
}

Action Clip() {
  Action clip;
  clip.kind = ActionKind::kQkClip;
  clip.value = 0.5;
  clip.scope.heads = {{1, 0}};
  return clip;
}

TEST(DeliveryTest, LowestRankAnswersForAgreeingRanks) {
  ActRun r(DefaultPolicy(), Ranks(8, 8));
  for (uint32_t rank = 0; rank < 8; ++rank) r.Hello(rank, kAllKinds, true);
  ASSERT_TRUE(r.Propose(Approved(Clip())).ok());
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_EQ(r.engine->Due(0)[0].apply_at_step, 0);
  for (uint32_t rank = 1; rank < 8; ++rank) EXPECT_TRUE(r.engine->Due(rank).empty());
  r.Answer(r.Id(1), true, 3);  // It was not asked.
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
  r.Deliver(r.Id(1));
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
}

TEST(DeliveryTest, SingleReporterAnswersForAllRanks) {
  ActRun r(DefaultPolicy(), Ranks(8, 1));
  r.Hello(0, kAllKinds, true);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Deliver(r.Id(1));
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
}

TEST(DeliveryTest, RanksWithoutAGroupApplyAtOneFutureStep) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  ASSERT_EQ(r.engine->Due(0).size(), 1u);
  ASSERT_EQ(r.engine->Due(1).size(), 1u);
  EXPECT_GE(r.engine->Due(0)[0].apply_at_step, r.step + 8);
  EXPECT_EQ(r.engine->Due(0)[0].apply_at_step, r.engine->Due(1)[0].apply_at_step);
  r.Sent(r.Id(1));
  r.Answer(r.Id(1), true, 1, "", 150);
  EXPECT_EQ(r.At(1).state, ActionState::kSent);
  EXPECT_TRUE(r.engine->Due(1).empty());
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
  r.Answer(r.Id(1), true, 0, "", 150);
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
  EXPECT_EQ(r.At(1).history.back().reason, "at step 150 on 2 ranks");
}

TEST(DeliveryTest, ApplyStepIsCountedFromNewAttemptsSteps) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Sent(r.Id(1));
  r.run.attempt = 2;  // Its checkpoint is one that the server has heard nothing of.
  r.Hello(0);
  r.Hello(1);
  EXPECT_TRUE(r.engine->Due(0).empty());
  EXPECT_TRUE(r.engine->Due(1).empty());
  r.step = 5000;
  r.Steps(1);
  ASSERT_EQ(r.engine->Due(0).size(), 1u);
  ASSERT_EQ(r.engine->Due(1).size(), 1u);
  EXPECT_EQ(r.engine->Due(0)[0].apply_at_step, 5101);
}

TEST(DeliveryTest, ApplyStepIsNotCountedFromPreviousAttempt) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.run.attempt = 2;
  r.Hello(0);
  r.Hello(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.run.attempt = 1;
  r.Steps(1);  // It was still open.
  EXPECT_TRUE(r.engine->Due(0).empty());
  r.run.attempt = 2;
  r.Steps(1);
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
}

TEST(DeliveryTest, WithoutAStepToCountFromItExpires) {
  ActRun r(PolicyOf("limits: {time_to_live_s: 100}"), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.time_s += 101;
  r.Hello(0);
  EXPECT_TRUE(r.engine->Due(0).empty());
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
  EXPECT_EQ(r.At(1).history.back().reason, "no step of the attempt to count from was closed in time");
}

TEST(DeliveryTest, ActionExpiresIfNewAttemptNeverGotIt) {
  ActRun r(PolicyOf("limits: {time_to_live_s: 100}"), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Sent(r.Id(1));
  r.run.attempt = 2;
  r.Hello(0);  // Rank 1 never comes.
  r.Steps(200);
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
  EXPECT_EQ(r.At(1).history.back().reason, "not all ranks of the attempt have said hello");
}

TEST(DeliveryTest, TheMarginIsFiveSecondsOfSteps) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  StepSample sample;
  sample.Reset(r.run.layout);
  sample.attempt = r.run.attempt;
  sample.step = ++r.step;
  sample.Add(SignalId::kStepSeconds)[0] = 0.03125f;
  r.engine->OnStep(sample, r.now(), &r.changed);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  EXPECT_EQ(r.engine->Due(0)[0].apply_at_step, r.step + 160);
}

TEST(DeliveryTest, RefusalByOneRankUndoesTheOthers) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Sent(r.Id(1));
  r.Answer(r.Id(1), true, 0);
  r.Answer(r.Id(1), false, 1, "late");
  EXPECT_EQ(r.At(1).state, ActionState::kRefused);
  EXPECT_EQ(r.At(1).history.back().reason, "partial: late");
  EXPECT_EQ(r.At(1).history.back().by, "rank 1");
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).undoes, r.Id(1));
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_TRUE(r.engine->Due(1).empty());
  r.Deliver(r.Id(2));
  EXPECT_EQ(r.At(2).state, ActionState::kKept);
  EXPECT_EQ(r.At(1).state, ActionState::kRefused);  // It never was in force as a whole.
}

TEST(DeliveryTest, RanksThatApplyAtDifferentStepsArePartial) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Sent(r.Id(1));
  r.Answer(r.Id(1), true, 0, "", 150);
  r.Answer(r.Id(1), true, 1, "", 151);
  EXPECT_EQ(r.At(1).state, ActionState::kRefused);
  EXPECT_EQ(r.At(1).history.back().reason, "partial: ranks applied it at different steps");
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_EQ(r.engine->Due(1).size(), 1u);
}

TEST(DeliveryTest, ARankThatNeverAnswersMakesItPartial) {
  ActRun r(PolicyOf("limits: {time_to_live_s: 100}"), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Sent(r.Id(1));
  r.Answer(r.Id(1), true, 0);
  r.Steps(161);
  EXPECT_EQ(r.At(1).state, ActionState::kRefused);
  EXPECT_EQ(r.At(1).history.back().reason, "partial: no answer from rank 1");
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
  // And it had applied it after all.
  r.Answer(r.Id(1), true, 1);
  ASSERT_EQ(r.count(), 3u);
  EXPECT_EQ(r.At(3).undoes, r.Id(1));
  EXPECT_EQ(r.engine->Due(1).size(), 1u);
}

TEST(DeliveryTest, AnUndoThatOneRankMissedGoesToItAgain) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Sent(r.Id(1));
  r.Answer(r.Id(1), true, 0, "", 150);
  r.Answer(r.Id(1), true, 1, "", 150);
  ASSERT_TRUE(r.Ask(Verb::kUndo, r.Id(1)).ok());
  r.Sent(r.Id(2));
  r.Answer(r.Id(2), true, 0);
  r.Answer(r.Id(2), false, 1, "late");
  ASSERT_EQ(r.count(), 3u);
  EXPECT_EQ(r.At(3).undoes, r.Id(1));
  EXPECT_TRUE(r.engine->Due(0).empty());
  EXPECT_EQ(r.engine->Due(1).size(), 1u);
  r.Sent(r.Id(3));
  r.Answer(r.Id(3), true, 1);
  EXPECT_EQ(r.At(1).state, ActionState::kUndone);
}

TEST(DeliveryTest, UnlessAllRanksReportOnlySamplingMayChange) {
  ActRun r(DefaultPolicy(), Ranks(8, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  EXPECT_THAT(std::string(r.Propose(Approved(CenterAll())).message()), HasSubstr("2 of 8 ranks report"));
  // What only those who report are asked for is fine.
  Action deepen;
  deepen.kind = ActionKind::kSamplingDeepen;
  deepen.value = 5;
  ASSERT_TRUE(r.Propose(Approved(deepen)).ok());
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_EQ(r.engine->Due(1).size(), 1u);
}

TEST(DeliveryTest, IrreversibleActionNeedsAgreeingRanks) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1);
  r.Steps(1);
  EXPECT_THAT(std::string(r.Propose(Approved(Clip())).message()), HasSubstr("could be left with it applied in part"));
  EXPECT_EQ(r.count(), 0u);
}

TEST(DeliveryTest, ActionIsRefusedIfOneRankCannotApplyIt) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Hello(1, 0);
  EXPECT_THAT(std::string(r.Propose(Approved(CenterAll())).message()),
              HasSubstr("rank 1 did not allow attention.center_k"));
  EXPECT_EQ(r.count(), 0u);
}

TEST(DeliveryTest, ActionsWaitForHellosOfAllRanks) {
  ActRun r(DefaultPolicy(), Ranks(2, 2));
  r.Hello(0);
  r.Steps(1);
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
  EXPECT_TRUE(r.engine->Due(0).empty());
  r.Hello(1);
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_EQ(r.engine->Due(1).size(), 1u);
}

TEST(DeliveryTest, AnswersOfUnknownActionsRanksAndAttemptsAreIgnored) {
  ActRun r(DefaultPolicy());
  r.Hello();
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.changed.clear();
  r.Answer("abcdef01-7");
  r.Answer("");
  r.engine->OnResult({.id = r.Id(1), .rank = 0, .attempt = 0, .applied = true, .step = 5}, r.now(), &r.changed);
  r.engine->OnResult({.id = r.Id(1), .rank = 9, .attempt = 1, .applied = true, .step = 5}, r.now(), &r.changed);
  EXPECT_TRUE(r.changed.empty());
}

TEST(DeliveryTest, RestartRefusesUnappliedActionsAndResendsAppliedOnes) {
  ActRun r(DefaultPolicy());
  r.Hello();
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Deliver(r.Id(1));
  r.Steps(1100);
  ASSERT_EQ(r.At(1).state, ActionState::kKept);
  ASSERT_TRUE(r.Propose(Approved(Clip())).ok());
  r.Sent(r.Id(2));
  r.run.attempt = 2;
  r.Hello();
  EXPECT_EQ(r.At(2).state, ActionState::kRefused);
  EXPECT_EQ(r.At(2).history.back().reason, "the trainer restarted");
  EXPECT_EQ(r.At(1).state, ActionState::kSent);
  EXPECT_EQ(r.At(1).attempt, 2u);
  ASSERT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_EQ(r.engine->Due(0)[0].id, r.Id(1));
  r.Deliver(r.Id(1));
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
  EXPECT_EQ(r.At(1).history.back().reason, "in force again, as before the restart");
  EXPECT_TRUE(r.Ask(Verb::kUndo, r.Id(1)).ok());
}

TEST(DeliveryTest, RestartBeforeTheAnswerResendsTheAction) {
  ActRun r(DefaultPolicy());
  r.Hello();
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Sent(r.Id(1));
  r.run.attempt = 2;
  r.Hello();
  EXPECT_EQ(r.At(1).state, ActionState::kSent);
  ASSERT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_EQ(r.engine->Due(0)[0].attempt, 2u);
  r.Answer(r.Id(1));
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
}

TEST(DeliveryTest, ATrialBeginsAgainWithTheNewAttempt) {
  ActRun r(DefaultPolicy());
  r.Hello();
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Deliver(r.Id(1));
  r.Steps(900);
  r.run.attempt = 2;
  r.Hello();
  r.Answer(r.Id(1));
  r.Steps(900);
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
  r.Steps(5000);
  EXPECT_EQ(r.At(1).state, ActionState::kKept);
}

TEST(DeliveryTest, ObservingPolicyDoesNotResendItsActionsAfterRestart) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  r.Deliver(r.Id(1));
  r.engine->SetPolicy(DefaultPolicy(), "alice", r.now(), &r.changed);
  r.run.attempt = 2;
  r.Hello();
  EXPECT_TRUE(r.engine->Due(0).empty());
  EXPECT_EQ(r.At(1).state, ActionState::kUndone);
  EXPECT_EQ(r.At(1).history.back().reason, "attempt 2 began without it, and the policy observes");
}

TEST(DeliveryTest, RestartCompletesAnUndoUnderWay) {
  ActRun r(DefaultPolicy());
  r.Hello();
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.Deliver(r.Id(1));
  ASSERT_TRUE(r.Ask(Verb::kUndo, r.Id(1)).ok());
  r.Sent(r.Id(2));
  r.run.attempt = 2;
  r.Hello();
  EXPECT_EQ(r.At(1).state, ActionState::kUndone);
  EXPECT_EQ(r.At(2).state, ActionState::kRefused);
  EXPECT_TRUE(r.engine->Due(0).empty());
}

TEST(DeliveryTest, AHelloOfAnOlderAttemptChangesNothing) {
  ActRun r(DefaultPolicy());
  r.run.attempt = 2;
  r.Hello();
  ASSERT_TRUE(r.Propose(Approved(CenterAll())).ok());
  r.changed.clear();
  r.run.attempt = 1;
  r.Hello(0, 0);
  EXPECT_TRUE(r.changed.empty());
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
}

}  // namespace
}  // namespace bellwether::server
