// run explain: how a run is, on what evidence, and what to do.
//
// As `python -m bellwether explain` tells it, field by field and word by word: docs/query.md
// describes the fields, tests/e2e/test_explain.py holds the two against each other.  Both work on
// protobuf's JSON of the same answers, so that numbers are spelt alike.
#include <algorithm>
#include <cctype>
#include <cstdint>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cli/cli.h"
#include "cli/open_page.h"

namespace bellwether::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "bellwether.explain/1";
constexpr size_t kEvidenceMax = 4;  // Of an alert, in words.
constexpr uint32_t kAlertsMax = 1000;
constexpr const char* kStages[] = {"healthy", "drift", "ties and bias", "norm growth", "logits", "loss"};

struct ExplainOptions {
  std::string run;
  bool exit_code = false;
};

// Protobuf's JSON has 64-bit integers as texts.
int64_t Whole(const Json& value) {
  return value.is_string() ? std::stoll(value.get<std::string>()) : value.get<int64_t>();
}

// What is not finite is a text in protobuf's JSON, and null here.
Json Finite(const Json& value) { return value.is_number() ? value : Json(); }

Json Place(const Json& value) { return Whole(value) < 0 ? Json() : value; }

// ALERT_STATE_FIRING -> firing
std::string Word(const std::string& constant) {
  std::string word = constant.substr(constant.rfind('_') + 1);
  std::transform(word.begin(), word.end(), word.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return word;
}

std::string OneLine(const std::string& text) {
  std::string line = text;
  for (char& c : line) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) c = ' ';
  }
  return line;
}

Json EtaOf(const Json& told) {
  if (!told.value("known", false)) return nullptr;
  const double seconds = told["steps"].get<double>() * told.value("step_seconds", 0.0);
  return {{"steps", Finite(told["steps"])},
          {"lower_steps", Finite(told["lower_steps"])},
          {"upper_steps", Finite(told["upper_steps"])},
          {"seconds", seconds > 0 ? Json(seconds) : Json()}};
}

Json EvidenceOf(const Json& told) {
  return {{"signal", told["signal"]},
          {"layer", Place(told["layer"])},
          {"head", Place(told["head"])},
          {"value", Finite(told["value"])},
          {"threshold", Finite(told["threshold"])},
          {"baseline", Finite(told["baseline"])},
          {"first_step", Whole(told["first_step"])},
          {"detector", told["detector"]},
          {"text", told["text"]}};
}

Json AlertOf(const v1::Alert& alert, const Json& actions) {
  const Json told = Json::parse(ToJson(alert, false));
  const Json& last = told["last"];
  Json heads = Json::array(), evidence = Json::array();
  for (const Json& head : last["heads"]) heads.push_back({head["layer"], head["head"]});
  for (const Json& each : last["evidence"]) evidence.push_back(EvidenceOf(each));
  std::string summary = OneLine(last["summary"]);
  if (const std::string name = alert.last().run() + ": "; summary.rfind(name, 0) == 0) summary.erase(0, name.size());
  return {{"key", last["key"]},
          {"state", Word(last["state"])},
          {"severity", Word(last["severity"])},
          {"rule", last["rule"]},
          {"cause", last["cause"]},
          {"stage", last["stage"]},
          {"layer", Place(last["layer"])},
          {"head", Place(last["head"])},
          {"heads", heads},
          {"heads_total", last["heads_total"]},
          {"first_step", Whole(last["first_step"])},
          {"step", Whole(last["step"])},
          {"summary", summary},
          {"do", last.value("do_first", "")},
          {"advice", last["advice"]},
          {"eta", EtaOf(last.value("eta", Json::object()))},
          {"evidence", evidence},
          {"acknowledged_by", alert.acknowledged() ? told["acknowledged_by"] : Json()},
          {"false_alarm", alert.muted() ? Json(alert.false_alarm().reason()) : Json()},
          {"actions", actions}};
}

// As shlex.quote.
std::string Quoted(const std::string& word) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string("@%+=:,./-_").find(static_cast<char>(c)) != std::string::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\"'\"'" : std::string(1, c);
  return quoted + "'";
}

// Of what fires, the worst first.
Json ToDo(const std::string& run, bool ended, const Json& alerts) {
  Json found = Json::array();
  for (const Json& alert : alerts) {
    if (alert["state"] != "firing" || !alert["false_alarm"].is_null()) continue;
    const std::string first = alert[alert["do"] == "" ? "advice" : "do"];
    if (!first.empty()) found.push_back({{"alert", alert["key"]}, {"text", first}, {"command", nullptr}});
    for (const Json& action : alert["actions"]) {
      if (action["state"] != "proposed" || action["not_allowed"] != "" || ended) continue;
      const std::string id = action["id"];
      const std::string command = "bellwether action approve " + Quoted(run) + " " + Quoted(id);
      if (first.find(" " + id + "`") != std::string::npos) {
        found.back()["command"] = command;
        continue;
      }
      found.push_back({{"alert", alert["key"]},
                       {"text", "approve what is proposed: " + action["kind"].get<std::string>()},
                       {"command", command}});
    }
  }
  return found;
}

int Rank(const Json& severity) {
  return severity == "critical" ? 3 : severity == "warning" ? 2 : severity == "info" ? 1 : 0;
}

Json Explained(const v1::Run& told, std::vector<Json> alerts, const std::string& page) {
  const Json run = Json::parse(ToJson(told, false));
  const auto order = [](const Json& alert) {
    return std::tuple(alert["state"] != "firing", !alert["false_alarm"].is_null(), -Rank(alert["severity"]),
                      -alert["stage"].get<int>(), alert["first_step"].get<int64_t>());
  };
  std::stable_sort(alerts.begin(), alerts.end(), [&](const Json& a, const Json& b) { return order(a) < order(b); });
  bool any = false;
  Json severity;
  for (const Json& alert : alerts) {
    if (Rank(alert["severity"]) < 2 || !alert["false_alarm"].is_null()) continue;
    any = true;
    if (alert["state"] == "firing" && severity.is_null()) severity = alert["severity"];
  }
  const bool healthy = told.judged().text() == "healthy";  // Else it is too young for that.
  const std::string name = told.description().name();
  return {{"format", kFormat},
          {"run",
           {{"name", name},
            {"uuid", Hex(told.description().uuid())},
            {"step", told.step()},
            {"loss", Finite(run["loss"])},
            {"ended", told.ended()},
            {"end_reason", told.end_reason().empty() ? Json() : Json(told.end_reason())},
            {"imported", told.imported()},
            {"last_report_unix_ns", told.last_report_unix_ns()}}},
          {"verdict", !severity.is_null()      ? "ill"
                      : any                    ? "recovered"
                      : !told.judged().whole() ? "not judged"
                      : healthy                ? "healthy"
                                               : "nothing found"},
          {"severity", severity},
          {"stage", told.stage()},
          {"stage_name", told.stage() < std::size(kStages) ? Json(kStages[told.stage()]) : Json()},
          {"judged", {{"whole", told.judged().whole()}, {"text", told.judged().text()}}},
          {"eta", EtaOf(run.value("eta", Json::object()))},
          {"alerts", alerts},
          {"do", ToDo(name, told.ended(), alerts)},
          {"page", page.empty() ? Json() : Json(PageAddress(page, name))}};
}

std::string Why(const Json& evidence) {
  if (evidence["text"] != "") return evidence["text"];
  std::string where;
  for (const char* const name : {"layer", "head"}) {
    if (!evidence[name].is_null()) where += std::string(" ") + name + " " + evidence[name].dump();
  }
  const auto number = [&](const char* name) {
    return evidence[name].is_null() ? std::string("none") : Number(evidence[name].get<double>(), 4);
  };
  return evidence["signal"].get<std::string>() + (where.empty() ? "" : " of" + where) + " is " + number("value") +
         ", limit " + number("threshold") + ", since " + evidence["first_step"].dump();
}

// Each line with how far its continuation is moved in, on a terminal.
std::vector<std::pair<std::string, size_t>> InWords(const Json& told) {
  const Json& run = told["run"];
  std::vector<std::pair<std::string, size_t>> lines;
  const auto add = [&lines](const std::string& text, size_t margin = 0) { lines.emplace_back(OneLine(text), margin); };
  const Json& said = told["verdict"] == "nothing found" ? told["judged"]["text"] : told["verdict"];
  add(run["name"].get<std::string>() + ": " + said.get<std::string>() + ", " +
      (run["ended"].get<bool>() ? "ended" : "running") + ", step " + run["step"].dump());
  if (told["verdict"] == "not judged" || !told["judged"]["whole"].get<bool>()) {
    const auto text = told["judged"]["text"].get<std::string>();
    add(text.starts_with("judged by") ? text : "judged: " + text);
  }
  for (const Json& alert : told["alerts"]) {
    std::string marks = alert["severity"].get<std::string>() + ", " + alert["state"].get<std::string>();
    if (!alert["false_alarm"].is_null()) marks += ", a false alarm";
    if (alert["acknowledged_by"].is_string() && alert["acknowledged_by"] != "") {
      marks += ", acknowledged by " + alert["acknowledged_by"].get<std::string>();
    }
    const std::string cause = alert["cause"];
    add("");
    add(marks + ": " + alert["summary"].get<std::string>() +
            (cause.empty() || cause == "unknown" ? "" : " [" + cause + "]"),
        4);
    for (size_t i = 0; i < std::min(alert["evidence"].size(), kEvidenceMax); ++i)
      add("  why: " + Why(alert["evidence"][i]), 7);
    if (alert["state"] == "firing" && alert["advice"] != "" && alert["advice"] != alert["do"]) {
      add("  advice: " + alert["advice"].get<std::string>(), 10);
    }
  }
  bool first = true;
  for (const Json& each : told["do"]) {
    if (first) add("");
    first = false;
    add("do: " + each["text"].get<std::string>(), 4);
    if (each["command"].is_string()) add("    " + each["command"].get<std::string>());
  }
  add("");
  if (told["page"].is_string()) add(told["page"]);
  return lines;
}

void PrintExplained(Cli* cli, const Json& told) {
  switch (cli->output.format) {
    case Format::kJson:
      std::cout << told.dump(2, ' ', /*ensure_ascii=*/true) << '\n';
      return;
    case Format::kYaml:
      std::cout << ToYaml(told.dump());
      return;
    case Format::kCsv: {
      const Json& run = told["run"];
      const Json first = told["do"].empty() ? Json("") : told["do"][0]["text"];
      const Table table{.columns = {"RUN", "VERDICT", "SEVERITY", "STAGE", "STEP", "DO"},
                        .rows = {{run["name"].get<std::string>(), told["verdict"].get<std::string>(),
                                  told["severity"].is_null() ? "-" : told["severity"].get<std::string>(),
                                  told["stage"].dump(), run["step"].dump(), first.get<std::string>()}}};
      Print(cli->output, table, v1::Run());
      return;
    }
    case Format::kTable:
      break;
  }
  const size_t width = ForPeople() ? TerminalWidth() : 0;
  for (const auto& [line, margin] : InWords(told)) {
    if (width <= margin + 20 || Width(line) <= width || line.rfind("    ", 0) == 0) {  // A command is for pasting.
      std::cout << line << '\n';
      continue;
    }
    bool first = true;
    const size_t lead = line.size() - line.substr(std::min(line.find_first_not_of(' '), line.size())).size();
    for (const std::string& part : Wrap(line.substr(lead), width - margin)) {
      std::cout << std::string(first ? lead : margin, ' ') << part << '\n';
      first = false;
    }
  }
}

ExitCode ExplainRun(Cli* cli, const ExplainOptions& options) {
  v1::GetRunRequest request;
  request.set_run(options.run);
  return CallAndPrint<v1::GetRunRequest, v1::Run>(
      cli, &v1::Query::Stub::GetRun, request, [cli, &options](Connection* connection, const v1::Run& run) {
        const std::string uuid = Hex(run.description().uuid());
        v1::ListAlertsRequest ask;
        ask.set_run(uuid);
        ask.set_limit(kAlertsMax);
        v1::ListAlertsResponse listed;
        grpc::ClientContext context;
        connection->Prepare(&context);
        grpc::Status status = connection->stub().ListAlerts(&context, ask, &listed);
        if (!status.ok()) return Report(connection, status);
        std::vector<Json> alerts;
        for (const v1::Alert& alert : listed.alerts()) {
          Json actions = Json::array();
          if (alert.last().state() == v1::ALERT_STATE_FIRING) {  // What is over has nothing to approve.
            v1::GetAlertRequest get;
            get.set_run(uuid);
            get.set_key(alert.last().key());
            v1::GetAlertResponse whole;
            grpc::ClientContext one;
            connection->Prepare(&one);
            status = connection->stub().GetAlert(&one, get, &whole);
            if (!status.ok()) return Report(connection, status);
            for (const v1::Action& action : whole.actions()) {
              actions.push_back({{"id", action.id()},
                                 {"kind", ActionKindName(action.kind())},
                                 {"state", Word(v1::ActionState_Name(action.state()))},
                                 {"not_allowed", action.not_allowed()}});
            }
          }
          alerts.push_back(AlertOf(alert, actions));
        }
        std::string page = PageOf(connection, &status);
        if (!status.ok() && CodeOf(status) != kDenied) return Report(connection, status);
        // Of a private server alone, which nothing else opens: what is printed may be kept in logs.
        if (!page.empty() && !connection->page_token().empty()) page += "?token=" + connection->page_token();
        const Json told = Explained(run, std::move(alerts), page);
        PrintExplained(cli, told);
        return options.exit_code && !told["severity"].is_null() ? kFindings : kOk;
      });
}

}  // namespace

void AddRunExplain(Cli* cli, CLI::App* noun) {
  CLI::App* command = nullptr;
  auto* const explain = AddCommand<ExplainOptions>(
      cli, noun, "explain", "Says how a run is: the verdict, the evidence, what to do and where to look",
      "bellwether run explain my-run -o json", &ExplainRun, &command);
  command->add_option("run", explain->run, "the run's name, or its uuid in hexadecimal")->required()->type_name("RUN");
  command->add_flag("--exit-code", explain->exit_code, "exit with 3 if a warning or more fires");
}

}  // namespace bellwether::cli
