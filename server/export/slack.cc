#include "server/export/slack.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace bellwether::server {
namespace {

constexpr size_t kAlertsMax = 10;  // Slack cuts a message off; the page shows the rest.

// Slack reads &, < and > as markup: a run's name must not become a link or call everybody.
std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

const char* Color(const nlohmann::json& alert) {
  if (alert.at("status") == "resolved") return "good";
  return alert.at("labels").at("severity") == "critical" ? "danger" : "warning";
}

nlohmann::json Attachment(const nlohmann::json& alert) {
  const nlohmann::json& labels = alert.at("labels");
  const nlohmann::json& annotations = alert.at("annotations");
  std::string where;
  if (labels.contains("layer")) absl::StrAppend(&where, ", layer ", labels.at("layer").get<std::string>());
  if (labels.contains("head")) absl::StrAppend(&where, ", head ", labels.at("head").get<std::string>());
  const std::string title = absl::StrCat(labels.at("alertname").get<std::string>(), where);
  std::string text = Escape(annotations.value("summary", ""));
  nlohmann::json fields = nlohmann::json::array();
  for (const char* name : {"cause", "eta", "evidence", "advice", "action", "siblings"}) {
    const std::string value = annotations.value(name, "");
    if (!value.empty()) fields.push_back({{"title", name}, {"value", Escape(value)}, {"short", false}});
  }
  nlohmann::json attachment = {
      {"color", Color(alert)}, {"title", Escape(title)}, {"fallback", text}, {"text", text}, {"fields", fields}};
  const std::string link = alert.value("generatorURL", "");
  if (!link.empty()) attachment["title_link"] = link;
  return attachment;
}

}  // namespace

nlohmann::json SlackMessage(const nlohmann::json& notification) {
  const nlohmann::json& alerts = notification.at("alerts");
  size_t firing = 0;
  bool critical = false;
  nlohmann::json attachments = nlohmann::json::array();
  for (const nlohmann::json& alert : alerts) {
    const bool fires = alert.at("status") == "firing";
    firing += fires;
    critical |= fires && alert.at("labels").at("severity") == "critical";
    if (attachments.size() < kAlertsMax) attachments.push_back(Attachment(alert));
  }
  const size_t more = alerts.size() - attachments.size() + notification.value("truncatedAlerts", size_t{0});
  std::string text = absl::StrCat(firing == 0 ? "RESOLVED"
                                  : critical  ? "CRITICAL"
                                              : "WARNING",
                                  ": run ", Escape(notification.at("groupLabels").at("run").get<std::string>()));
  if (firing > 0) absl::StrAppend(&text, ", ", firing, firing == 1 ? " alert fires" : " alerts fire");
  if (more > 0) absl::StrAppend(&text, " (", more, " not shown)");
  return {{"text", text}, {"attachments", attachments}};
}

}  // namespace bellwether::server
