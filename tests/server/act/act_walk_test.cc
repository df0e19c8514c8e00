// Goal: whatever comes in whatever order, one action at a time is on its way
// or on trial, no state follows another that it must not, and an engine that
// was saved and restored anywhere goes on as if it had not been.
// Method: long random walks of messages, seeds fixed; every state is compared.

#include <gmock/gmock.h>

#include <limits>
#include <map>
#include <random>
#include <set>

#include "tests/server/act/act_run.h"

namespace bellwether::server {
namespace {

using Verb = ActionRequest::Verb;
using S = ActionState;

constexpr char kPolicy[] =
    "{mode: enforce, limits: {actions_per_run: 50, min_steps_between: 5, time_to_live_s: 60},"
    " rules: [{when: {stage: 3}, ladder: [{do: checkpoint.now}, {do: qk.clip, gamma: 0.5, trial_steps: 20},"
    " {do: attention.mode, mode: hp, trial_steps: 20}]},"
    " {confirm_steps: 3, ladder: [{do: attention.center_k, scope: layers, trial_steps: 20, next: always},"
    " {do: lr.scale, trial_steps: 20}, {do: rollback.suggest}]}]}";

// One message, the same for the same numbers.
struct Message {
  uint32_t what, a, b;
};

uint32_t Below(std::mt19937* random, uint32_t end) { return static_cast<uint32_t>((*random)() % end); }

std::vector<Message> Walk(uint32_t seed, int length) {
  std::mt19937 random(seed);
  std::vector<Message> walk;
  for (int i = 0; i < length; ++i) walk.push_back({Below(&random, 100), Below(&random, 1000), Below(&random, 1000)});
  return walk;
}

struct Walker : ActRun {
  using ActRun::ActRun;

  void Sample(uint32_t a) {
    ++step;
    time_s += 1 + a % 3;
    StepSample sample;
    sample.Reset(run.layout);
    sample.attempt = run.attempt;
    sample.step = step;
    const auto sigma = sample.Add(SignalId::kWqSigma);
    for (size_t i = 0; i < sigma.size(); ++i) sigma[i] = 3 + static_cast<float>((step * (i + 1)) % 97) * 0.3f;
    if (a % 200 == 0) sigma[0] = std::numeric_limits<float>::quiet_NaN();
    sample.Add(SignalId::kLoss)[0] = 2 + static_cast<float>(a % 10) * 0.1f;
    engine->OnStep(sample, now(), &changed);
  }

  void Take(const Message& m) {
    const std::string id = Id(1 + m.a % (count() + 1));
    if (m.what < 55) {
      Sample(m.a);
    } else if (m.what < 63) {
      AlertTransition alert = Alert(m.a % 2 ? "drift" : "norm", static_cast<int32_t>(1 + m.b % 4),
                                    m.b % 3 ? Severity::kWarning : Severity::kCritical);
      alert.key += std::to_string(m.a % 3);
      m.b % 4 == 0 ? Resolve(alert) : Fire(alert);
    } else if (m.what < 75) {
      for (const Action& action : engine->Due(m.a % run.reporters)) {
        if (action.state == S::kApproved) Sent(action.id);
      }
    } else if (m.what < 87) {
      const uint32_t rank = m.a % run.reporters;
      const std::vector<Action> due = engine->Due(rank);
      Answer(due.empty() ? id : due[m.b % due.size()].id, m.b % 5 != 0, rank, m.b % 2 ? "late" : "cannot",
             due.empty() ? step : due[0].apply_at_step + (m.b % 11 == 0 ? 1 : 0));
    } else if (m.what < 90) {
      Action action = CenterAll();
      if (m.b % 3 == 0) {
        action.kind = ActionKind::kQkClip;
        action.value = 0.5;
        action.scope.heads = {{0, 1}};
      }
      if (m.b % 2 == 0) action.state = S::kApproved;
      (void)Propose(action);
    } else if (m.what < 96) {
      (void)Ask(m.b % 3 == 0 ? Verb::kApprove : m.b % 3 == 1 ? Verb::kReject : Verb::kUndo, id);
    } else if (m.what < 97) {
      const AlertTransition alert = Alert(m.a % 2 ? "drift" : "norm");
      FalseAlarm said{.key = alert.key + std::to_string(m.b % 3), .by = "ann", .reason = "known"};
      said.severity = m.b % 5 ? Severity::kWarning : Severity::kCritical;
      said.illness = IllnessOf(alert);
      said.undone = m.a % 3 == 0;
      Judge(said);
    } else if (m.what < 98) {
      if (m.b % 4 == 0) ++run.attempt;
      for (uint32_t rank = 0; rank < run.reporters; ++rank) Hello(rank, m.a % 7 == 0 ? 0 : kAllKinds);
    } else {
      engine->SetPolicy(m.b % 4 == 0 ? DefaultPolicy() : PolicyOf(kPolicy), "alice", now(), &changed);
    }
  }
};

const std::map<S, std::set<S>>& Legal() {
  static const std::map<S, std::set<S>> legal = {
      {S::kNone, {S::kProposed}},
      // Proposed again: what the job allows has changed.
      {S::kProposed, {S::kProposed, S::kApproved, S::kRefused, S::kExpired}},
      {S::kApproved, {S::kSent, S::kRefused, S::kExpired}},
      // Sent again: a new attempt began without it.
      {S::kSent, {S::kSent, S::kApplied, S::kRefused, S::kExpired}},
      {S::kApplied, {S::kHelped, S::kDidNotHelp, S::kKept, S::kUndone, S::kEscalated, S::kSent}},
      {S::kHelped, {S::kKept}},
      {S::kDidNotHelp, {S::kKept, S::kUndone, S::kEscalated, S::kSent}},
      {S::kKept, {S::kUndone, S::kSent}},
      {S::kEscalated, {S::kUndone, S::kSent}},
      {S::kUndone, {}},
      // Given up, and applied all the same.
      {S::kRefused, {S::kApplied, S::kRefused}},
      {S::kExpired, {S::kApplied, S::kExpired}},
  };
  return legal;
}

std::string Texts(const std::vector<Action>& actions) {
  std::string text;
  for (const Action& action : actions) {
    text += action.id + " " + ActionText(action) + " " + std::to_string(action.apply_at_step) + ":";
    for (const ActionChange& change : action.history) {
      text += std::string(" ") + NameOf(change.state) + "@" + std::to_string(change.step) + " " + change.by + " (" +
              change.reason + ")";
    }
    text += "\n";
  }
  return text;
}

class ActWalkTest : public testing::TestWithParam<uint32_t> {};

TEST_P(ActWalkTest, OneActionAtATimeAndOnlyLegalChanges) {
  RunDescription run = SmallRun();
  run.world = run.reporters = 1 + GetParam() % 2;
  Walker w(PolicyOf(kPolicy), run);
  for (uint32_t rank = 0; rank < run.reporters; ++rank) w.Hello(rank);
  std::map<std::string, S> last;
  std::map<std::string, size_t> seen;
  int applied = 0;
  for (const Message& message : Walk(GetParam(), 4000)) {
    w.changed.clear();
    w.Take(message);
    for (const Action& action : w.changed) {
      const ActionChange& change = action.history.back();
      EXPECT_EQ(change.state, action.state);
      // Copies without a change of state tell who it is for and when.
      if (action.history.size() == seen[action.id] && last[action.id] == action.state) continue;
      seen[action.id] = action.history.size();
      EXPECT_TRUE(Legal().at(last[action.id]).contains(action.state))
          << action.id << " " << NameOf(last[action.id]) << " -> " << NameOf(action.state);
      last[action.id] = action.state;
      applied += action.state == S::kApplied;
    }
    // On its way, on trial; what a new attempt is handed again, and what takes
    // back what went wrong, is nobody's choice.
    int busy = 0;
    for (const Action& action : w.engine->actions()) {
      const bool again = std::count_if(action.history.begin(), action.history.end(),
                                       [](const ActionChange& c) { return c.state == S::kApplied; }) > 0;
      const bool repair = !action.undoes.empty();
      const bool busy_now = action.state == S::kApproved || action.state == S::kSent || action.state == S::kApplied;
      busy += busy_now && !repair && !(again && action.state == S::kSent);
    }
    EXPECT_LE(busy, 1) << message.what << " " << message.b << "\n" << Texts(w.engine->actions());
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GE(applied, 15);
}

TEST_P(ActWalkTest, SaveAndRestoreAnywhereChangeNothing) {
  RunDescription run = SmallRun();
  run.world = run.reporters = 1 + GetParam() % 2;
  Walker straight(PolicyOf(kPolicy), run);
  Walker broken(PolicyOf(kPolicy), run);
  for (uint32_t rank = 0; rank < run.reporters; ++rank) {
    straight.Hello(rank);
    broken.Hello(rank);
  }
  for (const Message& message : Walk(GetParam(), 1200)) {
    straight.changed.clear();
    broken.changed.clear();
    const std::string saved = broken.engine->Save();
    broken.engine = std::make_unique<ActionEngine>(run, DefaultPolicy());
    ASSERT_TRUE(broken.engine->Restore(saved));
    straight.Take(message);
    broken.Take(message);
    ASSERT_EQ(Texts(straight.changed), Texts(broken.changed));
    ASSERT_EQ(straight.engine->due_version(), broken.engine->due_version());
    for (uint32_t rank = 0; rank < run.reporters; ++rank) {
      ASSERT_EQ(Texts(straight.engine->Due(rank)), Texts(broken.engine->Due(rank)));
    }
  }
  EXPECT_EQ(Texts(straight.engine->actions()), Texts(broken.engine->actions()));
  EXPECT_EQ(straight.engine->Save(), broken.engine->Save());
}

INSTANTIATE_TEST_SUITE_P(Seeds, ActWalkTest, testing::Range(1u, 13u));

TEST(ActRestoreTest, DamagedOrForeignStateIsRefused) {
  Walker w(PolicyOf(kPolicy));
  w.Hello();
  for (const Message& message : Walk(3, 300)) w.Take(message);
  const std::string saved = w.engine->Save();
  ActionEngine engine(SmallRun(), DefaultPolicy());
  for (size_t cut = 0; cut < saved.size(); cut += 1 + saved.size() / 500) {
    EXPECT_FALSE(engine.Restore(std::string_view(saved).substr(0, cut))) << cut;
    EXPECT_TRUE(engine.actions().empty());
  }
  EXPECT_FALSE(engine.Restore(saved + "x"));
  std::string other = saved;
  other[0] ^= 1;
  EXPECT_FALSE(engine.Restore(other));
  EXPECT_TRUE(engine.Restore(saved));
  EXPECT_EQ(engine.policy()->mode, w.engine->policy()->mode);
}

}  // namespace
}  // namespace bellwether::server
