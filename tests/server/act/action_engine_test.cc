// Goal: an action lives as action_engine.h says: one at a time, from the
// proposal to its end; what the policy does not allow does not happen.
// Method: a made-up run of two layers; every message is a call.

#include "server/act/action_engine.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "tests/server/act/act_run.h"

namespace bellwether::server {
namespace {

using Verb = ActionRequest::Verb;
using testing::HasSubstr;

TEST(ActionEngineTest, APersonsProposalIsApprovedHandedOutAndApplied) {
  ActRun r(DefaultPolicy());
  r.Hello();
  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  EXPECT_EQ(r.At(1).id, "abcdef01-1");
  EXPECT_EQ(r.At(1).asked_by, "alice");
  EXPECT_THAT(r.At(1).cost, HasSubstr("of attention time"));
  EXPECT_TRUE(r.engine->Due(0).empty());
  ASSERT_TRUE(r.Ask(Verb::kApprove, r.Id(1)).ok());
  ASSERT_EQ(r.engine->Due(0).size(), 1u);
  EXPECT_EQ(r.engine->Due(0)[0].apply_at_step, 0);
  EXPECT_TRUE(r.engine->Due(1).empty());
  r.Sent(r.Id(1));
  ASSERT_EQ(r.engine->Due(0).size(), 1u);  // Until it is answered.
  const uint64_t version = r.engine->due_version();
  r.Answer(r.Id(1));
  EXPECT_GT(r.engine->due_version(), version);
  EXPECT_TRUE(r.engine->Due(0).empty());
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied");
  EXPECT_EQ(r.At(1).history.back().by, "rank 0");
  r.Answer(r.Id(1));  // A repeat.
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied");
}

TEST(ActionEngineTest, ProposeWithApprovalDoesBothOrNeither) {
  ActRun r(PolicyOf("approvers: [alice]"));
  r.Hello();
  Action action = CenterAll();
  action.state = ActionState::kApproved;
  EXPECT_EQ(r.Propose(action, "bob").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(r.count(), 0u);
  ASSERT_TRUE(r.Propose(action, "alice").ok());
  EXPECT_EQ(Life(r.At(1)), "proposed, approved");
  EXPECT_EQ(r.Propose(action, "alice").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(r.count(), 1u);
}

TEST(ActionEngineTest, ModeObserveMakesNothing) {
  ActRun r(PolicyOf("mode: observe"));
  r.Hello();
  r.Fire(r.Alert("drift", 3, Severity::kCritical));
  r.Steps(5000);
  EXPECT_EQ(r.count(), 0u);
  EXPECT_TRUE(r.changed.empty());
}

TEST(ActionEngineTest, NoActionWithoutAnAlert) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello();
  r.Steps(5000);
  EXPECT_TRUE(r.changed.empty());
}

TEST(ActionEngineTest, ModeEnforceApprovesFirstRungAfterConfirmation) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(39);
  EXPECT_EQ(r.count(), 0u);
  r.Steps(1);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).kind, ActionKind::kCenterK);
  EXPECT_EQ(r.At(1).scope, ActionScope());
  EXPECT_EQ(r.At(1).asked_by, "policy");
  EXPECT_EQ(r.At(1).alert_key, "drift/1/0/10");
  EXPECT_EQ(Life(r.At(1)), "proposed, approved");
  r.Deliver(r.Id(1));
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
}

TEST(ActionEngineTest, ModeProposeWaitsForOneOfTheApprovers) {
  ActRun r(PolicyOf("{mode: propose, approvers: [alice, \"oncall-*\"]}"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(200);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).state, ActionState::kProposed);
  const absl::Status refused = r.Ask(Verb::kApprove, r.Id(1), "mallory");
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("mallory"));
  EXPECT_EQ(r.Ask(Verb::kReject, r.Id(1), "oncall").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(r.At(1).state, ActionState::kProposed);
  EXPECT_TRUE(r.Ask(Verb::kApprove, r.Id(1), "oncall-7").ok());
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
  EXPECT_EQ(r.At(1).history.back().by, "oncall-7");
}

TEST(ActionEngineTest, AnAlertThatResolvesEndsItsProposals) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_EQ(r.count(), 1u);
  r.Resolve(r.Alert());
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
  EXPECT_EQ(r.At(1).history.back().reason, "the alert has resolved");
  EXPECT_EQ(r.Ask(Verb::kApprove, r.Id(1)).code(), absl::StatusCode::kFailedPrecondition);
  r.Steps(500);
  EXPECT_EQ(r.count(), 1u);
}

TEST(ActionEngineTest, AlertResolvedBeforeConfirmationMakesNoAction) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(30);
  r.Resolve(r.Alert());
  r.Steps(500);
  EXPECT_EQ(r.count(), 0u);
}

FalseAlarm Said(const AlertTransition& of, bool undone = false) {
  FalseAlarm said{.key = of.key, .by = "ann", .reason = "new data"};
  said.severity = of.severity;
  said.illness = IllnessOf(of);
  said.undone = undone;
  return said;
}

TEST(ActionEngineTest, FalseAlarmWithdrawsItsProposalUntilThatIsTakenBack) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_EQ(r.count(), 1u);
  const size_t before = r.changed.size();
  EXPECT_FALSE(r.engine->IsFalseAlarm(r.Alert().key));
  r.Judge(Said(r.Alert()));
  EXPECT_TRUE(r.engine->IsFalseAlarm(r.Alert().key));
  ASSERT_EQ(r.changed.size(), before + 1);
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
  EXPECT_EQ(r.At(1).history.back().by, "ann");
  EXPECT_EQ(r.At(1).history.back().reason, "a false alarm: new data");
  EXPECT_EQ(r.Ask(Verb::kApprove, r.Id(1)).code(), absl::StatusCode::kFailedPrecondition);
  r.Steps(1000);
  EXPECT_EQ(r.count(), 1u);
  // As often as people change their minds it is the first rung.
  for (size_t number = 2; number < 7; ++number) {
    r.Judge(Said(r.Alert(), /*undone=*/true));
    r.Steps(1);
    ASSERT_EQ(r.count(), number);
    EXPECT_EQ(r.At(number).kind, r.At(1).kind);
    EXPECT_EQ(r.At(number).state, ActionState::kProposed);
    r.Judge(Said(r.Alert()));
    EXPECT_EQ(r.At(number).state, ActionState::kExpired);
  }
}

TEST(ActionEngineTest, FalseAlarmLeadsToNoActionUnderAnyKey) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello();
  AlertTransition alert = r.Alert();
  r.Fire(alert);
  r.Judge(Said(alert));
  r.Steps(500);
  r.Resolve(alert);
  alert.key = "a2";
  r.Fire(alert);
  r.Steps(500);
  EXPECT_EQ(r.count(), 0u);
  EXPECT_TRUE(r.engine->IsFalseAlarm("a2"));
  // After a restart, too.
  const std::string saved = r.engine->Save();
  ASSERT_TRUE(r.engine->Restore(saved));
  EXPECT_EQ(r.engine->Save(), saved);
  r.Steps(500);
  EXPECT_EQ(r.count(), 0u);
  // What is worse than was judged is news.
  alert.severity = Severity::kCritical;
  r.Fire(alert);
  EXPECT_FALSE(r.engine->IsFalseAlarm("a2"));
  r.Steps(50);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).alert_key, "a2");
  EXPECT_EQ(Life(r.At(1)), "proposed, approved");
}

TEST(ActionEngineTest, AlertThatTurnsOutToBeFalseWithdrawsItsProposal) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  AlertTransition known = r.Alert();
  known.cause = "logit growth";
  FalseAlarm said = Said(known);
  said.key = "of before";
  r.Judge(said);
  r.Fire(r.Alert());  // Of no known cause yet.
  r.Steps(50);
  ASSERT_EQ(r.count(), 1u);
  r.Fire(known);
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
}

TEST(ActionEngineTest, ApprovedActionOfAFalseAlarmGoesOn) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_TRUE(r.Ask(Verb::kApprove, r.Id(1)).ok());
  r.Judge(Said(r.Alert()));
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
  r.Deliver(r.Id(1));
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
  r.Steps(5000);
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied, kept");
  EXPECT_EQ(r.count(), 1u) << "its ladder is climbed no further";
}

TEST(ActionEngineTest, PersonsOwnProposalForAFalseAlarmStays) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Judge(Said(r.Alert()));
  Action action = CenterAll();
  action.alert_key = r.Alert().key;
  ASSERT_TRUE(r.Propose(action).ok());
  r.Judge(Said(r.Alert()));
  EXPECT_EQ(r.At(1).state, ActionState::kProposed) << "its author knew";
}

TEST(ActionEngineTest, AfterRejectionNextRungWaitsForAlertToRise) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_TRUE(r.Ask(Verb::kReject, r.Id(1)).ok());
  EXPECT_EQ(r.At(1).state, ActionState::kRefused);
  EXPECT_EQ(r.At(1).history.back().by, "alice");
  r.Steps(1000);
  EXPECT_EQ(r.count(), 1u);
  r.Fire(r.Alert("drift", 2));
  r.Steps(1);
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kAttentionMode);  // Not what was rejected.
}

TEST(ActionEngineTest, OneActionAtATime) {
  ActRun r(DefaultPolicy());
  r.Hello();
  Action mode;
  mode.kind = ActionKind::kAttentionMode;
  mode.mode = "hp";
  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  ASSERT_TRUE(r.Propose(mode).ok());
  ASSERT_TRUE(r.Ask(Verb::kApprove, r.Id(1)).ok());
  absl::Status refused = r.Ask(Verb::kApprove, r.Id(2));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("abcdef01-1 (attention.center_k of the whole model) is approved"));
  r.Deliver(r.Id(1));
  refused = r.Ask(Verb::kApprove, r.Id(2));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("is on trial until step 1101"));
  EXPECT_EQ(r.At(2).state, ActionState::kProposed);
}

TEST(ActionEngineTest, IllegalActionIsRefusedWithFieldValueAndRange) {
  ActRun r(DefaultPolicy());
  r.Hello();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    Action action;
    const char* says;
  };
  const Case cases[] = {
      {{}, "kind = 0: must be one of attention.mode, attention.center_k"},
      {{.kind = ActionKind::kCenterK, .value = 2}, "on = 2: must be a whole number in [0, 1]"},
      {{.kind = ActionKind::kCenterK, .value = nan}, "on = nan: must be"},
      {{.kind = ActionKind::kCenterK, .scope = {.layers = {2}}, .value = 1}, "scope.layers[0] = 2: must be in [0, 1]"},
      {{.kind = ActionKind::kCenterK, .scope = {.layers = {1, 0}}, .value = 1},
       "scope.layers[1] = 0: must be ascending"},
      {{.kind = ActionKind::kCenterK, .scope = {.heads = {{0, 0}}}, .value = 1},
       "scope.heads = 1 heads: must be empty"},
      {{.kind = ActionKind::kAttentionMode, .mode = "fast"},
       "mode = fast: must be one of fa, paper, sr, hp, hpm, sdpa"},
      {{.kind = ActionKind::kAttentionMode}, "mode = nothing: must be one of"},
      {{.kind = ActionKind::kCenterK, .mode = "hp", .value = 1}, "mode = hp: must be empty"},
      {{.kind = ActionKind::kAttentionMode, .mode = "hp", .value = 1}, "value = 1: must be 0"},
      {{.kind = ActionKind::kQkClip, .scope = {.heads = {{1, 0}}}, .value = -0.5}, "gamma = -0.5: must be in [0, 1]"},
      {{.kind = ActionKind::kQkClip, .scope = {.heads = {{1, 0}}}, .value = 1.5}, "gamma = 1.5: must be in [0, 1]"},
      {{.kind = ActionKind::kQkClip, .value = 0.5}, "scope.heads = none: must be 1 to 64 heads"},
      {{.kind = ActionKind::kQkClip, .scope = {.heads = {{1, 2}}}, .value = 0.5}, "scope.heads[0] = 1/2: must be"},
      {{.kind = ActionKind::kQkClip, .scope = {.heads = {{1, 0}, {1, 0}}}, .value = 0.5}, "scope.heads[1] = 1/0"},
      {{.kind = ActionKind::kLrScale, .value = 10.5}, "factor = 10.5: must be in (0, 10]"},
      {{.kind = ActionKind::kBatchSkip, .value = 1001}, "batches = 1001: must be a whole number in [1, 1000]"},
      {{.kind = ActionKind::kBatchSkip, .value = 1.5}, "batches = 1.5: must be a whole number"},
      {{.kind = ActionKind::kSamplingDeepen, .value = 0}, "period = 0: must be a whole number in [1, 1000000]"},
      {{.kind = ActionKind::kStop, .value = 1}, "value = 1: must be 0"},
      {{.kind = ActionKind::kStop, .apply_at_step = -1}, "apply_at_step = -1: must be 0 or above"},
      {{.kind = ActionKind::kStop, .apply_at_step = 100},
       "apply_at_step = 100: must be 0 or above the run's newest step 100"},
      {{.kind = ActionKind::kStop, .expires_unix_ns = 5}, "expires_unix_ns = 5: must be 0 or within 7 days"},
  };
  for (const Case& c : cases) {
    const absl::Status status = r.Propose(c.action);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
  EXPECT_EQ(r.count(), 0u);
  EXPECT_TRUE(r.changed.empty());
  EXPECT_EQ(r.Ask(Verb::kApprove, "abcdef01-1").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(r.Ask(Verb::kUndo, "other-run-1").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(r.Propose(CenterAll(), "").code(), absl::StatusCode::kInvalidArgument);
}

TEST(ActionEngineTest, KeysUnderASoftcapAreNotCentred) {
  RunDescription run = SmallRun();
  run.attention.softcap = 30;
  ActRun r(PolicyOf("mode: enforce"), run);
  r.Hello();
  EXPECT_EQ(r.Propose(CenterAll()).code(), absl::StatusCode::kFailedPrecondition);
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).kind, ActionKind::kAttentionMode);
}

TEST(ActionEngineTest, ActionsBeyondTheRunsLimitAreRefused) {
  ActRun r(DefaultPolicy());
  r.Hello();
  for (int i = 0; i < 256; ++i) ASSERT_TRUE(r.Propose(CenterAll()).ok());
  const absl::Status refused = r.Propose(CenterAll());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("at most 256"));
}

TEST(ActionEngineTest, UnapprovedUnfetchedOrUnansweredActionExpires) {
  ActRun r(PolicyOf("limits: {time_to_live_s: 100}"));
  r.Hello();
  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  r.Steps(100);
  EXPECT_EQ(r.At(1).state, ActionState::kProposed);
  r.Steps(1);
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
  EXPECT_EQ(r.At(1).history.back().reason, "nobody approved it in time");

  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  ASSERT_TRUE(r.Ask(Verb::kApprove, r.Id(2)).ok());
  r.Steps(101);
  EXPECT_EQ(r.At(2).state, ActionState::kExpired);
  EXPECT_EQ(r.At(2).history.back().reason, "no trainer fetched it in time");

  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  ASSERT_TRUE(r.Ask(Verb::kApprove, r.Id(3)).ok());
  r.Sent(r.Id(3));
  r.Steps(160);  // The trainer may still say by its own clock that it is too late.
  EXPECT_EQ(r.At(3).state, ActionState::kSent);
  r.Steps(1);
  EXPECT_EQ(r.At(3).state, ActionState::kExpired);
  EXPECT_EQ(r.At(3).history.back().reason, "no answer from rank 0");
  EXPECT_TRUE(r.engine->Due(0).empty());
}

TEST(ActionEngineTest, ExpiredActionAppliedLateIsRecordedAsApplied) {
  ActRun r(PolicyOf("limits: {time_to_live_s: 100}"));
  r.Hello();
  Action action = CenterAll();
  action.state = ActionState::kApproved;
  ASSERT_TRUE(r.Propose(action).ok());
  r.Sent(r.Id(1));
  r.Steps(200);
  ASSERT_EQ(r.At(1).state, ActionState::kExpired);
  r.Answer(r.Id(1));
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, expired, applied");
  EXPECT_EQ(r.Ask(Verb::kUndo, r.Id(1)), absl::OkStatus());
}

TEST(ActionEngineTest, LateApplicationBesideAnotherActionIsUndone) {
  ActRun r(PolicyOf("limits: {time_to_live_s: 100}"));
  r.Hello();
  Action action = CenterAll();
  action.state = ActionState::kApproved;
  ASSERT_TRUE(r.Propose(action).ok());
  r.Sent(r.Id(1));
  r.Steps(200);
  ASSERT_TRUE(r.Propose(action).ok());
  r.Deliver(r.Id(2));
  r.Answer(r.Id(1));
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
  EXPECT_THAT(r.At(1).history.back().reason, HasSubstr("was applied there"));
  ASSERT_EQ(r.count(), 3u);
  EXPECT_EQ(r.At(3).undoes, r.Id(1));
  EXPECT_EQ(r.engine->Due(0).size(), 1u);
}

TEST(ActionEngineTest, AnUndoIsAnActionOfItsOwn) {
  ActRun r(DefaultPolicy());
  r.Hello();
  Action action = CenterAll();
  action.state = ActionState::kApproved;
  ASSERT_TRUE(r.Propose(action).ok());
  EXPECT_EQ(r.Ask(Verb::kUndo, r.Id(1)).code(), absl::StatusCode::kFailedPrecondition);  // Not in force yet.
  r.Deliver(r.Id(1));
  ASSERT_TRUE(r.Ask(Verb::kUndo, r.Id(1)).ok());  // Although it is on trial.
  EXPECT_EQ(r.At(2).undoes, r.Id(1));
  EXPECT_EQ(r.At(2).value, 0);
  EXPECT_EQ(r.At(1).state, ActionState::kApplied);
  EXPECT_EQ(r.Ask(Verb::kUndo, r.Id(1)).code(), absl::StatusCode::kFailedPrecondition);  // It is on its way.
  r.Deliver(r.Id(2));
  EXPECT_EQ(r.At(1).state, ActionState::kUndone);
  EXPECT_EQ(Life(r.At(2)), "proposed, approved, sent, applied, kept");
  EXPECT_EQ(r.Ask(Verb::kUndo, r.Id(1)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(r.Ask(Verb::kUndo, r.Id(2)).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ActionEngineTest, AClipCannotBeUndone) {
  ActRun r(DefaultPolicy());
  r.Hello();
  Action clip;
  clip.kind = ActionKind::kQkClip;
  clip.value = 0.5;
  clip.scope.heads = {{1, 0}};
  clip.state = ActionState::kApproved;
  ASSERT_TRUE(r.Propose(clip).ok());
  r.Deliver(r.Id(1));
  const absl::Status refused = r.Ask(Verb::kUndo, r.Id(1));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(), "qk.clip cannot be undone");
}

TEST(ActionEngineTest, QuietHoursDelayApprovals) {
  // 1,700,000,000 s is 22:13:20 UTC.
  ActRun r(PolicyOf("{mode: enforce, quiet_hours: [\"22:00-22:20\"]}"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(100);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).state, ActionState::kProposed);
  r.Steps(299);
  EXPECT_EQ(r.At(1).state, ActionState::kProposed);
  r.Steps(1);  // 22:20:00
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
}

TEST(ActionEngineTest, PolicyKeepsToItsActionsPerRun) {
  ActRun r(PolicyOf("{mode: enforce, limits: {actions_per_run: 1, min_steps_between: 0}}"));
  r.Hello();
  for (int i = 0; i < 3; ++i) {
    AlertTransition alert = r.Alert();
    alert.key = "drift/0/" + std::to_string(i) + "/5";
    alert.strongest = {i, 0};
    alert.heads = {{i % 2, 0}};
    r.Fire(alert);
    r.Steps(50);
    if (r.count() > 0 && r.At(r.count()).state == ActionState::kApproved) r.Deliver(r.At(r.count()).id);
    r.Steps(2000);
    r.Resolve(alert);
  }
  EXPECT_EQ(r.count(), 1u);
}

TEST(ActionEngineTest, ActionsKeepTheirMinimumDistance) {
  ActRun r(
      PolicyOf("{mode: enforce, limits: {min_steps_between: 500}, rules: [{ladder: [{do: attention.center_k, scope: "
               "layers, trial_steps: 20}]}]}"));
  r.Hello();
  r.Fire(r.Alert());
  ASSERT_EQ(r.count(), 1u);
  const int64_t first = r.step;
  r.Deliver(r.Id(1));
  r.Resolve(r.Alert());
  r.Steps(200);
  AlertTransition other = r.Alert();
  other.key = "drift/0/0/150";
  other.strongest = {0, 0};
  other.heads = {{0, 0}};
  r.Fire(other);
  r.Steps(first + 499 - r.step);
  EXPECT_EQ(r.count(), 1u);
  r.Steps(1);
  ASSERT_EQ(r.count(), 2u);
  EXPECT_THAT(r.At(2).scope.layers, testing::ElementsAre(0));
}

TEST(ActionEngineTest, DisallowedActionIsProposedUntilTheTrainerAllowsIt) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello(0, 0);
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).kind, ActionKind::kCenterK);
  EXPECT_EQ(r.At(1).state, ActionState::kProposed);
  EXPECT_THAT(r.At(1).history.back().reason, HasSubstr("attach(allow={\"attention.center_k\"})"));
  r.Steps(50);
  r.Hello(0, 1u << static_cast<int>(ActionKind::kCenterK));
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
}

TEST(ActionEngineTest, DisallowedRungIsSkippedForAnAllowedOne) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello(0, 1u << static_cast<int>(ActionKind::kAttentionMode));
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).kind, ActionKind::kAttentionMode);
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
}

TEST(ActionEngineTest, ActionTheTrainerDisallowsCannotBeApproved) {
  ActRun r(DefaultPolicy());
  r.Hello(0, 0);
  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  const absl::Status refused = r.Ask(Verb::kApprove, r.Id(1));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("attach(allow={\"attention.center_k\"})"));
  EXPECT_EQ(r.At(1).state, ActionState::kProposed) << "nothing is lost by asking";
  EXPECT_THAT(r.At(1).not_allowed, HasSubstr("did not allow attention.center_k"));
  EXPECT_TRUE(r.Ask(Verb::kReject, r.Id(1)).ok());
  EXPECT_EQ(r.At(1).not_allowed, "");
}

TEST(ActionEngineTest, ProposalFollowsWhatTheNextAttemptAllows) {
  ActRun r(DefaultPolicy());
  r.Hello(0, 0);
  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  const std::string saved = r.engine->Save();
  ASSERT_TRUE(r.engine->Restore(saved));
  EXPECT_THAT(r.At(1).not_allowed, HasSubstr("did not allow")) << "a recovery keeps it";
  r.run.attempt = 2;
  r.Hello();
  EXPECT_EQ(r.At(1).not_allowed, "");
  EXPECT_EQ(r.changed.back().history.back().reason, "the trainer can apply it now");
  EXPECT_TRUE(r.Ask(Verb::kApprove, r.Id(1)).ok());
}

TEST(ActionEngineTest, NextRungFollowsATrainersRefusal) {
  ActRun r(PolicyOf("{mode: enforce, limits: {min_steps_between: 0}}"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  r.Sent(r.Id(1));
  r.Answer(r.Id(1), false, 0, "the layer has no plain attention");
  EXPECT_EQ(r.At(1).state, ActionState::kRefused);
  EXPECT_EQ(r.At(1).history.back().reason, "the layer has no plain attention");
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kAttentionMode);
}

TEST(ActionEngineTest, LateActionIsRetriedTwice) {
  ActRun r(PolicyOf("{mode: enforce, limits: {min_steps_between: 0}, rules: [{ladder: [{do: attention.center_k}]}]}"));
  r.Hello();
  r.Fire(r.Alert());
  for (size_t i = 1; i <= 3; ++i) {
    ASSERT_EQ(r.count(), i);
    r.Sent(r.Id(i));
    r.Answer(r.Id(i), false, 0, "late: the step has passed");
  }
  r.Steps(100);
  EXPECT_EQ(r.count(), 3u);
}

TEST(ActionEngineTest, APolicyThatObservesFromNowOnEndsItsProposals) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  r.engine->SetPolicy(DefaultPolicy(), "alice", r.now(), &r.changed);
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
  EXPECT_EQ(r.At(1).history.back().by, "alice");
  EXPECT_EQ(r.At(2).state, ActionState::kProposed);  // A person's.
}

TEST(ActionEngineTest, PolicySetToEnforceActsOnFiringAlert) {
  ActRun r(DefaultPolicy());
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(500);
  r.engine->SetPolicy(PolicyOf("mode: enforce"), "alice", r.now(), &r.changed);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).state, ActionState::kApproved);
}

TEST(ActionEngineTest, AdviceIsProposedAndNeverSent) {
  ActRun r(PolicyOf("mode: enforce"));
  r.Hello();
  AlertTransition alert = r.Alert("nonfinite", 5, Severity::kCritical);
  r.Fire(alert);
  ASSERT_EQ(r.count(), 1u);
  EXPECT_EQ(r.At(1).kind, ActionKind::kRollbackSuggest);
  EXPECT_EQ(r.At(1).state, ActionState::kProposed);
  EXPECT_THAT(r.At(1).expected_effect, HasSubstr("from before step 10"));
  EXPECT_TRUE(r.engine->Due(0).empty());
  EXPECT_EQ(r.Ask(Verb::kApprove, r.Id(1)).code(), absl::StatusCode::kFailedPrecondition);
  // It is in nobody's way.
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).state, ActionState::kApproved);
  r.Resolve(alert);
  EXPECT_EQ(r.At(1).state, ActionState::kExpired);
}

TEST(ActionEngineTest, RepeatedAlertProposesAgainOnlyWhenWorse) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_TRUE(r.Ask(Verb::kReject, r.Id(1)).ok());
  r.Fire(r.Alert());  // As when it goes on under repair.
  r.Steps(200);
  EXPECT_EQ(r.count(), 1u);
  r.Fire(r.Alert("drift", 2));
  r.Steps(200);
  EXPECT_EQ(r.count(), 2u);
}

TEST(ActionEngineTest, EndedRunExpiresProposalsAndMakesNone) {
  ActRun r(PolicyOf("mode: propose"));
  r.Hello();
  r.Fire(r.Alert());
  r.Steps(50);
  ASSERT_TRUE(r.Propose(CenterAll()).ok());
  ASSERT_EQ(r.count(), 2u);
  r.engine->SetEnded(true, r.now(), &r.changed);
  for (size_t i = 1; i <= 2; ++i) {
    EXPECT_EQ(r.At(i).state, ActionState::kExpired) << i;
    EXPECT_EQ(r.At(i).history.back().reason, "the run has ended") << i;
  }
  r.engine->SetPolicy(PolicyOf("{mode: propose, rules: [{ladder: [{do: lr.scale, factor: 0.5}]}]}"), "alice", r.now(),
                      &r.changed);
  r.Steps(200);
  EXPECT_EQ(r.count(), 2u);
  // It goes on, and so does the alert: what was proposed is proposed again.
  r.engine->SetEnded(false, r.now(), &r.changed);
  r.engine->SetPolicy(PolicyOf("mode: propose"), "alice", r.now(), &r.changed);
  r.Steps(1);
  ASSERT_EQ(r.count(), 3u);
  EXPECT_EQ(r.At(3).kind, r.At(1).kind);
  EXPECT_EQ(r.At(3).state, ActionState::kProposed);
}

TEST(ActionEngineTest, ProposalForResolvedAlertIsRefused) {
  ActRun r(DefaultPolicy());
  r.Hello();
  r.Fire(r.Alert());
  r.Resolve(r.Alert());
  Action action = CenterAll();
  action.alert_key = r.Alert().key;
  const absl::Status refused = r.Propose(action);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("has resolved"));
  action.alert_key.clear();
  EXPECT_TRUE(r.Propose(action).ok());
}

TEST(ActionEngineTest, ActionWithoutTrialIsKeptAndNextRungFollows) {
  ActRun r(PolicyOf("{mode: enforce, rules: [{ladder: [{do: checkpoint.now}, {do: lr.scale, factor: 0.5}]}]}"));
  r.Hello();
  r.Fire(r.Alert("logits", 4));
  ASSERT_EQ(r.count(), 1u);
  r.Deliver(r.Id(1));
  EXPECT_EQ(Life(r.At(1)), "proposed, approved, sent, applied, kept");
  ASSERT_EQ(r.count(), 2u);
  EXPECT_EQ(r.At(2).kind, ActionKind::kLrScale);
  EXPECT_EQ(r.At(2).state, ActionState::kApproved);
}

}  // namespace
}  // namespace bellwether::server
