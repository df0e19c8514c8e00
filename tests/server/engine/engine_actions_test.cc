// Goal: an action goes from the proposal through the log to the rank's stream
// and back, once each, over restarts of the server and of the trainer; what is
// refused stands in the audit; two ranks that do not agree have it both or not.
// Method: a Engine on a folder, trainers that say what the test tells them,
// closed and opened again in between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "server/ingest/decode.h"
#include "tests/support/ingest_trainer.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr uint32_t kCan = 1u << 2 | 1u << 4;  // attention.center_k, lr.scale

struct Job {
  uint32_t world = 1;
  uint32_t attempt = 0;
  uint32_t kinds_mask = kCan;
  bool ranks_agree = false;
};

class ActionsTrainer final : public IngestTrainer {
 public:
  ActionsTrainer(Engine* engine, const Job& job, uint32_t rank = 0, uint64_t first_seq = 0)
      : engine_(engine), job_(job) {
    v1::ClientMessage message;
    v1::Hello* hello = message.mutable_hello();
    hello->set_rank(rank);
    hello->set_ranks_agree(job.ranks_agree);
    for (int kind = 1; kind < kActionKindEnd; ++kind) {
      if ((job.kinds_mask >> kind & 1) != 0) hello->add_capabilities(static_cast<v1::ActionKind>(kind));
    }
    hello->mutable_run()->set_attempt(job.attempt);
    Greet(engine->ingest(), std::move(message), job.world, /*layers=*/2, first_seq);
  }
  ~ActionsTrainer() override { session_->Detach(); }

  void OnAction(const Action& action) override {
    absl::MutexLock lock(&mutex_);
    got_.push_back(action);
  }

  void Step(int64_t step) { PutLoss(step, job_.attempt); }
  void Answer(const std::string& id, bool applied, int64_t step, const std::string& reason = "") {
    v1::ClientMessage result;
    result.mutable_action_result()->set_id(id);
    result.mutable_action_result()->set_attempt(job_.attempt);
    result.mutable_action_result()->set_applied(applied);
    result.mutable_action_result()->set_step(step);
    result.mutable_action_result()->set_reason(reason);
    Put(std::move(result));
  }
  void Bye() {
    v1::ClientMessage bye;
    bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
    session_->Bye({0, ByeMessage{ByeMessage::Reason::kFinished}}, bye.SerializeAsString());
    got();
  }
  // Everything that was handed over so far, with all that was said applied.
  std::vector<Action> got() {
    engine_->ingest()->AwaitApplied(engine_->runs()->Find("r")->record.id);
    absl::MutexLock lock(&mutex_);
    return got_;
  }
  // Whether something is handed over though nothing more is said.
  bool AwaitHanded() {
    absl::MutexLock lock(&mutex_);
    const auto handed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !got_.empty(); };
    return mutex_.AwaitWithTimeout(absl::Condition(&handed), absl::Seconds(20));
  }
  uint64_t seq() const { return seq_; }

 private:
  Engine* const engine_;
  const Job job_;
  absl::Mutex mutex_;
  std::vector<Action> got_ ABSL_GUARDED_BY(mutex_);
};

// The system's, set ahead by what a test does not wait for.
class ClockAhead final : public Clock {
 public:
  int64_t UnixNanos() const override { return System()->UnixNanos() + ahead_ns_; }
  int64_t MonotonicNanos() const override { return System()->MonotonicNanos(); }
  void SetAhead(int64_t ns) { ahead_ns_ = ns; }

 private:
  std::atomic<int64_t> ahead_ns_ = 0;
};

class EngineActionsTest : public testing::Test {
 protected:
  EngineActionsTest() { Open(); }

  // Returns once the log is applied, or before.
  void Open(bool applied = true) {
    engine_.reset();
    Engine::Options options;
    options.storage_path = directory_.path() + "/data";
    options.policy = policy_;
    options.apply_ms_max = applied ? 60'000 : 0;
    auto engine = Engine::Open(options, &counters_, &clock_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  // A trainer makes a step and is gone; the seq that it came to.
  uint64_t ComeAndGo() {
    ActionsTrainer trainer(engine_.get(), Job{});
    trainer.Step(1);
    trainer.got();
    return trainer.seq();
  }
  RunId run() const { return engine_->runs()->Find("r")->record.id; }
  absl::StatusOr<Action> Ask(ActionRequest request, const std::string& malformed = "") {
    if (request.by.empty()) request.by = "alice";
    return engine_->control()->Act(run(), request, malformed);
  }
  static ActionRequest Centring(bool approve) {
    ActionRequest request;
    request.action.kind = ActionKind::kCenterK;
    request.action.value = 1;
    if (approve) request.action.state = ActionState::kApproved;
    return request;
  }
  absl::StatusOr<Action> Decide(ActionRequest::Verb verb, const std::string& id, const std::string& by = "alice") {
    return Ask({.verb = verb, .id = id, .by = by});
  }
  std::vector<Action> Actions() {
    engine_->ingest()->AwaitApplied(run());
    const auto actions = engine_->actions()->List(run());
    EXPECT_TRUE(actions.ok()) << actions.status();
    return actions.ok() ? *actions : std::vector<Action>();
  }
  std::vector<AuditEntry> Audit() {
    const auto audit = engine_->actions()->Audit(run());
    EXPECT_TRUE(audit.ok()) << audit.status();
    return audit.ok() ? *audit : std::vector<AuditEntry>();
  }
  static std::vector<ActionState> States(const Action& action) {
    std::vector<ActionState> states;
    for (const ActionChange& change : action.history) states.push_back(change.state);
    return states;
  }
  double results(const std::string& result) {
    return counters_.counter("bellwether_action_results_total", {{"result", result}})->value();
  }

  TempDirectory directory_;
  Counters counters_;
  ClockAhead clock_;
  PolicyPtr policy_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineActionsTest, ProposedApprovedSentApplied) {
  ActionsTrainer trainer(engine_.get(), Job{});
  trainer.Step(1);
  const auto proposed = Ask(Centring(false));
  ASSERT_TRUE(proposed.ok()) << proposed.status();
  EXPECT_EQ(proposed->state, ActionState::kProposed);
  EXPECT_THAT(trainer.got(), IsEmpty());
  const auto approved = Decide(ActionRequest::Verb::kApprove, proposed->id, "bob");
  ASSERT_TRUE(approved.ok()) << approved.status();
  EXPECT_EQ(approved->state, ActionState::kApproved);
  const std::vector<Action> got = trainer.got();
  ASSERT_THAT(got, SizeIs(1));
  EXPECT_EQ(got[0].id, proposed->id);
  EXPECT_EQ(got[0].kind, ActionKind::kCenterK);
  EXPECT_THAT(States(Actions()[0]), ElementsAre(ActionState::kProposed, ActionState::kApproved, ActionState::kSent));
  trainer.Answer(proposed->id, true, 2);
  EXPECT_EQ(Actions()[0].state, ActionState::kApplied);
  EXPECT_EQ(Actions()[0].history[1].by, "bob");
  EXPECT_EQ(results("taken"), 1);
  EXPECT_THAT(trainer.got(), SizeIs(1));  // Handed once.
  const Labels labels = {{"kind", "attention.center_k"}, {"result", "applied"}};
  EXPECT_EQ(counters_.counter("bellwether_actions_total", labels)->value(), 1);
}

TEST_F(EngineActionsTest, WrongAnswersAreCountedAndHarmless) {
  ActionsTrainer trainer(engine_.get(), Job{});
  trainer.Step(1);
  const auto action = Ask(Centring(true));
  ASSERT_TRUE(action.ok()) << action.status();
  trainer.got();
  trainer.Answer("75757575-99", true, 2);
  trainer.Answer(action->id, true, 2);
  trainer.Answer(action->id, false, 3, "changed its mind");
  const std::vector<Action> actions = Actions();
  EXPECT_EQ(actions[0].state, ActionState::kApplied);
  EXPECT_EQ(results("unknown"), 1);
  EXPECT_EQ(results("taken"), 1);
  EXPECT_EQ(results("repeated"), 1);
}

// Between any two words the server is closed and opened again, or is killed
// before it could save: the run's history is told once.
TEST_F(EngineActionsTest, RestartAtAnyPointReportsEachChangeOnce) {
  const uint64_t seq = ComeAndGo();
  const auto proposed = Ask(Centring(false));
  ASSERT_TRUE(proposed.ok()) << proposed.status();
  Open();
  EXPECT_THAT(States(Actions()[0]), ElementsAre(ActionState::kProposed));
  const auto approved = Decide(ActionRequest::Verb::kApprove, proposed->id);
  ASSERT_TRUE(approved.ok()) << approved.status();
  Open();
  for (int i = 0; i < 2; ++i) {  // Handed again after each Hello, until it is answered.
    ActionsTrainer trainer(engine_.get(), Job{}, 0, seq);
    const std::vector<Action> got = trainer.got();
    ASSERT_THAT(got, SizeIs(1)) << i;
    EXPECT_EQ(got[0].id, proposed->id);
    if (i == 0) Open();
  }
  EXPECT_THAT(States(Actions()[0]), ElementsAre(ActionState::kProposed, ActionState::kApproved, ActionState::kSent));
  ActionsTrainer trainer(engine_.get(), Job{}, 0, seq);
  EXPECT_THAT(trainer.got(), SizeIs(1));
  trainer.Answer(proposed->id, true, 2);
  EXPECT_EQ(Actions()[0].state, ActionState::kApplied);
  Open();
  EXPECT_THAT(States(Actions()[0]),
              ElementsAre(ActionState::kProposed, ActionState::kApproved, ActionState::kSent, ActionState::kApplied));
  ActionsTrainer after(engine_.get(), Job{}, 0, trainer.seq());
  EXPECT_THAT(after.got(), IsEmpty());
}

// Neither a word of his nor one of anybody else comes after his Hello.
TEST_F(EngineActionsTest, TrainerDuringReplayIsHandedDueActions) {
  const uint64_t seq = ComeAndGo();
  ASSERT_TRUE(Ask(Centring(true)).ok());
  for (int i = 0; i < 20; ++i) {
    Open(false);
    ActionsTrainer trainer(engine_.get(), Job{}, 0, seq);
    ASSERT_TRUE(trainer.AwaitHanded()) << i;
  }
}

TEST_F(EngineActionsTest, NewAttemptIsHandedActionsInForce) {
  std::string id;
  {
    ActionsTrainer trainer(engine_.get(), Job{});
    trainer.Step(1);
    id = Ask(Centring(true))->id;
    trainer.got();
    trainer.Answer(id, true, 2);
    ASSERT_EQ(Actions()[0].state, ActionState::kApplied);
  }
  ActionsTrainer again(engine_.get(), Job{.attempt = 1}, 0, 10);
  const std::vector<Action> got = again.got();
  ASSERT_THAT(got, SizeIs(1));
  EXPECT_EQ(got[0].id, id);
  EXPECT_EQ(got[0].attempt, 1u);
  again.Answer(id, true, 0);
  EXPECT_EQ(Actions()[0].state, ActionState::kApplied);
}

// Whichever of the two finds a restarted server first.
TEST_F(EngineActionsTest, OldAttemptDoesNotFenceNextOne) {
  ActionsTrainer now(engine_.get(), Job{.attempt = 1});
  now.Step(1);
  now.got();
  const auto old = [&] {
    HelloMessage hello;
    hello.run = engine_->runs()->Get(run())->record.description;
    hello.run.attempt = 0;
    return engine_->ingest()->Open(hello, "", &now).status();
  };
  EXPECT_EQ(old().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(old().message()), HasSubstr("hello.run.attempt = 0: attempt 1 of run r has begun"));
  now.Step(2);  // Not fenced.
}

TEST_F(EngineActionsTest, RanksThatDisagreeApplyAllOrNone) {
  const Job job{.world = 2};
  ActionsTrainer first(engine_.get(), job, 0), second(engine_.get(), job, 1);
  for (int64_t step = 1; step <= 3; ++step) {
    first.Step(step);
    second.Step(step);
  }
  first.got();
  const auto both = Ask(Centring(true));
  ASSERT_TRUE(both.ok()) << both.status();
  ASSERT_THAT(first.got(), SizeIs(1));
  ASSERT_THAT(second.got(), SizeIs(1));
  const int64_t at = first.got()[0].apply_at_step;
  EXPECT_GT(at, 3);
  EXPECT_EQ(second.got()[0].apply_at_step, at);
  first.Answer(both->id, true, at);
  EXPECT_EQ(Actions()[0].state, ActionState::kSent);
  second.Answer(both->id, false, at + 5, "late: at step 8");
  const std::vector<Action> actions = Actions();
  EXPECT_EQ(actions[0].state, ActionState::kRefused);
  EXPECT_THAT(actions[0].history.back().reason, HasSubstr("partial"));
  // The rank that applied it takes it back; the other is told nothing.
  ASSERT_THAT(actions, SizeIs(2));
  EXPECT_EQ(actions[1].undoes, both->id);
  ASSERT_THAT(first.got(), SizeIs(2));
  EXPECT_EQ(first.got()[1].undoes, both->id);
  EXPECT_THAT(second.got(), SizeIs(1));
  first.Answer(actions[1].id, true, at + 9);
  EXPECT_EQ(Actions()[0].state, ActionState::kRefused);
  EXPECT_EQ(Actions()[1].state, ActionState::kKept);
}

TEST_F(EngineActionsTest, AgreeingRanksAreAskedThroughFirstRank) {
  const Job job{.world = 2, .ranks_agree = true};
  ActionsTrainer first(engine_.get(), job, 0), second(engine_.get(), job, 1);
  first.Step(1);
  second.Step(1);
  first.got();
  const auto action = Ask(Centring(true));
  ASSERT_TRUE(action.ok()) << action.status();
  EXPECT_THAT(first.got(), SizeIs(1));
  EXPECT_THAT(second.got(), IsEmpty());
  first.Answer(action->id, true, 2);
  EXPECT_EQ(Actions()[0].state, ActionState::kApplied);
}

TEST_F(EngineActionsTest, ActionTheJobForbidsIsRefusedAtOnce) {
  ActionsTrainer trainer(engine_.get(), Job{.kinds_mask = 0});
  trainer.Step(1);
  trainer.got();
  const auto action = Ask(Centring(true));
  EXPECT_EQ(action.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(action.status().message()), HasSubstr("allow"));
  EXPECT_THAT(trainer.got(), IsEmpty());
  EXPECT_THAT(Actions(), IsEmpty());
}

TEST_F(EngineActionsTest, AuditKeepsRefusedRequestsOverRestart) {
  uint64_t seq = 0;
  {
    ActionsTrainer trainer(engine_.get(), Job{});
    trainer.Step(7);
    trainer.got();
    seq = trainer.seq();
  }
  const auto policy =
      engine_->control()->SetPolicy(run(), "mode: propose\napprovers: [\"alice\", \"oncall-*\"]\n", "root", "");
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_TRUE(policy->own);
  const auto proposed = Ask({.action = Centring(false).action, .by = "mallory"});
  ASSERT_TRUE(proposed.ok()) << proposed.status();  // Asking is free.
  const auto code = [](const auto& result) { return result.status().code(); };
  EXPECT_EQ(code(Decide(ActionRequest::Verb::kApprove, proposed->id, "mallory")), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(code(Decide(ActionRequest::Verb::kApprove, "75757575-9")), absl::StatusCode::kNotFound);
  ActionRequest outside = Centring(false);
  outside.action.scope.layers = {2};
  EXPECT_EQ(code(Ask(outside)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Ask({.by = "eve"}, "action.kind 77: must be 1..9")), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(engine_->control()->SetPolicy(run(), "mode: enforce\n", "mallory", "")),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(code(engine_->control()->SetPolicy(run(), "mode: whatever\n", "alice", "")),
            absl::StatusCode::kInvalidArgument);
  const auto approved = Decide(ActionRequest::Verb::kApprove, proposed->id, "oncall-3");
  ASSERT_TRUE(approved.ok()) << approved.status();
  // Replayed.
  EXPECT_EQ(code(Decide(ActionRequest::Verb::kApprove, proposed->id)), absl::StatusCode::kFailedPrecondition);
  const auto described = [this] {
    std::vector<std::string> texts;
    for (const AuditEntry& entry : Audit()) {
      EXPECT_GT(entry.time_unix_ns, 0);
      EXPECT_EQ(entry.step, 7);
      texts.push_back(
          absl::StrCat(entry.by, " ", entry.what, " ", entry.action_id, entry.refused.empty() ? "" : " refused"));
    }
    return texts;
  };
  const std::string id = proposed->id;
  const std::vector<std::string> expected = {"root set_policy ",
                                             absl::StrCat("mallory approve ", id, " refused"),
                                             "alice approve 75757575-9 refused",
                                             "alice propose  refused",
                                             "eve propose  refused",
                                             "mallory set_policy  refused",
                                             "alice set_policy  refused",
                                             absl::StrCat("alice approve ", id, " refused")};
  EXPECT_EQ(described(), expected);
  Open();
  EXPECT_EQ(described(), expected);
  EXPECT_EQ(engine_->control()->GetPolicy(run())->mode, 2);
  EXPECT_TRUE(engine_->control()->GetPolicy(run())->own);
  ActionsTrainer trainer(engine_.get(), Job{}, 0, seq);
  ASSERT_THAT(trainer.got(), SizeIs(1));
  EXPECT_EQ(trainer.got()[0].id, id);
}

TEST_F(EngineActionsTest, ServerPolicyReachesRunsWithoutOwnPolicy) {
  policy_ = *ParsePolicy("mode: propose\n", "test");
  Open();
  ActionsTrainer trainer(engine_.get(), Job{});
  trainer.Step(1);
  trainer.got();
  EXPECT_EQ(engine_->control()->GetPolicy(run())->mode, 2);
  EXPECT_FALSE(engine_->control()->GetPolicy(run())->own);
  engine_->SetPolicy(*ParsePolicy("mode: enforce\n", "test"));
  while (engine_->control()->GetPolicy(run())->mode != 3) {  // The next tick spreads it.
  }
  ASSERT_TRUE(engine_->control()->SetPolicy(run(), "mode: observe\n", "alice", "").ok());
  engine_->SetPolicy(policy_);
  trainer.got();
  EXPECT_EQ(engine_->control()->GetPolicy(run())->mode, 1);
  ASSERT_TRUE(engine_->control()->SetPolicy(run(), "", "alice", "").ok());  // The server's again.
  EXPECT_EQ(engine_->control()->GetPolicy(run())->mode, 2);
  EXPECT_FALSE(engine_->control()->GetPolicy(run())->own);
}

TEST_F(EngineActionsTest, UnapprovedProposalsExpire) {
  ActionsTrainer trainer(engine_.get(), Job{});
  trainer.Step(1);
  trainer.got();
  ActionRequest request = Centring(false);
  constexpr int64_t kHourNs = int64_t{3600} * 1'000'000'000;
  request.action.expires_unix_ns = clock_.UnixNanos() + kHourNs;
  const auto proposed = Ask(request);
  ASSERT_TRUE(proposed.ok()) << proposed.status();
  clock_.SetAhead(kHourNs + 2'000'000);  // By the time of the run's messages.
  trainer.Step(2);
  EXPECT_EQ(Actions()[0].state, ActionState::kExpired);
  const auto late = Decide(ActionRequest::Verb::kApprove, proposed->id);
  EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Audit(), SizeIs(1));
  EXPECT_THAT(trainer.got(), IsEmpty());
}

TEST_F(EngineActionsTest, EndOfRunEndsProposalsOverRestarts) {
  uint64_t seq = 0;
  for (const bool again : {false, true}) {
    const Job job{.attempt = again ? 1u : 0u};
    {
      ActionsTrainer trainer(engine_.get(), job, 0, seq);
      trainer.Step(again ? 2 : 1);
      trainer.got();
      ASSERT_TRUE(Ask(Centring(false)).ok());
      EXPECT_EQ(Actions().back().state, ActionState::kProposed);
      seq = trainer.seq();
      if (!again) trainer.Bye();
    }
    if (again) {
      Open();
      ActionsTrainer(engine_.get(), job, 0, seq).Bye();
    }
    const auto ended = Actions();
    EXPECT_EQ(ended.back().state, ActionState::kExpired);
    EXPECT_EQ(ended.back().history.back().reason, "the run has ended");
    Open();
    const auto reopened = Actions();
    ASSERT_EQ(reopened.size(), ended.size());
    EXPECT_EQ(reopened.back().history, ended.back().history);
    EXPECT_EQ(Decide(ActionRequest::Verb::kApprove, ended.back().id).status().code(),
              absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(Actions().back().history, ended.back().history);
  }
}

TEST_F(EngineActionsTest, EndedRunRefusesActions) {
  {
    ActionsTrainer trainer(engine_.get(), Job{});
    trainer.Step(1);
    trainer.got();
    trainer.Bye();
  }
  const auto refused = Ask(Centring(false));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("has ended"));
  EXPECT_THAT(Audit(), SizeIs(1));
  // Looking at its policy leaves it as it is shown.
  EXPECT_EQ(engine_->control()->GetPolicy(run())->mode, 1);
  EXPECT_TRUE(engine_->runs()->Get(run())->record.ended);
}

class Elsewhere final : public AlwaysHere {
 public:
  bool Serves(RunId) const override { return false; }
};

// Between the look-up of a run and a request of it another server may take it.
TEST(RunControllerTest, RunThatMovedIsNotCalledUnknown) {
  for (const bool here : {true, false}) {
    const TempDirectory directory;
    Counters counters;
    Elsewhere elsewhere;
    Engine::Options options;
    options.storage_path = directory.path() + "/data";
    options.ownership = here ? nullptr : &elsewhere;
    const auto engine = Engine::Open(options, &counters, Clock::System());
    ASSERT_TRUE(engine.ok()) << engine.status();
    RunControl& control = *(*engine)->control();
    const absl::StatusCode code = here ? absl::StatusCode::kNotFound : absl::StatusCode::kUnavailable;
    EXPECT_EQ(control.Annotate(7, RunEvent()).code(), code);
    EXPECT_EQ(control.Export(7, [](std::string_view) { return true; }).code(), code);
    EXPECT_EQ(control.GetPolicy(7).status().code(), code);
    EXPECT_EQ(control.SetPolicy(7, "mode: off", "ada", "").status().code(), code);
  }
}

}  // namespace
}  // namespace bellwether::server
