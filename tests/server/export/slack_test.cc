// Goal: a message for people says at its first line what is wrong and where, and nothing in a
// run's name can act on Slack.

#include "server/export/slack.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace bellwether::server {
namespace {

nlohmann::json Alert(const char* status, const char* severity) {
  return {{"status", status},
          {"labels",
           {{"alertname", "BellwetherDriftGrowing"},
            {"run", "a"},
            {"rule", "drift"},
            {"severity", severity},
            {"layer", "3"},
            {"head", "5"}}},
          {"annotations", {{"summary", "drift ratio 7 & rising"}, {"advice", "centre the keys"}, {"stage", "1"}}},
          {"generatorURL", "http://watch:7071/#/run/a?step=1"}};
}

nlohmann::json Notification(const char* run, const nlohmann::json& alerts) {
  return {{"groupLabels", {{"run", run}}}, {"truncatedAlerts", 0}, {"alerts", alerts}};
}

TEST(SlackTest, SaysWhatWhereAndWhatToDo) {
  const nlohmann::json message = SlackMessage(
      Notification("a", nlohmann::json::array({Alert("firing", "critical"), Alert("resolved", "warning")})));
  EXPECT_EQ(message["text"], "CRITICAL: run a, 1 alert fires");
  ASSERT_EQ(message["attachments"].size(), 2u);
  const nlohmann::json& alert = message["attachments"][0];
  EXPECT_EQ(alert["color"], "danger");
  EXPECT_EQ(alert["title"], "BellwetherDriftGrowing, layer 3, head 5");
  EXPECT_EQ(alert["title_link"], "http://watch:7071/#/run/a?step=1");
  EXPECT_EQ(alert["text"], "drift ratio 7 &amp; rising");
  EXPECT_EQ(alert["fields"], nlohmann::json({{{"title", "advice"}, {"value", "centre the keys"}, {"short", false}}}));
  EXPECT_EQ(message["attachments"][1]["color"], "good");
}

TEST(SlackTest, AllResolvedIsSaid) {
  EXPECT_EQ(SlackMessage(Notification("a", nlohmann::json::array({Alert("resolved", "critical")})))["text"],
            "RESOLVED: run a");
}

TEST(SlackTest, ANameCallsNobody) {
  const nlohmann::json message =
      SlackMessage(Notification("<!channel> & co", nlohmann::json::array({Alert("firing", "warning")})));
  EXPECT_EQ(message["text"], "WARNING: run &lt;!channel&gt; &amp; co, 1 alert fires");
}

TEST(SlackTest, ManyAlertsAreCutAndCounted) {
  nlohmann::json alerts = nlohmann::json::array();
  for (int i = 0; i < 25; ++i) alerts.push_back(Alert("firing", "warning"));
  const nlohmann::json message = SlackMessage(Notification("a", alerts));
  EXPECT_EQ(message["attachments"].size(), 10u);
  EXPECT_EQ(message["text"], "WARNING: run a, 25 alerts fire (15 not shown)");
}

}  // namespace
}  // namespace bellwether::server
