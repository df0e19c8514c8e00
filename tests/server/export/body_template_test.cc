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
          {"annotations", {{"summary", "drift ratio 7 & rising"}, {"advice", "centre the keys"}, {"stage", "1"}}},
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
  for (const StringMap& texts : {AlertLabels(transition), AlertAnnotations(transition)}) {
    for (const auto& [name, value] : texts) each[name] = absl::StrCat("{{", name, "}}");
  }
  for (const char* name : {"title", "color", "status", "url", "starts_at", "fingerprint"}) {
    each[name] = absl::StrCat("{{", name, "}}");
  }
  EXPECT_EQ(Finding(Json({{"x", {{"{{alerts}}", each}}}}).dump()), "");
}

TEST(BodyTemplateTest, FindingsNameTheirPlace) {
  EXPECT_THAT(Finding(R"({"a": [1, {"b": "{{nope}}"}]})"),
              AllOf(HasSubstr("a[1].b = {{nope}}: {{nope}} must be one of external_url, firing, headline,"),
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

TEST(SlackTest, SlackMessageHasAlertPlaceAndAdvice) {
  const Json message =
      SlackTemplate().Fill(Notification("a", Json::array({Alert("firing", "critical"), Alert("resolved", "warning")})));
  EXPECT_EQ(message["text"], "CRITICAL: run a, 1 alert fires");
  ASSERT_EQ(message["attachments"].size(), 2u);
  const Json& alert = message["attachments"][0];
  EXPECT_EQ(alert["color"], "#d7191c");
  EXPECT_EQ(alert["title"], "BellwetherDriftGrowing, layer 3, head 5");
  EXPECT_EQ(alert["title_link"], "http://watch:7071/#/run/a?step=1");
  EXPECT_EQ(alert["text"], "drift ratio 7 &amp; rising");
  EXPECT_EQ(alert["fallback"], alert["text"]);
  EXPECT_EQ(alert["fields"], Json::array({{{"title", "advice"}, {"value", "centre the keys"}, {"short", false}}}));
  EXPECT_EQ(message["attachments"][1]["color"], "#2eb886");
}

TEST(SlackTest, AllResolvedIsSaid) {
  EXPECT_EQ(SlackTemplate().Fill(Notification("a", Json::array({Alert("resolved", "critical")})))["text"],
            "RESOLVED: run a");
}

TEST(SlackTest, RunNamesNotifyNoChannel) {
  const Json message = SlackTemplate().Fill(Notification("<!channel> & co", Json::array({Alert("firing", "warning")})));
  EXPECT_EQ(message["text"], "WARNING: run &lt;!channel&gt; &amp; co, 1 alert fires");
}

TEST(SlackTest, ManyAlertsAreCutAndCounted) {
  const Json message = SlackTemplate().Fill(Notification("a", Json(25, Alert("firing", "warning"))));
  EXPECT_EQ(message["attachments"].size(), 10u);
  EXPECT_EQ(message["text"], "WARNING: run a, 25 alerts fire (15 not shown)");
}

}  // namespace
}  // namespace bellwether::server
