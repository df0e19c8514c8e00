// alert list, get, watch, ack, silence, false-alarm.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cli/benchmark_case.h"
#include "cli/cli.h"
#include "cli/follow.h"

namespace bellwether::cli {
namespace {

using namespace std::chrono_literals;

int Colour(const v1::Transition& transition) {
  if (transition.state() != v1::ALERT_STATE_FIRING) return -1;
  return transition.severity() == v1::SEVERITY_CRITICAL  ? 196
         : transition.severity() == v1::SEVERITY_WARNING ? 214
                                                         : -1;
}

std::string FalseAlarmText(const v1::Alert& alert) {
  const v1::FalseAlarm& said = alert.false_alarm();
  const std::string by = said.by().empty() ? "" : " by " + said.by();
  return "false alarm" + by + " (" + said.reason() + ")" +
         (alert.muted() ? "" : std::string(" as ") + SeverityName(said.severity()) + " only");
}

std::string Notes(const v1::Alert& alert, bool with_owner) {
  std::string notes;
  if (with_owner && alert.acknowledged()) {
    notes = "acknowledged" + (alert.acknowledged_by().empty() ? "" : " by " + alert.acknowledged_by());
  }
  if (alert.silenced_until_unix_ns() > NowUnixNs()) {
    const std::string end = Time(alert.silenced_until_unix_ns());
    notes += (notes.empty() ? "" : ", ") + std::string(ForPeople() ? "silenced, ends " : "silenced until ") + end;
  }
  if (alert.has_false_alarm()) notes += (notes.empty() ? "" : ", ") + FalseAlarmText(alert);
  return notes + (alert.comment().empty() ? "" : (notes.empty() ? "" : ": ") + alert.comment());
}

// What a terminal has room for; the summary, below, says the rule and the place as well.
std::vector<std::string> Texts() { return {"OWNER", "WAITING", "NOTES", "SUMMARY", "DO"}; }

// "attention.center_k, L1 H2 (6f1b0a2c-3)"; where there is nothing to say: for people nothing, else "-".
std::string WaitingText(const v1::Alert& alert) {
  std::string text;
  for (const v1::Action& action : alert.proposed()) {
    text += (text.empty() ? "" : "; ") + ActionText(action) + (action.not_allowed().empty() ? "" : ", not allowed");
  }
  return text.empty() && !ForPeople() ? "-" : text;
}

std::string OwnerText(const v1::Alert& alert) {
  if (!alert.acknowledged()) return ForPeople() ? "" : "-";
  return alert.acknowledged_by().empty() ? "somebody" : alert.acknowledged_by();
}

Table AlertTable() {
  if (ForPeople()) {
    return {
        .columns = {"RUN", "STATE", "SEVERITY", "HEAD", "SINCE", "LEFT", "KEY", "OWNER", "WAITING", "NOTES", "SUMMARY"},
        .texts = Texts()};
  }
  return {.columns = {"RUN", "STATE", "SEVERITY", "RULE", "HEAD", "SINCE", "STEP", "ETA", "KEY", "OWNER", "WAITING",
                      "NOTES", "SUMMARY"}};
}

std::vector<Cell> AlertRow(const v1::Alert& alert) {
  const v1::Transition& last = alert.last();
  const int colour = alert.muted() ? -1 : Colour(last);
  if (ForPeople()) {
    return {last.run(),
            Cell(StateName(last.state()), colour),
            Cell(SeverityName(last.severity()), colour),
            HeadText(last.layer(), last.head()),
            Integer(last.first_step()),
            EtaText(last.eta()),
            last.key(),
            OwnerText(alert),
            WaitingText(alert),
            Notes(alert, false),
            SummaryText(last)};
  }
  return {last.run(),
          Cell(StateName(last.state()), colour),
          Cell(SeverityName(last.severity()), colour),
          last.rule(),
          HeadText(last.layer(), last.head()),
          Integer(last.first_step()),
          Integer(last.step()),
          EtaText(last.eta()),
          last.key(),
          OwnerText(alert),
          WaitingText(alert),
          Notes(alert, false),
          last.summary()};
}

ExitCode PrintAlert(Cli* cli, const v1::Alert& alert) {
  Table table = AlertTable();
  table.rows.push_back(AlertRow(alert));
  Print(cli->output, table, alert);
  return kOk;
}

struct ListAlertsOptions {
  std::string run;
  bool firing = false, exit_code = false;
  v1::Severity severity = v1::SEVERITY_UNSPECIFIED;
  uint32_t limit = 100;
};

ExitCode ListAlerts(Cli* cli, const ListAlertsOptions& options) {
  v1::ListAlertsRequest request;
  request.set_run(options.run);
  request.set_firing_only(options.firing);
  request.set_severity_min(options.severity);
  request.set_limit(options.limit);
  return CallAndPrint<v1::ListAlertsRequest, v1::ListAlertsResponse>(
      cli, &v1::Query::Stub::ListAlerts, request, [cli, &options](const v1::ListAlertsResponse& response) {
        Table table = AlertTable();
        bool firing = false;
        for (const v1::Alert& alert : response.alerts()) {
          table.rows.push_back(AlertRow(alert));
          firing = firing || (alert.last().state() == v1::ALERT_STATE_FIRING && !alert.muted());
        }
        Print(cli->output, table, response);
        ComplainOf(response.unanswered(), "alerts stand here without people's notes");
        return options.exit_code && firing ? kFindings : kOk;
      });
}

struct GetAlertOptions {
  std::string run, key;
};

ExitCode GetAlert(Cli* cli, const GetAlertOptions& options) {
  v1::GetAlertRequest request;
  request.set_run(options.run);
  request.set_key(options.key);
  return CallAndPrint<v1::GetAlertRequest, v1::GetAlertResponse>(
      cli, &v1::Query::Stub::GetAlert, request, [cli](const v1::GetAlertResponse& response) {
        const v1::Alert& alert = response.alert();
        const v1::Transition& last = alert.last();
        std::string heads;
        for (const v1::LayerHead& head : last.heads()) {
          heads += (heads.empty() ? "" : ", ") +
                   HeadText(static_cast<int32_t>(head.layer()), static_cast<int32_t>(head.head()));
        }
        Section facts;
        facts.table = {.columns = {"FIELD", "VALUE"},
                       .rows = {{"run", last.run()},
                                {"key", last.key()},
                                {"state", Cell(StateName(last.state()), Colour(last))},
                                {"severity", Cell(SeverityName(last.severity()), Colour(last))},
                                {"stage", Stage(last.stage())},
                                {"first_step", Integer(last.first_step())},
                                {"step", Integer(last.step())},
                                {"eta_steps", EtaText(last.eta())},
                                {"heads", heads + (last.heads_total() > static_cast<uint32_t>(last.heads_size())
                                                       ? " of " + std::to_string(last.heads_total())
                                                       : "")},
                                {"cause", last.cause()},
                                {"summary", SummaryText(last)},
                                {"siblings", last.siblings()},
                                {"do", last.do_first()},
                                {"advice", last.advice()},
                                {"notes", Notes(alert, true)}}};
        Section evidence{.title = "evidence"};
        evidence.table.columns = {"SIGNAL",   "HEAD",  "VALUE",    "THRESHOLD", "BASELINE",
                                  "SIBLINGS", "SINCE", "DETECTOR", "TEXT"};
        for (const v1::Evidence& item : last.evidence()) {
          evidence.table.rows.push_back({SignalText(item.signal()), HeadText(item.layer(), item.head()),
                                         Number(item.value(), 4), Number(item.threshold(), 4),
                                         Number(item.baseline(), 4), BandText(item.siblings()),
                                         Integer(item.first_step()), item.detector(), item.text()});
        }
        Section history{.title = "history"};
        history.table.columns = {"TIME", "STATE", "SEVERITY", "STAGE", "STEP", "SUMMARY"};
        for (const v1::Transition& transition : alert.history()) {
          history.table.rows.push_back({Time(transition.time_unix_ns()), StateName(transition.state()),
                                        SeverityName(transition.severity()), Stage(transition.stage()),
                                        Integer(transition.step()), SummaryText(transition)});
        }
        std::vector<Section> sections = {facts, evidence, history};
        if (!alert.false_alarm_history().empty()) {
          Section& said = sections.emplace_back(Section{.title = "false alarm"});
          said.table.columns = {"TIME", "SAID", "BY", "REASON", "KEY", "SEVERITY", "STEP", "CAUSE"};
          for (const v1::FalseAlarm& mark : alert.false_alarm_history()) {
            said.table.rows.push_back({Time(mark.time_unix_ns()), mark.undone() ? "undone" : "false alarm", mark.by(),
                                       mark.reason(), mark.key(), SeverityName(mark.severity()), Integer(mark.step()),
                                       mark.cause()});
          }
        }
        if (!response.actions().empty()) {
          Section& actions = sections.emplace_back(Section{.title = "actions", .table = ActionTable()});
          for (const v1::Action& action : response.actions()) actions.table.rows.push_back(ActionRow(action));
        }
        Print(cli->output, sections, response);
        return kOk;
      });
}

struct WatchAlertsOptions {
  std::string run;
  v1::Severity severity = v1::SEVERITY_UNSPECIFIED;
  uint64_t after = 0;
  bool only_new = false;
};

// What was told without an id: a connection that is made anew tells it again.
class Unstored {
 public:
  bool New(const v1::Transition& transition) {
    if (told_.size() >= kMax) told_.clear();
    return told_.insert(transition.run_uuid() + transition.key() + '/' + std::to_string(transition.k())).second;
  }

 private:
  static constexpr size_t kMax = 4096;  // As many as a server keeps.
  std::set<std::string> told_;
};

// A line of `alert watch`.  It stays where it is, so that its time is a date.
Table TransitionTable() {
  if (!ForPeople()) {
    return {.columns = {"ID", "TIME", "RUN", "STATE", "SEVERITY", "STEP", "HEAD", "ETA", "KEY", "SUMMARY"}};
  }
  return {.columns = {"TIME", "RUN", "STATE", "SEVERITY", "HEAD", "STEP", "KEY", "SUMMARY", "DO"},
          .texts = Texts(),
          .texts_below = true,
          .widths = {20, 12, 8, 8, 6, 6, 4}};
}

std::vector<Cell> TransitionRow(const v1::Transition& transition) {
  const Cell state(StateName(transition.state()), Colour(transition));
  const Cell severity(SeverityName(transition.severity()), Colour(transition));
  const std::string head = HeadText(transition.layer(), transition.head()), step = Integer(transition.step());
  if (ForPeople()) {
    return {Date(transition.time_unix_ns()), transition.run(),  state, severity, head, step, transition.key(),
            SummaryText(transition),         DoText(transition)};
  }
  return {transition.id() == 0 ? "-" : std::to_string(transition.id()),
          Date(transition.time_unix_ns()),
          transition.run(),
          state,
          severity,
          step,
          head,
          EtaText(transition.eta()),
          transition.key(),
          transition.summary()};
}

ExitCode WatchAlerts(Cli* cli, const WatchAlertsOptions& options) {
  v1::WatchAlertsRequest request;
  request.set_after_id(options.only_new ? UINT64_MAX : options.after);
  request.set_run(options.run);
  request.set_severity_min(options.severity);
  const Table header = TransitionTable();
  bool first = true;
  Unstored unstored;
  return Follow(cli->connect, [&](Connection* connection, grpc::ClientContext* context, const auto& heard) {
    StreamEnd end;
    const auto stream = connection->stub().WatchAlerts(context, request);
    v1::WatchAlertsResponse response;
    while (!end.enough && stream->Read(&response)) {
      heard();
      if (response.body_case() == v1::WatchAlertsResponse::kResyncFrom) {
        Complain("too slow a reader: asking again after " + std::to_string(response.resync_from()));
        request.set_after_id(response.resync_from());
        end.again = true;
      }
      // An older server does not say it: then --new begins anew with each connection.
      if (response.has_caught_up_id()) request.set_after_id(response.caught_up_id());
      if (response.body_case() != v1::WatchAlertsResponse::kTransition) continue;
      const v1::Transition& transition = response.transition();
      if (transition.id() == 0 && !unstored.New(transition)) continue;
      if (transition.id() != 0) request.set_after_id(transition.id());
      Table table = header;
      table.rows.push_back(TransitionRow(transition));
      end.enough = !PrintItem(cli->output, table, transition, first);
      first = false;
    }
    if (end.enough) context->TryCancel();
    end.status = stream->Finish();
    return end;
  });
}

struct RecordOptions {
  std::string run, key, comment, by = UserName();
  std::chrono::milliseconds time{0};
};

ExitCode Acknowledge(Cli* cli, const RecordOptions& options) {
  v1::AcknowledgeAlertRequest request;
  request.set_run(options.run);
  request.set_key(options.key);
  request.set_by(options.by);
  request.set_comment(options.comment);
  return CallAndPrint<v1::AcknowledgeAlertRequest, v1::Alert>(
      cli, &v1::Query::Stub::AcknowledgeAlert, request,
      [cli](const v1::Alert& alert) { return PrintAlert(cli, alert); });
}

ExitCode Silence(Cli* cli, const RecordOptions& options) {
  v1::SilenceAlertRequest request;
  request.set_run(options.run);
  request.set_key(options.key);
  request.set_by(options.by);
  request.set_comment(options.comment);
  request.set_seconds(static_cast<uint32_t>(std::chrono::ceil<std::chrono::seconds>(options.time).count()));
  return CallAndPrint<v1::SilenceAlertRequest, v1::Alert>(
      cli, &v1::Query::Stub::SilenceAlert, request, [cli](const v1::Alert& alert) { return PrintAlert(cli, alert); });
}

struct FalseAlarmOptions {
  std::string run, key, reason, directory, by = UserName();
  bool undo = false;
};

ExitCode MarkFalseAlarm(Cli* cli, const FalseAlarmOptions& options) {
  if (options.reason.empty() && !options.undo) {
    Complain("--reason is required: why is it a false alarm?");
    return kUsage;
  }
  ExitCode code = kOk;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  v1::MarkFalseAlarmRequest request;
  request.set_run(options.run);
  request.set_key(options.key);
  request.set_by(options.by);
  request.set_reason(options.reason);
  request.set_undo(options.undo);
  v1::Alert alert;
  grpc::ClientContext context;
  connection->Prepare(&context);
  const grpc::Status status = connection->stub().MarkFalseAlarm(&context, request, &alert);
  if (!status.ok()) return Report(connection.get(), status);
  PrintAlert(cli, alert);
  return options.directory.empty() ? kOk : WriteBenchmarkCase(connection.get(), options.run, options.directory);
}

void AddSeverity(CLI::App* command, v1::Severity* severity) {
  AddChoice<v1::Severity>(
      command, "--severity", severity,
      {{"info", v1::SEVERITY_INFO}, {"warning", v1::SEVERITY_WARNING}, {"critical", v1::SEVERITY_CRITICAL}},
      "none below this");
}

void AddNote(CLI::App* command, RecordOptions* note) {
  command->add_option("run", note->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("key", note->key, "the alert's key, as `alert list` shows it")->required()->type_name("KEY");
  command->add_option("--comment", note->comment, "why, up to 256 bytes");
  command->add_option("--by", note->by, "your name; else $USER, else your login");
}

}  // namespace

void AddAlerts(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "alert", "Alerts: what was concluded, on what evidence, and its notes");
  CLI::App* command = nullptr;

  auto* const list = AddCommand<ListAlertsOptions>(cli, noun, "list", "Lists alerts, firing ones first",
                                                   "bellwether alert list --firing --severity critical --exit-code",
                                                   &ListAlerts, &command);
  command->add_option("--run", list->run, "only this run's")->type_name("RUN");
  command->add_flag("--firing", list->firing, "only those that fire");
  AddSeverity(command, &list->severity);
  command->add_option("--limit", list->limit, "at most so many, 1..1000")->capture_default_str();
  command->add_flag("--exit-code", list->exit_code, "exit with 3 if a listed alert fires that is not muted");
  AddWatch(cli, command);

  auto* const get = AddCommand<GetAlertOptions>(cli, noun, "get", "Shows an alert with its evidence and history",
                                                "bellwether alert get my-run a1", &GetAlert, &command);
  command->add_option("run", get->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("key", get->key, "the alert's key, as `alert list` shows it")->required()->type_name("KEY");

  auto* const watch =
      AddCommand<WatchAlertsOptions>(cli, noun, "watch", "Shows every transition, the stored ones first, until Ctrl-C",
                                     "bellwether alert watch --new -o json", &WatchAlerts, &command);
  command->add_option("--run", watch->run, "only this run's")->type_name("RUN");
  AddSeverity(command, &watch->severity);
  auto* const after = command->add_option("--after", watch->after, "only transitions with a higher id: resumes");
  command->add_flag("--new", watch->only_new, "none of the stored ones")->excludes(after);

  auto* const ack =
      AddCommand<RecordOptions>(cli, noun, "ack", "Acknowledges an alert: somebody looks after it",
                                "bellwether alert ack my-run a1 --comment \"on it\"", &Acknowledge, &command);
  AddNote(command, ack);

  auto* const silence = AddCommand<RecordOptions>(cli, noun, "silence", "Stops notifications of an alert for a while",
                                                  "bellwether alert silence my-run a1 --for 2h", &Silence, &command);
  AddNote(command, silence);
  AddTime(command, "--for", &silence->time, 1s, 720h, "how long, such as 30m or 2h");
  command->get_option("--for")->required();

  auto* const mark = AddCommand<FalseAlarmOptions>(
      cli, noun, "false-alarm", "Marks an alert as a false alarm: its illness is muted in this run",
      "bellwether alert false-alarm my-run a1 --reason \"the data mix changed\"", &MarkFalseAlarm, &command);
  command->add_option("run", mark->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("key", mark->key, "the alert's key, as `alert list` shows it")->required()->type_name("KEY");
  command->add_option("--reason", mark->reason, "why, up to 256 bytes; required without --undo");
  command->add_option("--by", mark->by, "your name; else $USER, else your login");
  auto* const undo = command->add_flag("--undo", mark->undo, "takes the mark back: people are notified again");
  command->add_option("--export", mark->directory, "also writes the run there, as a healthy case of the benchmark")
      ->type_name("DIR")
      ->excludes(undo);
}

}  // namespace bellwether::cli
