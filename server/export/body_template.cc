#include "server/export/body_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/export/alert_json.h"
#include "server/util/clean_text.h"

namespace bellwether::server {
namespace {

using Json = nlohmann::json;

constexpr char kEachAlert[] = "{{alerts}}";
constexpr std::string_view kHtml = "|html";
constexpr size_t kShownBytesMax = 100;  // Of what stands in a template, in a message.

// The names that a template may use, without values.
StringMap NamesOfAll() {
  return {{"headline", ""}, {"run", ""},      {"status", ""},      {"firing", ""},
          {"others", ""},   {"receiver", ""}, {"external_url", ""}};
}
StringMap NamesOfAlert() {
  StringMap names = NamesOfAll();
  for (const char* name : {"title",    "color",       "url",  "starts_at", "fingerprint", "alertname",  "rule",
                           "severity", "layer",       "head", "alert",     "summary",     "cause",      "advice",
                           "imported", "evidence",    "eta",  "stage",     "step",        "first_step", "siblings",
                           "sentence", "description", "do",   "why",       "page_url",    "runbook_url"}) {
    names[name];
  }
  return names;
}

// Chats refuse or cut longer texts: Slack those of more than 3,000 characters.
constexpr size_t kEscapedBytesMax = 2950;

std::string Escaped(const std::string& value) {
  std::string escaped;
  for (const char c : value) {
    if (escaped.size() > kEscapedBytesMax && (static_cast<unsigned char>(c) & 0xc0) != 0x80) return escaped + "...";
    escaped += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  }
  return escaped;
}

// Whether there were placeholders, and one that is not empty.
struct Seen {
  bool any = false, full = false;
};

// Fills a template, or finds what is wrong with it.
class Filler {
 public:
  explicit Filler(std::vector<StringMap> alerts) : alerts_(std::move(alerts)) {}

  Json Part(const std::string& path, const Json& part, const StringMap& values, int depth, Seen* seen) {
    if (depth > BodyTemplate::kDepthMax) {
      Report(path, "...", absl::StrCat("nested more than ", BodyTemplate::kDepthMax));
    }
    if (part.is_string()) return Text(path, part.get_ref<const std::string&>(), values, seen);
    if (!wrong_.ok()) return {};
    if (!part.is_structured()) return part;
    if (part.is_object() && part.contains(kEachAlert)) return EachAlert(path, part, depth, seen);
    Json filled = part.is_array() ? Json::array() : Json::object();
    for (const auto& [key, value] : part.items()) {
      const std::string shown = CleanText(key, kShownBytesMax);
      const std::string below =
          part.is_array() ? absl::StrCat(path, "[", key, "]") : absl::StrCat(path, path.empty() ? "" : ".", shown);
      if (absl::StrContains(key, "{{")) Report(below, "...", absl::StrCat("a key must be plain, or ", kEachAlert));
      Seen here;
      Json made = Part(below, value, values, depth + 1, &here);
      seen->any |= here.any;
      seen->full |= here.full;
      if (here.any && !here.full) continue;
      if (part.is_array()) {
        filled.push_back(std::move(made));
      } else {
        filled[key] = std::move(made);
      }
    }
    return filled;
  }

  const absl::Status& wrong() const { return wrong_; }

 private:
  Json EachAlert(const std::string& path, const Json& part, int depth, Seen* seen) {
    if (part.size() > 1 || inside_ || path.empty()) {
      Report(path, "{...}",
             absl::StrCat(kEachAlert, " must be the only key of its map, below the outermost map, not in another ",
                          kEachAlert));
    }
    Json filled = Json::array();
    inside_ = true;
    for (const StringMap& alert : alerts_) {
      filled.push_back(Part(absl::StrCat(path, ".", kEachAlert), part.at(kEachAlert), alert, depth + 1, seen));
    }
    inside_ = false;
    return filled;
  }

  std::string Text(const std::string& path, const std::string& text, const StringMap& values, Seen* seen) {
    std::string filled;
    size_t from = 0;
    for (size_t at = text.find("{{"); at != std::string::npos; at = text.find("{{", from)) {
      const size_t end = text.find("}}", at);
      if (end == std::string::npos) break;
      std::string name = text.substr(at + 2, end - at - 2);
      const bool html = name.ends_with(kHtml);
      if (html) name.resize(name.size() - kHtml.size());
      const auto value = values.find(name);
      if (value == values.end()) {
        const auto names = [](std::string* out, const auto& entry) { out->append(entry.first); };
        Report(path, text,
               absl::StrCat("{{", CleanText(name, kShownBytesMax), "}} must be one of ",
                            absl::StrJoin(values, ", ", names), ", without spaces; |html may follow",
                            inside_ ? "" : absl::StrCat("; there are more in {\"", kEachAlert, "\": ...}")));
        return text;
      }
      filled.append(text, from, at - from);
      filled += html ? Escaped(value->second) : value->second;
      seen->any = true;
      seen->full |= !value->second.empty();
      from = end + 2;
    }
    if (text.find("{{", from) != std::string::npos) Report(path, text, "{{ has no }} behind it");
    return filled.append(text, from);
  }

  // The first finding stays.
  void Report(const std::string& path, const std::string& value, const std::string& legal) {
    wrong_.Update(absl::InvalidArgumentError(
        absl::StrCat(path.empty() ? "the document" : path, " = ", CleanText(value, kShownBytesMax), ": ", legal)));
  }

  const std::vector<StringMap> alerts_;
  bool inside_ = false;  // {{alerts}}
  absl::Status wrong_;
};

const char* Color(const Json& alert) {
  if (alert.at("status") == "resolved") return "#2eb886";
  return alert.at("labels").at("severity") == "critical" ? "#d7191c" : "#f0a30a";
}

StringMap AlertValues(const Json& alert, const StringMap& of_all) {
  StringMap values = NamesOfAlert();
  for (const auto& [name, value] : of_all) values[name] = value;
  for (const char* texts : {"labels", "annotations"}) {
    for (const auto& [name, value] : alert.at(texts).items()) values[name] = value.get<std::string>();
  }
  // The summary is "CRITICAL run: sentence".
  const std::string& summary = values["summary"];
  const std::string before = absl::StrCat(" ", values["run"], ": ");
  const size_t at = summary.find(before);
  values["sentence"] = at == std::string::npos ? summary : summary.substr(at + before.size());
  const bool resolved = alert.at("status") == "resolved";
  values["title"] = absl::StrCat(resolved ? "RESOLVED" : absl::AsciiStrToUpper(values["severity"]), " ", values["run"]);
  const char* separator = ": ";
  for (const char* place : {"layer", "head"}) {
    if (!values[place].empty()) absl::StrAppend(&values["title"], separator, place, " ", values[place]);
    separator = " ";
  }
  values["color"] = Color(alert);
  values["status"] = alert.at("status").get<std::string>();
  values["url"] = alert.value("generatorURL", "");
  values["starts_at"] = alert.value("startsAt", "");
  values["fingerprint"] = alert.value("fingerprint", "");
  return values;
}

// One line for the phone's screen: the alert itself if it is one.
std::string Headline(const Json& notification, const StringMap& of_all, const std::vector<StringMap>& shown) {
  const Json& alerts = notification.at("alerts");
  const bool firing = of_all.at("status") == "firing";
  std::string line;
  if (alerts.size() == 1 && !shown[0].at("summary").empty()) {
    const std::string& summary = shown[0].at("summary");
    const size_t end = summary.find(". ");
    line = end == std::string::npos ? summary : summary.substr(0, end + 1);
  } else {
    std::string worst = "resolved";
    for (const char* const severity : {"info", "warning", "critical"}) {
      for (const Json& alert : alerts) {
        if (alert.at("status") == "firing" && alert.at("labels").at("severity") == severity) worst = severity;
      }
    }
    const bool imported = !shown.empty() && !shown[0].at("imported").empty();
    line = absl::StrCat(absl::AsciiStrToUpper(worst), " ", of_all.at("run"), imported ? " (imported): " : ": ",
                        alerts.size(), alerts.size() == 1 ? " alert" : " alerts", firing ? "" : ", all over");
  }
  const size_t more = alerts.size() - shown.size() + notification.value("truncatedAlerts", size_t{0});
  if (more > 0) absl::StrAppend(&line, " (", more, " not shown)");
  const std::string& others = of_all.at("others");
  if (others != "0") absl::StrAppend(&line, " (", others, others == "1" ? " other fires)" : " others fire)");
  return line;
}

}  // namespace

BodyTemplate::BodyTemplate(std::shared_ptr<const Json> root) : root_(std::move(root)) {}

absl::StatusOr<BodyTemplate> BodyTemplate::Parse(std::string_view text) {
  std::vector<std::set<std::string>> keys;  // Of the maps around what is read.
  std::string twice;
  const auto look = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      twice = parsed.get<std::string>();
    }
    return true;
  };
  auto root = std::make_shared<Json>();
  try {
    *root = Json::parse(text, look);
  } catch (const Json::parse_error& error) {
    return absl::InvalidArgumentError(absl::StrCat("is no JSON: ", CleanText(error.what(), 300)));
  }
  if (!twice.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("key ", CleanText(twice, kShownBytesMax), " stands twice in its map"));
  }
  if (!root->is_object()) return absl::InvalidArgumentError("is no map of JSON");
  Filler filler({NamesOfAlert()});
  Seen seen;
  (void)filler.Part("", *root, NamesOfAll(), 1, &seen);
  if (!filler.wrong().ok()) return filler.wrong();
  return BodyTemplate(std::move(root));
}

Json BodyTemplate::Fill(const Json& notification) const {
  const Json& alerts = notification.at("alerts");
  const auto others = notification.value("otherAlertsFiring", size_t{0});
  size_t firing = others;
  for (const Json& alert : alerts) firing += alert.at("status") == "firing";
  StringMap values = NamesOfAll();
  values["run"] = notification.at("groupLabels").at("run").get<std::string>();
  values["status"] = firing > 0 ? "firing" : "resolved";
  values["firing"] = absl::StrCat(firing);
  values["others"] = absl::StrCat(others);
  values["receiver"] = notification.value("receiver", "");
  values["external_url"] = notification.value("externalURL", "");
  std::vector<StringMap> of_alerts;
  for (size_t i = 0; i < std::min(alerts.size(), kAlertsMax); ++i) of_alerts.push_back(AlertValues(alerts[i], values));
  values["headline"] = Headline(notification, values, of_alerts);
  for (StringMap& of_alert : of_alerts) of_alert["headline"] = values["headline"];
  Seen seen;
  return Filler(std::move(of_alerts)).Part("", *root_, values, 1, &seen);
}

}  // namespace bellwether::server
