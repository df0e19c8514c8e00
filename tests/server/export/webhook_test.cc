// Goal: a receiver hears every change in Alertmanager's words, once per run and
// moment, again after a failure, and never holds up who posts a transition.
// Method: a real receiver on loopback that records bodies and can refuse,
// stall or be absent; waits are on conditions with a deadline.

#include "server/export/webhook.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/export/receiver.h"
#include "tests/server/export/stranger.h"
#include "tests/support/memory_database.h"
#include "tests/support/synthetic_runs.h"

namespace bellwether::server {
namespace {

constexpr auto kPatience = Receiver::kPatience;

class WebhookTest : public ::testing::Test {
 protected:
  std::unique_ptr<Webhook> Start(WebhookOptions options) {
    options.group_wait_ns = 1'000'000;
    options.backoff_first_ns = 2'000'000;
    options.backoff_max_ns = 10'000'000;
    options.stop_wait_ns = 60'000'000'000;  // However late its thread is: what is due is delivered.
    if (options.url.empty()) options.url = receiver_.url();
    options.links = {.page = "http://watch:7071/", .runbooks = "http://watch:7071/#/runbook"};
    return *Webhook::Start(options, &alerts_, &actions_, &counters_);
  }
  AlertTransition Post(const SyntheticRun& run, AlertState state, Severity severity = Severity::kWarning) {
    AlertTransition alert = MakeAlert(run, severity, "drift", 1'700'000'000'123'000'000);
    alert.state = state;
    alert.k = k_++;
    EXPECT_TRUE(alerts_.Post(alert).ok());
    return alert;
  }
  // What the policy proposes for it; then it changes once more.
  Action Propose(const AlertTransition& alert, const std::string& id) {
    Action action;
    action.id = id;
    action.alert_key = alert.key;
    action.asked_by = kPolicyName;
    Change(alert.run, ActionState::kProposed, &action);
    return action;
  }
  void Change(RunId run, ActionState state, Action* action) {
    action->state = state;
    action->history.push_back({.state = state});
    EXPECT_TRUE(actions_.Post(run, *action).ok());
  }
  double Count(const char* result) {
    return counters_.counter("bellwether_notifications_total", {{"channel", "webhook"}, {"result", result}})->value();
  }
  void AwaitCount(const char* result, double value) {
    const absl::Time deadline = absl::Now() + kPatience;
    while (Count(result) < value && absl::Now() < deadline) std::this_thread::yield();
    EXPECT_EQ(Count(result), value) << result;
  }
  // So many were delivered, and that is in the database, too: the time that it took is observed after both.
  void AwaitNoted(uint64_t value) {
    const Histogram& taken = *counters_.histogram("bellwether_notification_seconds", {{"channel", "webhook"}});
    const auto noted = [&taken] {
      const std::vector<uint64_t> counts = taken.counts();
      return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
    };
    const absl::Time deadline = absl::Now() + kPatience;
    while (noted() < value && absl::Now() < deadline) std::this_thread::yield();
    EXPECT_EQ(noted(), value);
  }

  const SyntheticRun run_{.name = "llama/7b", .failing = {1, 0}, .stage = 1};
  Receiver receiver_{"/hook"};
  MemoryDatabase database_;
  AlertStore alerts_{&database_};
  ActionStore actions_{&database_};
  Counters counters_;
  uint32_t k_ = 0;
};

TEST_F(WebhookTest, RunThatDoesNotNotifyIsNotSent) {
  auto webhook = Start({.notifies = [](RunId run) { return run != 7; }});
  const SyntheticRun quiet{.id = 7, .name = "quiet", .failing = {1, 0}, .stage = 1};
  Post(quiet, AlertState::kFiring, Severity::kCritical);
  Post(quiet, AlertState::kResolved, Severity::kCritical);
  webhook->CatchUp(0, std::numeric_limits<RunId>::max());
  Post(run_, AlertState::kFiring);
  EXPECT_EQ(receiver_.Await(1)[0]["groupLabels"]["run"], run_.name);
  webhook->Stop();
  EXPECT_EQ(Count("delivered"), 1);
}

TEST_F(WebhookTest, ImportedRunIsMarkedAndALiveOneIsNot) {
  auto webhook = Start({.imported = [](RunId run) { return run == 7; }});
  const SyntheticRun recording{.id = 7, .name = "recording", .failing = {1, 0}, .stage = 1};
  Post(recording, AlertState::kFiring);
  const nlohmann::json marked = receiver_.Await(1)[0]["alerts"][0];
  EXPECT_EQ(marked["labels"]["imported"], "true");
  EXPECT_THAT(marked["annotations"]["summary"].get<std::string>(), ::testing::HasSubstr("(imported) "));
  Post(run_, AlertState::kFiring);
  const nlohmann::json live = receiver_.Await(2)[1]["alerts"][0];
  EXPECT_FALSE(live["labels"].contains("imported"));
  EXPECT_THAT(live["annotations"]["summary"].get<std::string>(), ::testing::Not(::testing::HasSubstr("imported")));
}

TEST_F(WebhookTest, FiringAndResolvedAreAlertmanagersVersionFour) {
  auto webhook = Start({});
  Post(run_, AlertState::kFiring);
  nlohmann::json body = receiver_.Await(1)[0];
  EXPECT_EQ(body["version"], "4");
  EXPECT_EQ(body["status"], "firing");
  EXPECT_EQ(body["receiver"], "webhook");
  EXPECT_EQ(body["groupKey"], "{}:{run=\"llama/7b\"}");
  EXPECT_EQ(body["groupLabels"], nlohmann::json({{"run", "llama/7b"}}));
  EXPECT_EQ(body["truncatedAlerts"], 0);
  EXPECT_EQ(body["externalURL"], "http://watch:7071/");
  ASSERT_EQ(body["alerts"].size(), 1u);
  const nlohmann::json alert = body["alerts"][0];
  EXPECT_EQ(alert["labels"], nlohmann::json({{"alertname", "BellwetherDriftGrowing"},
                                             {"run", "llama/7b"},
                                             {"rule", "drift"},
                                             {"severity", "warning"},
                                             {"layer", "1"},
                                             {"head", "0"}}));
  EXPECT_EQ(body["commonLabels"], alert["labels"]);
  EXPECT_EQ(alert["status"], "firing");
  EXPECT_EQ(alert["startsAt"], "2023-11-14T22:13:20.123Z");
  EXPECT_EQ(alert["endsAt"], "0001-01-01T00:00:00Z");
  EXPECT_THAT(
      alert["generatorURL"].get<std::string>(),
      ::testing::StartsWith("http://watch:7071/#/run/llama%2F7b?step=4000&layer=1&head=0&alert=drift%2F1%2F0%2F"));
  EXPECT_THAT(alert["annotations"]["alert"].get<std::string>(), ::testing::StartsWith("drift/1/0/"));
  EXPECT_THAT(alert["annotations"]["evidence"].get<std::string>(), ::testing::HasSubstr(" (limit 4) since step "));
  EXPECT_THAT(alert["annotations"]["eta"].get<std::string>(), ::testing::HasSubstr("1080 steps"));
  EXPECT_THAT(alert["annotations"]["siblings"].get<std::string>(), ::testing::HasSubstr("12 earlier healthy runs"));

  Post(run_, AlertState::kResolved);
  body = receiver_.Await(2)[1];
  EXPECT_EQ(body["status"], "resolved");
  EXPECT_EQ(body["alerts"][0]["status"], "resolved");
  EXPECT_EQ(body["alerts"][0]["fingerprint"], alert["fingerprint"]);
  AwaitCount("delivered", 2);
}

TEST_F(WebhookTest, ATemplateIsTheBody) {
  auto webhook =
      Start({.body = *BodyTemplate::Parse(R"({"text": "{{headline}}", "all": {"{{alerts}}": "{{rule}}"}})")});
  Post(run_, AlertState::kFiring);
  const nlohmann::json body = receiver_.Await(1)[0];
  EXPECT_THAT(body["text"].get<std::string>(), ::testing::StartsWith("WARNING llama/7b: drift in layer 1 head 0"));
  EXPECT_EQ(body["all"], nlohmann::json({"drift"}));
}

TEST_F(WebhookTest, AMessageCarriesWhatHasChangedAndCountsOthers) {
  auto webhook = Start({});
  SyntheticRun other = run_;
  other.failing = {3, 3};
  Post(run_, AlertState::kFiring);
  EXPECT_EQ(receiver_.Await(1)[0]["otherAlertsFiring"], 0);
  Post(other, AlertState::kFiring);
  nlohmann::json body = receiver_.Await(2)[1];
  ASSERT_EQ(body["alerts"].size(), 1u) << "the first one has not changed";
  EXPECT_EQ(body["alerts"][0]["labels"]["layer"], "3");
  EXPECT_EQ(body["otherAlertsFiring"], 1);
  Post(other, AlertState::kResolved);
  body = receiver_.Await(3)[2];
  EXPECT_EQ(body["status"], "firing") << "the run has another alert";
  ASSERT_EQ(body["alerts"].size(), 1u);
  EXPECT_EQ(body["alerts"][0]["status"], "resolved");
  EXPECT_EQ(body["otherAlertsFiring"], 1);
}

TEST_F(WebhookTest, NewerValuesAloneAreNoMessage) {
  auto webhook = Start({});
  AlertTransition alert = Post(run_, AlertState::kFiring);
  receiver_.Await(1);
  alert.k = k_++;
  alert.step += 100;
  alert.time_unix_ns += 100'000'000'000;
  alert.evidence.at(0).value *= 3;
  ASSERT_TRUE(alerts_.Post(alert).ok());
  // What comes of the run next shows that nothing came before it.
  SyntheticRun other = run_;
  other.failing = {3, 3};
  Post(other, AlertState::kFiring);
  nlohmann::json body = receiver_.Await(2)[1];
  ASSERT_EQ(body["alerts"].size(), 1u);
  EXPECT_EQ(body["alerts"][0]["labels"]["layer"], "3");
  alert.k = k_++;
  alert.severity = Severity::kCritical;
  ASSERT_TRUE(alerts_.Post(alert).ok());
  body = receiver_.Await(3)[2];
  ASSERT_EQ(body["alerts"].size(), 1u);
  EXPECT_EQ(body["alerts"][0]["labels"]["severity"], "critical");
  EXPECT_EQ(body["alerts"][0]["annotations"]["step"], absl::StrCat(alert.step)) << "with the newest values";
}

TEST_F(WebhookTest, ChangesWhileSilencedAreToldWithTheNextChange) {
  auto webhook = Start({});
  const AlertTransition quiet = Post(run_, AlertState::kFiring);
  receiver_.Await(1);
  AwaitCount("delivered", 1);
  const auto silence = [&](int64_t until) {
    ASSERT_TRUE(alerts_.Annotate(quiet.run, quiet.key, {.silenced_until_unix_ns = until}).ok());
  };
  silence(Clock::System()->UnixNanos() + 60'000'000'000);
  SyntheticRun other = run_;
  other.failing = {3, 3};
  Post(run_, AlertState::kFiring, Severity::kCritical);
  Post(other, AlertState::kFiring);
  EXPECT_EQ(receiver_.Await(2)[1]["alerts"].size(), 1u);
  AwaitCount("delivered", 2);
  silence(1);
  Post(other, AlertState::kResolved);
  const nlohmann::json body = receiver_.Await(3)[2];
  ASSERT_EQ(body["alerts"].size(), 2u);
  EXPECT_EQ(body["alerts"][0]["labels"]["severity"], "critical");
}

TEST_F(WebhookTest, AnAlertHasItsSentenceDeedAndRunbook) {
  auto webhook = Start({.advice = [](const std::vector<Action>&, const AlertTransition&) {
    return std::string(
        "Centre the keys (attention.center_k). It costs 1 %. Proposed: attention.center_k of layer 1; "
        "`bellwether action approve llama/7b ab-1` applies it; cost: 1 %.");
  }});
  Post(run_, AlertState::kFiring, Severity::kCritical);
  const nlohmann::json told = receiver_.Await(1)[0]["alerts"][0]["annotations"];
  EXPECT_THAT(told["summary"].get<std::string>(), ::testing::StartsWith("CRITICAL llama/7b: drift in layer 1 head 0"));
  const std::string page = told["page_url"].get<std::string>();
  EXPECT_EQ(told["do"], "Approve \"centre the keys\" (attention.center_k of layer 1): " + page +
                            " or `bellwether action approve llama/7b ab-1`.");
  EXPECT_THAT(told["description"].get<std::string>(),
              ::testing::ContainsRegex("^Do: Approve .*\nWhy: drift ratio [0-9.]+ \\(limit 4\\) since step [0-9,]+; "));
  EXPECT_EQ(told["runbook_url"], "http://watch:7071/#/runbook/bellwetherdriftgrowing");
}

TEST_F(WebhookTest, TriesAgainAndTellsTheNewestStateOnly) {
  receiver_.Refuse(3);
  auto webhook = Start({});
  Post(run_, AlertState::kFiring);
  receiver_.Await(4);
  AwaitCount("delivered", 1);
  EXPECT_EQ(Count("retried"), 3);
  EXPECT_EQ(Count("failed"), 0);
}

TEST_F(WebhookTest, GivesUpAfterAttemptsMax) {
  receiver_.Refuse(100);
  auto webhook = Start({.attempts_max = 3});
  Post(run_, AlertState::kFiring);
  AwaitCount("failed", 1);
  EXPECT_EQ(Count("retried"), 2);
  EXPECT_EQ(receiver_.Await(3).size(), 3u);
}

TEST_F(WebhookTest, StalledReceiverBlocksNoPostAndRunsMaxHolds) {
  receiver_.Stall(true);
  auto webhook = Start({.runs_max = 2, .post = {.timeout_ns = 60'000'000'000}});  // So long it is stuck.
  Post(run_, AlertState::kFiring);
  receiver_.Await(1);  // In the receiver's hands, and stuck there.
  const auto start = std::chrono::steady_clock::now();
  for (RunId id = 10; id < 13; ++id) {
    SyntheticRun run = run_;
    run.id = id;
    Post(run, AlertState::kFiring);
    Post(run, AlertState::kFiring);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_EQ(Count("refused"), 2);  // Both of the third run; two runs wait.
  receiver_.Stall(false);
  EXPECT_GE(receiver_.Await(3).size(), 3u);
}

TEST_F(WebhookTest, SilencedAndMilderAlertsAreNotSent) {
  auto webhook = Start({.severity_min = Severity::kCritical});
  Post(run_, AlertState::kFiring, Severity::kWarning);
  SyntheticRun other = run_;
  other.id = 2;
  other.name = "other";
  Post(other, AlertState::kFiring, Severity::kCritical);
  EXPECT_EQ(receiver_.Await(1)[0]["groupLabels"]["run"], "other");
  ASSERT_TRUE(alerts_
                  .Annotate(2, MakeAlert(other, Severity::kCritical, "drift", 0).key,
                            {.silenced_until_unix_ns = Clock::System()->UnixNanos() + 60'000'000'000})
                  .ok());
  Post(other, AlertState::kFiring, Severity::kCritical);
  webhook->Stop();
  EXPECT_EQ(receiver_.Await(1).size(), 1u);
}

TEST_F(WebhookTest, FalseAlarmIsNotSentUntilItIsWorse) {
  auto webhook = Start({});
  const AlertTransition alert = Post(run_, AlertState::kFiring, Severity::kWarning);
  receiver_.Await(1);
  AwaitCount("delivered", 1);
  FalseAlarm said{.by = "ann", .reason = "known", .severity = Severity::kWarning};
  said.illness = IllnessOf(alert);
  ASSERT_TRUE(alerts_.Annotate(alert.run, alert.key, {.false_alarms = {said}}).ok());
  Post(run_, AlertState::kFiring, Severity::kWarning);
  Post(run_, AlertState::kResolved, Severity::kWarning);
  AlertTransition back = alert;
  back.id = 0;
  back.key = "z9";
  ASSERT_TRUE(alerts_.Post(back).ok());
  SyntheticRun other = run_;
  other.id = 2;
  other.name = "other";
  Post(other, AlertState::kFiring, Severity::kWarning);
  EXPECT_EQ(receiver_.Await(2)[1]["groupLabels"]["run"], "other") << "the same illness of another run is another one";
  ++back.k;
  back.severity = Severity::kCritical;
  ASSERT_TRUE(alerts_.Post(back).ok());
  EXPECT_EQ(receiver_.Await(3)[2]["alerts"][0]["labels"]["severity"], "critical");
  webhook->Stop();
}

std::string AdviceWithIds(const std::vector<Action>& actions, const AlertTransition& alert) {
  std::string advice = alert.advice;
  for (const Action& action : actions) {
    if (action.alert_key == alert.key && action.state == ActionState::kProposed) advice += " Proposed: " + action.id;
  }
  return advice;
}

TEST_F(WebhookTest, LaterProposalIsSentOnceWithItsAlert) {
  auto webhook = Start({.advice = AdviceWithIds});
  const AlertTransition alert = Post(run_, AlertState::kFiring);
  receiver_.Await(1);
  AwaitCount("delivered", 1);
  Action action = Propose(alert, "a-1");
  const nlohmann::json body = receiver_.Await(2)[1];
  EXPECT_EQ(body["alerts"][0]["annotations"]["advice"], alert.advice + " Proposed: a-1");
  AwaitCount("delivered", 2);
  ASSERT_TRUE(actions_.Post(alert.run, action).ok());  // A replay.
  Change(alert.run, ActionState::kApproved, &action);
  Change(alert.run, ActionState::kSent, &action);
  webhook->Stop();
  EXPECT_EQ(receiver_.Await(2).size(), 2u);
}

TEST_F(WebhookTest, ProposalForUnsentOrResolvedAlertIsNotSent) {
  auto webhook = Start({.severity_min = Severity::kCritical, .advice = AdviceWithIds});
  Propose(Post(run_, AlertState::kFiring, Severity::kWarning), "a-1");
  SyntheticRun silenced = run_;
  silenced.id = 2;
  const AlertTransition quiet = Post(silenced, AlertState::kFiring, Severity::kCritical);
  receiver_.Await(1);
  AwaitCount("delivered", 1);
  ASSERT_TRUE(
      alerts_.Annotate(2, quiet.key, {.silenced_until_unix_ns = Clock::System()->UnixNanos() + 60'000'000'000}).ok());
  Propose(quiet, "a-2");
  SyntheticRun over = run_;
  over.id = 3;
  Post(over, AlertState::kFiring, Severity::kCritical);
  receiver_.Await(2);
  const AlertTransition resolved = Post(over, AlertState::kResolved, Severity::kCritical);
  receiver_.Await(3);
  AwaitCount("delivered", 3);
  Propose(resolved, "a-3");
  webhook->Stop();
  EXPECT_EQ(receiver_.Await(3).size(), 3u);
}

TEST_F(WebhookTest, StopDeliversWhatIsDue) {
  auto webhook = Start({});
  Post(run_, AlertState::kFiring);
  webhook->Stop();
  EXPECT_EQ(receiver_.Await(1).size(), 1u);
  Post(run_, AlertState::kResolved);  // Nobody listens any more.
  EXPECT_EQ(receiver_.Await(1).size(), 1u);
}

// A server that ended before it told somebody, or while he was away, is followed by one
// that tells him, and nobody twice.
TEST_F(WebhookTest, UnsentAlertsAreSentByTheNextServer) {
  const int64_t now_ns = Clock::System()->UnixNanos();
  const auto post = [&](const SyntheticRun& run, const char* rule, AlertState state, int64_t time_unix_ns) {
    AlertTransition alert = MakeAlert(run, Severity::kWarning, rule, time_unix_ns);
    alert.state = state;
    alert.k = k_++;
    EXPECT_TRUE(alerts_.Post(alert).ok());
  };
  const SyntheticRun other{.id = 8, .name = "other", .failing = {1, 0}, .stage = 1};
  {
    auto webhook = Start({});
    post(run_, "drift", AlertState::kFiring, now_ns);
    receiver_.Await(1);
    AwaitCount("delivered", 1);
  }
  post(run_, "leak", AlertState::kFiring, now_ns);
  post(other, "drift", AlertState::kFiring, now_ns);
  post(other, "drift", AlertState::kResolved, now_ns);                                    // Nobody heard of it.
  post(other, "leak", AlertState::kFiring, now_ns - int64_t{48 * 3600} * 1'000'000'000);  // No news.
  {
    auto webhook = Start({});
    webhook->CatchUp(0, 1);  // Others' runs.
    webhook->CatchUp(0, std::numeric_limits<RunId>::max());
    const nlohmann::json body = receiver_.Await(2)[1];
    EXPECT_EQ(body["groupLabels"]["run"], run_.name);
    EXPECT_EQ(body["alerts"].size(), 1u);
    EXPECT_EQ(body["otherAlertsFiring"], 1) << "the server before told of it";
    AwaitCount("delivered", 2);
    AwaitNoted(2);
    webhook->CatchUp(0, std::numeric_limits<RunId>::max());
    webhook->Stop();
    EXPECT_EQ(receiver_.Await(2).size(), 2u) << "told twice";
  }
  post(run_, "leak", AlertState::kResolved, now_ns);  // As the log's end is applied when a server stops.
  auto webhook = Start({});
  webhook->CatchUp(0, std::numeric_limits<RunId>::max());
  EXPECT_EQ(receiver_.Await(3)[2]["alerts"].size(), 1u);
  auto elsewhere = Start({.channel = "second"});  // Told of nothing yet.
  elsewhere->CatchUp(0, std::numeric_limits<RunId>::max());
  EXPECT_EQ(receiver_.Await(4)[3]["alerts"].size(), 1u);
}

// As who catches up may: what fired is read before its end is told, and noted after it.
TEST_F(WebhookTest, OlderFiringDoesNotReopenAResolvedAlert) {
  auto webhook = Start({});
  const AlertTransition firing = Post(run_, AlertState::kFiring);
  receiver_.Await(1);
  receiver_.Refuse(3);
  AlertTransition resolved = firing, before = firing;
  resolved.state = AlertState::kResolved;
  resolved.k = firing.k + 2;
  before.k = firing.k + 1;
  EXPECT_TRUE(alerts_.Post(resolved).ok());
  EXPECT_TRUE(alerts_.Post(before).ok());
  EXPECT_EQ(receiver_.Await(5)[4]["status"], "resolved");
}

// As SIGTERM does it, which must not wait for whoever answers a byte at a time.
TEST_F(WebhookTest, TricklingReceiverDoesNotDelayStop) {
  for (const char* head : {"HTTP/1.1 200 OK\r\n", "", "HTTP/1.1 100 Continue\r\n\r\n"}) {
    Stranger stranger([head](Stranger* self, int fd) { self->Send(fd, head), self->Hang(fd); });
    auto webhook =
        *Webhook::Start({.url = stranger.url(), .group_wait_ns = 1'000'000}, &alerts_, &actions_, &counters_);
    Post(run_, AlertState::kFiring);
    const absl::Time deadline = absl::Now() + kPatience;
    while (stranger.connections() == 0 && absl::Now() < deadline) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    webhook->Stop();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5)) << "of an attempt's ten";
  }
}

}  // namespace
}  // namespace bellwether::server
