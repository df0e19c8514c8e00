// Goal: an Alertmanager knows at any time what fires, hears of ends for a while, and loses nothing
// by being away.
// Method: a real receiver on loopback that keeps each push; times are cut to milliseconds.  A real
// Alertmanager takes the same pushes in tests/e2e/test_alertmanager.py.

#include "server/export/alertmanager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "server/util/clock.h"
#include "tests/server/export/receiver.h"
#include "tests/server/export/stranger.h"
#include "tests/support/memory_database.h"
#include "tests/support/synthetic_runs.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class AlertmanagerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Alertmanager> Start(AlertmanagerOptions options = {}) {
    options.group_wait_ns = 1'000'000;
    options.backoff_first_ns = 2'000'000;
    options.stop_wait_ns = 60'000'000'000;  // However late its thread is: news is sent.
    options.url = receiver_.origin() + "/prefix/";
    options.links = {.page = "http://watch:7071", .runbooks = "https://docs/{name}.html"};
    return *Alertmanager::Start(options, &alerts_, &runs_, &counters_);
  }
  void Post(const SyntheticRun& run, AlertState state = AlertState::kFiring, Severity severity = Severity::kWarning) {
    AlertTransition alert = MakeAlert(run, severity, "drift", Clock::System()->UnixNanos());
    alert.state = state;
    alert.k = k_++;
    EXPECT_TRUE(alerts_.Post(alert).ok());
  }
  double Count(const char* result) {
    return counters_.counter("bellwether_notifications_total", {{"channel", "alertmanager"}, {"result", result}})
        ->value();
  }
  // The first push that `wanted` holds of.
  nlohmann::json Await(const std::function<bool(const nlohmann::json&)>& wanted) {
    for (size_t i = 0;; ++i) {
      const std::vector<nlohmann::json> bodies = receiver_.Await(i + 1);
      if (bodies.size() <= i) return nlohmann::json::array();
      if (wanted(bodies[i])) return bodies[i];
    }
  }
  static bool Ended(const nlohmann::json& alert) {
    return alert["endsAt"].get<std::string>() <= FormatTime(Clock::System()->UnixNanos());
  }

  const SyntheticRun run_{.name = "llama/7b", .failing = {1, 0}, .stage = 1};
  Receiver receiver_{"/prefix/api/v2/alerts"};
  MemoryDatabase database_;
  AlertStore alerts_{&database_};
  RunTable runs_;
  Counters counters_;
  uint32_t k_ = 0;
};

TEST_F(AlertmanagerTest, FiringAlertIsSentAndResent) {
  auto alertmanager = Start({.resend_ns = 20'000'000});
  Post(run_);
  const nlohmann::json first = Await([](const auto& push) { return !push.empty(); });
  ASSERT_THAT(first, SizeIs(1));
  EXPECT_EQ(first[0]["labels"], nlohmann::json({{"alertname", "BellwetherDriftGrowing"},
                                                {"run", "llama/7b"},
                                                {"rule", "drift"},
                                                {"severity", "warning"},
                                                {"layer", "1"},
                                                {"head", "0"}}));
  EXPECT_THAT(
      first[0]["generatorURL"].get<std::string>(),
      testing::StartsWith("http://watch:7071/#/run/llama%2F7b?step=4000&layer=1&head=0&alert=drift%2F1%2F0%2F"));
  EXPECT_THAT(first[0]["annotations"]["alert"].get<std::string>(), testing::StartsWith("drift/1/0/"));
  EXPECT_THAT(first[0]["annotations"]["summary"].get<std::string>(), HasSubstr("drift"));
  const nlohmann::json later = receiver_.Await(5)[4];
  EXPECT_EQ(later[0]["labels"], first[0]["labels"]);
  EXPECT_EQ(later[0]["startsAt"], first[0]["startsAt"]);
  EXPECT_GT(later[0]["endsAt"].get<std::string>(), first[0]["endsAt"].get<std::string>());
}

TEST_F(AlertmanagerTest, LaterProposalComesWithTheNextPush) {
  std::atomic<bool> proposed{false};
  auto alertmanager = Start(
      {.advice =
           [&](const AlertTransition& alert) { return alert.advice + (proposed ? " Proposed: centre the keys." : ""); },
       .resend_ns = 10'000'000});
  Post(run_);
  receiver_.Await(1);
  proposed = true;
  const nlohmann::json body = Await([](const auto& push) {
    return !push.empty() &&
           push[0]["annotations"]["advice"].template get<std::string>().ends_with("Proposed: centre the keys.");
  });
  ASSERT_THAT(body, SizeIs(1));
}

TEST_F(AlertmanagerTest, ResolvedAlertIsResentForALimitedTime) {
  // Longer than this machine may halt.
  auto alertmanager = Start({.resend_ns = 10'000'000, .resolved_ns = 5'000'000'000});
  Post(run_);
  Await([](const auto& push) { return !push.empty(); });
  Post(run_, AlertState::kResolved);
  // What fires has a later end with each push; one that stays the same is told again.
  std::string end;
  int told = 0;
  const nlohmann::json body = Await([&](const auto& push) {
    const std::string before = std::exchange(end, push.empty() ? "" : push[0]["endsAt"].template get<std::string>());
    told = end == before ? told + 1 : 1;
    return told == 3;
  });
  ASSERT_THAT(body, SizeIs(1));
  EXPECT_TRUE(Ended(body[0]));
  EXPECT_EQ(body[0]["labels"]["run"], "llama/7b");
  // Once it has been told long enough nothing is left to say, and nothing is said.
  std::vector<nlohmann::json> bodies;
  for (size_t before = 0; bodies.empty() || bodies.size() != before; absl::SleepFor(absl::Milliseconds(300))) {
    before = bodies.size();
    bodies = receiver_.Await(1);
  }
  EXPECT_GT(bodies.size(), 3u);
  EXPECT_TRUE(Ended(bodies.back()[0]));
}

TEST_F(AlertmanagerTest, RaisedSeverityEndsTheMilderAlert) {
  auto alertmanager = Start();
  Post(run_);
  receiver_.Await(1);
  Post(run_, AlertState::kFiring, Severity::kCritical);
  const nlohmann::json body = Await([](const auto& push) { return push.size() == 2; });
  ASSERT_THAT(body, SizeIs(2));
  for (const nlohmann::json& alert : body) EXPECT_EQ(Ended(alert), alert["labels"]["severity"] == "warning") << alert;
}

TEST_F(AlertmanagerTest, AlertFiringBeforeTheStartIsSent) {
  Post(run_);
  auto alertmanager = Start();
  EXPECT_THAT(receiver_.Await(1)[0], SizeIs(1));
}

TEST_F(AlertmanagerTest, ImportedRunIsMarkedToItsEnd) {
  RunSnapshot recording = *MakeSnapshot(run_, Clock::System()->UnixNanos());
  recording.record.import_of = "a recording";
  recording.record.import_notifies = true;
  runs_.Publish(std::make_shared<const RunSnapshot>(recording));
  Post(run_);
  auto alertmanager = Start({.resend_ns = 20'000'000});
  const nlohmann::json firing = receiver_.Await(1)[0];
  ASSERT_THAT(firing, SizeIs(1));
  EXPECT_EQ(firing[0]["labels"]["imported"], "true");
  EXPECT_THAT(firing[0]["annotations"]["summary"].get<std::string>(),
              testing::StartsWith("WARNING llama/7b: (imported) "));
  Database::AlertNote note;
  note.silenced_until_unix_ns = Clock::System()->UnixNanos() + int64_t{3600} * 1'000'000'000;
  ASSERT_TRUE(alerts_.Annotate(run_.id, firing[0]["annotations"]["alert"].get<std::string>(), note).ok());
  const nlohmann::json ended = Await([](const auto& push) { return !push.empty() && Ended(push[0]); });
  ASSERT_THAT(ended, SizeIs(1));
  EXPECT_THAT(ended[0]["annotations"]["summary"].get<std::string>(),
              testing::StartsWith("RESOLVED llama/7b: (imported) drift is no longer told: "));
}

TEST_F(AlertmanagerTest, TheAlertsOfAPastRunEnd) {
  SyntheticRun past = run_, rerun = run_;
  past.ended = true;
  rerun.id = 2;
  runs_.Publish(MakeSnapshot(past, Clock::System()->UnixNanos() - int64_t{3600} * 1'000'000'000));
  Post(past);
  SyntheticRun other = run_;
  other.id = 3;
  other.name = "other";
  Post(other);
  auto alertmanager = Start();
  const nlohmann::json body = receiver_.Await(1)[0];
  ASSERT_THAT(body, SizeIs(1));
  EXPECT_EQ(body[0]["labels"]["run"], "other");
}

TEST_F(AlertmanagerTest, SilencedAlertEndsAtAlertmanager) {
  auto alertmanager = Start({.resend_ns = 10'000'000});
  Post(run_);
  receiver_.Await(1);
  const AlertTransition last = alerts_.List(0, true)[0].last;
  Database::AlertNote note;
  note.silenced_until_unix_ns = Clock::System()->UnixNanos() + int64_t{3600} * 1'000'000'000;
  ASSERT_TRUE(alerts_.Annotate(last.run, last.key, note).ok());
  EXPECT_THAT(Await([](const auto& push) { return !push.empty() && Ended(push[0]); }), SizeIs(1));
}

TEST_F(AlertmanagerTest, FalseAlarmEndsAtAlertmanager) {
  auto alertmanager = Start({.resend_ns = 10'000'000});
  Post(run_);
  receiver_.Await(1);
  const AlertView alert = alerts_.List(0, true)[0];
  FalseAlarm said{.severity = alert.last.severity};
  said.illness = alert.illness;
  ASSERT_TRUE(alerts_.Annotate(alert.last.run, alert.last.key, {.false_alarms = {said}}).ok());
  EXPECT_THAT(Await([](const auto& push) { return !push.empty() && Ended(push[0]); }), SizeIs(1));
}

TEST_F(AlertmanagerTest, ReturnedReceiverGetsTheNewestState) {
  receiver_.Refuse(7);
  receiver_.Stall(true);
  auto alertmanager = Start({.attempts_max = 3});
  Post(run_);
  // It hears of one, and refuses that only when there are two, however long the second takes.
  EXPECT_THAT(receiver_.Await(1)[0], SizeIs(1));
  SyntheticRun other = run_;
  other.id = 2;
  other.name = "other";
  Post(other);
  receiver_.Stall(false);
  const nlohmann::json taken = receiver_.Await(8).back();
  EXPECT_THAT(taken, SizeIs(2));
  alertmanager->Stop();
  EXPECT_EQ(Count("retried"), 2);
  EXPECT_EQ(Count("failed"), 5);
  EXPECT_EQ(Count("delivered"), 1);
}

TEST_F(AlertmanagerTest, StopSendsPendingAlerts) {
  auto alertmanager = Start({.resend_ns = int64_t{3600} * 1'000'000'000});
  Post(run_);
  alertmanager->Stop();
  EXPECT_THAT(receiver_.Await(1).back(), SizeIs(1));
}

TEST_F(AlertmanagerTest, TricklingReceiverDoesNotDelayStop) {
  Stranger stranger([](Stranger* self, int fd) {
    self->Send(fd, "HTTP/1.1 200 OK\r\n");
    self->SendOn(fd, "X-A: b\r\n", std::chrono::milliseconds(20));
  });
  AlertmanagerOptions options;
  options.url = stranger.url();
  options.group_wait_ns = 1'000'000;
  auto alertmanager = *Alertmanager::Start(options, &alerts_, &runs_, &counters_);
  Post(run_);
  const absl::Time deadline = absl::Now() + Receiver::kPatience;
  while (stranger.connections() == 0 && absl::Now() < deadline) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  alertmanager->Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5)) << "of an attempt's ten";
}

TEST_F(AlertmanagerTest, MoreThanTheLimitIsRefusedAndBatchesAreBounded) {
  for (int i = 1; i <= 10; ++i) {
    SyntheticRun run = run_;
    run.id = i;
    run.name = absl::StrCat("run", i);
    Post(run);
  }
  auto alertmanager = Start({.alerts_max = 7, .batch_max = 4});
  const std::vector<nlohmann::json> bodies = receiver_.Await(2);
  EXPECT_THAT(bodies[0], SizeIs(4));
  EXPECT_THAT(bodies[1], SizeIs(3));
  EXPECT_EQ(Count("refused"), 3);
}

TEST_F(AlertmanagerTest, AlertmanagerUrlMustBeLegal) {
  AlertmanagerOptions options;
  options.url = "alertmanager:9093";
  EXPECT_FALSE(Alertmanager::Start(options, &alerts_, &runs_, &counters_).ok());
}

}  // namespace
}  // namespace bellwether::server
