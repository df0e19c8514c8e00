// Goal: a template gives a receiver's own body, no value can leave its text, and what is wrong
// with a template is said with its place; the template for Slack gives Slack's message.
// Method: templates as texts, and deploy/webhook/slack.json as it is shipped.

#include "server/export/body_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/export/alert_json.h"
#include "tests/support/synthetic_runs.h"

namespace bellwether::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

Json Alert(const char* status, const char* severity) {
  return {{"status", status},
          {"labels",
           {{"alertname", "BellwetherDriftGrowing"},
            {"run", "a"},
            {"rule", "drift"},
            {"severity", severity},
            {"layer", "3"},
            {"head", "5"}}},
          {"annotations",
           {{"summary", "CRITICAL a: layer 3 head 5 is drifting & rising. Loss still normal."},
            {"do", "Centre the keys."},
            {"advice", "centre the keys"},
            {"page_url", "http://watch:7071/#/run/a?step=1"},
            {"stage", "1"}}},
          {"generatorURL", "http://watch:7071/#/run/a?step=1"}};
}

Json Notification(const std::string& run, const Json& alerts) {
  return {{"groupLabels", {{"run", run}}}, {"truncatedAlerts", 0}, {"receiver", "chat"}, {"alerts", alerts}};
}

Json Filled(const Json& body, const std::string& run = "a", const Json& alert = Alert("firing", "warning")) {
  const auto parsed = BodyTemplate::Parse(body.dump());
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? parsed->Fill(Notification(run, Json::array({alert}))) : Json();
}

std::string Finding(const std::string& text) {
  const auto parsed = BodyTemplate::Parse(text);
  return parsed.ok() ? "" : std::string(parsed.status().message());
}

BodyTemplate SlackTemplate() {
  std::ifstream file(BELLWETHER_SOURCE "/deploy/webhook/slack.json");
  return *BodyTemplate::Parse(std::string(std::istreambuf_iterator<char>(file), {}));
}

TEST(BodyTemplateTest, PlaceholdersBecomeTextAndTheRestStays) {
  const Json body = {{"text", "{{run}}: {{firing}} of {{receiver}}"}, {"n", 7}, {"on", true}, {"none", nullptr}};
  const Json expected = {{"text", "a: 1 of chat"}, {"n", 7}, {"on", true}, {"none", nullptr}};
  EXPECT_EQ(Filled(body), expected);
}

TEST(BodyTemplateTest, NoValueLeavesItsText) {
  const std::string run = "a\", \"text\": \"{{firing}}\\\n<!channel>\x01";
  const Json filled = Filled({{"text", "{{run}}"}}, run);
  EXPECT_EQ(filled, Json({{"text", run}}));
  EXPECT_EQ(Json::parse(filled.dump()), filled);
}

TEST(BodyTemplateTest, HtmlEscapesWhatChatsTakeForMarkup) {
  EXPECT_EQ(Filled({{"text", "{{run|html}}"}}, "<!channel> & co")["text"], "&lt;!channel&gt; &amp; co");
}

TEST(BodyTemplateTest, FieldsWithoutAValueAreLeftOut) {
  const Json each = {
      {"link", "{{url}}"},
      {"always", "at {{eta}}{{rule}}"},
      {"fields", {{{"title", "eta"}, {"value", "{{eta}}"}}, {{"title", "advice"}, {"value", "{{advice}}"}}}}};
  Json alert = Alert("firing", "warning");
  alert["generatorURL"] = "";
  const Json expected = {{"always", "at drift"}, {"fields", {{{"title", "advice"}, {"value", "centre the keys"}}}}};
  EXPECT_EQ(Filled({{"list", {{"{{alerts}}", each}}}}, "a", alert)["list"], Json::array({expected}));
}

TEST(BodyTemplateTest, EveryLabelAndAnnotationHasAPlaceholder) {
  AlertTransition transition = MakeAlert({.name = "a", .failing = {1, 0}}, Severity::kWarning, "drift", 1);
  transition.eta = {.known = true, .steps = 5};
  transition.siblings = "two runs";
  Json each = Json::object();
  for (const StringMap& texts :
       {AlertLabels(transition, true),
        AlertAnnotations(transition, {.page = "http://watch", .runbooks = "http://watch"}, true)}) {
    for (const auto& [name, value] : texts) each[name] = absl::StrCat("{{", name, "}}");
  }
  for (const char* name : {"title", "sentence", "others", "color", "status", "url", "starts_at", "fingerprint"}) {
    each[name] = absl::StrCat("{{", name, "}}");
  }
  EXPECT_EQ(Finding(Json({{"x", {{"{{alerts}}", each}}}}).dump()), "");
}

TEST(BodyTemplateTest, FindingsNameTheirPlace) {
  EXPECT_THAT(Finding(R"({"a": [1, {"b": "{{nope}}"}]})"),
              AllOf(HasSubstr("a[1].b = {{nope}}: {{nope}} must be one of external_url, firing, headline, others,"),
                    HasSubstr("there are more in {\"{{alerts}}\": ...}")));
  EXPECT_THAT(Finding(R"({"a": "{{summary}}"})"), HasSubstr("{{summary}} must be one of"));
  EXPECT_THAT(Finding(R"({"a": {"{{alerts}}": {"b": "{{nope}}"}}})"),
              HasSubstr("a.{{alerts}}.b = {{nope}}: {{nope}} must be"));
  EXPECT_THAT(Finding(R"({"a": "{{ run }}"})"), HasSubstr("without spaces"));
  EXPECT_THAT(Finding(R"({"a": "{{run|upper}}"})"), HasSubstr("{{run|upper}} must be one of"));
  EXPECT_THAT(Finding(R"({"a": "{{run"})"), HasSubstr("a = {{run: {{ has no }} behind it"));
  EXPECT_THAT(Finding(R"({"{{run}}": 1})"), HasSubstr("a key must be plain, or {{alerts}}"));
  EXPECT_THAT(Finding(R"({"a": {"{{alerts}}": 1, "b": 2}})"),
              HasSubstr("a = {...}: {{alerts}} must be the only key of its map"));
  EXPECT_THAT(Finding(R"({"a": {"{{alerts}}": {"b": {"{{alerts}}": 1}}}})"), HasSubstr("not in another {{alerts}}"));
  EXPECT_THAT(Finding(R"({"a": 1, "a": 2})"), HasSubstr("key a stands twice"));
  EXPECT_THAT(Finding(R"(["{{run}}"])"), HasSubstr("is no map of JSON"));
  EXPECT_THAT(Finding(R"({"{{alerts}}": 1})"), HasSubstr("the document = {...}: {{alerts}} must be the only key"));
  EXPECT_THAT(Finding("{\"a\": 1"), HasSubstr("is no JSON: "));
  EXPECT_THAT(Finding("{\"a\": \"\xff\"}"), HasSubstr("is no JSON: "));
  EXPECT_THAT(Finding(""), HasSubstr("is no JSON: "));
}

TEST(BodyTemplateTest, ItsDepthIsLimited) {
  const auto nested = [](size_t lists) {
    return absl::StrCat("{\"a\": ", std::string(lists, '['), std::string(lists, ']'), "}");
  };
  EXPECT_EQ(Finding(nested(BodyTemplate::kDepthMax - 1)), "");
  EXPECT_THAT(Finding(nested(BodyTemplate::kDepthMax + 1)), HasSubstr("nested more than 16"));
  EXPECT_THAT(Finding(nested(BodyTemplate::kBytesMax / 2 - 10)), HasSubstr("nested more than 16"));
}

TEST(SlackTest, SlackMessageHasRunSentenceAndDeed) {
  const Json message = SlackTemplate().Fill(Notification("a", Json::array({Alert("firing", "critical")})));
  EXPECT_EQ(message["text"], "CRITICAL a: layer 3 head 5 is drifting &amp; rising.");
  ASSERT_EQ(message["attachments"].size(), 1u);
  const Json& alert = message["attachments"][0];
  EXPECT_EQ(alert["color"], "#d7191c");
  EXPECT_EQ(alert["title"], "CRITICAL a: layer 3 head 5");
  EXPECT_EQ(alert["title_link"], "http://watch:7071/#/run/a?step=1");
  EXPECT_EQ(alert["text"], "layer 3 head 5 is drifting &amp; rising. Loss still normal.");
  EXPECT_EQ(alert["fields"], Json::array({{{"title", "Do"}, {"value", "Centre the keys."}, {"short", false}}}));
}

TEST(SlackTest, OthersThatFireAreCounted) {
  Json notification = Notification("a", Json::array({Alert("firing", "critical"), Alert("resolved", "warning")}));
  notification["otherAlertsFiring"] = 3;
  const Json message = SlackTemplate().Fill(notification);
  EXPECT_EQ(message["text"], "CRITICAL a: 2 alerts (3 others fire)");
  EXPECT_EQ(message["attachments"][1]["color"], "#2eb886");
  EXPECT_EQ(message["attachments"][1]["title"], "RESOLVED a: layer 3 head 5");
}

TEST(SlackTest, ImportedRunIsMarkedInSentenceAndHeadline) {
  Json alert = Alert("firing", "critical");
  alert["labels"]["imported"] = "true";
  alert["annotations"]["summary"] = "CRITICAL a: (imported) layer 3 head 5 is drifting. Loss still normal.";
  const Json one = SlackTemplate().Fill(Notification("a", Json::array({alert})));
  EXPECT_EQ(one["text"], "CRITICAL a: (imported) layer 3 head 5 is drifting.");
  EXPECT_EQ(one["attachments"][0]["text"], "(imported) layer 3 head 5 is drifting. Loss still normal.");
  const Json two = SlackTemplate().Fill(Notification("a", Json::array({alert, alert})));
  EXPECT_EQ(two["text"], "CRITICAL a (imported): 2 alerts");
}

TEST(SlackTest, AllResolvedIsSaid) {
  EXPECT_EQ(SlackTemplate().Fill(Notification("a", Json(2, Alert("resolved", "critical"))))["text"],
            "RESOLVED a: 2 alerts, all over");
}

TEST(SlackTest, RunNamesNotifyNoChannel) {
  const Json message = SlackTemplate().Fill(Notification("<!channel> & co", Json(2, Alert("firing", "warning"))));
  EXPECT_EQ(message["text"], "WARNING &lt;!channel&gt; &amp; co: 2 alerts");
}

TEST(SlackTest, ManyAlertsAreCutAndCounted) {
  const Json message = SlackTemplate().Fill(Notification("a", Json(25, Alert("firing", "warning"))));
  EXPECT_EQ(message["attachments"].size(), 10u);
  EXPECT_EQ(message["text"], "WARNING a: 25 alerts (15 not shown)");
}

// Slack refuses or cuts longer ones; run names have up to 128 bytes, and what is escaped grows fivefold.
TEST(SlackTest, TheLongestAlertFitsIntoSlack) {
  AlertTransition alert;
  alert.run_name = std::string(128, '&');
  alert.state = AlertState::kFiring;
  alert.severity = Severity::kCritical;
  alert.rule = "drift";
  alert.summary = alert.run_name + ": " + std::string(5000, 'x');
  alert.advice = std::string(5000, '<');
  for (int i = 0; i < 32; ++i) alert.evidence.push_back({.signal = std::string(100, 'z'), .where = {i, i}});
  Json of_alert = {
      {"status", "firing"},
      {"labels", AlertLabels(alert, false)},
      {"annotations", AlertAnnotations(alert, {.page = "http://watch", .runbooks = "http://watch"}, false)}};
  const Json message = SlackTemplate().Fill(Notification(alert.run_name, Json(50, of_alert)));
  ASSERT_EQ(message["attachments"].size(), 10u);
  for (const Json& attachment : message["attachments"]) {
    EXPECT_LT(attachment["text"].get<std::string>().size(), 3000u);
    for (const Json& field : attachment["fields"]) EXPECT_LT(field["value"].get<std::string>().size(), 3000u);
  }
  EXPECT_LT(message["text"].get<std::string>().size(), 3000u);
}

}  // namespace
}  // namespace bellwether::server
