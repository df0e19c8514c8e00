// run list, get, events, compare, annotate, import, export.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cli/cli.h"
#include "client_lib/src/regular_file.h"

namespace bellwether::cli {
namespace {

constexpr size_t kChunkBytes = 256 << 10;

struct ListRunsOptions {
  bool live = false;
  uint32_t limit = 100;
  std::string name;
};

ExitCode ListRuns(Cli* cli, const ListRunsOptions& options) {
  v1::ListRunsRequest request;
  request.set_live_only(options.live);
  request.set_limit(options.limit);
  request.set_name_contains(options.name);
  return CallAndPrint<v1::ListRunsRequest, v1::ListRunsResponse>(
      cli, &v1::Query::Stub::ListRuns, request,
      [cli, &options](Connection* connection, const v1::ListRunsResponse& response) {
        Table table = ForPeople() ? RunsForPeople(connection, response) : RunTable();
        if (!ForPeople()) {
          for (const v1::Run& run : response.runs()) table.rows.push_back(RunRow(run));
        }
        const bool none = response.runs().empty() && response.unanswered().empty();
        if (!none || !ForPeople()) Print(cli->output, table, response);
        const bool narrowed = options.live || !options.name.empty();
        if (none && !narrowed) SayHowToBegin(*connection);
        if (none && narrowed && ForPeople()) Complain("no such run; without --live and --name all are listed");
        if (static_cast<int>(response.total()) > response.runs_size()) {
          Complain(std::to_string(response.total() - static_cast<uint32_t>(response.runs_size())) +
                   " more runs (see --limit)");
        }
        ComplainOf(response.unanswered(), "runs are missing here");
        if (const uint32_t unserved = response.partitions_unserved(); unserved > 0) {
          Complain(std::to_string(unserved) +
                   (unserved == 1 ? " partition of the cluster is" : " partitions of the cluster are") +
                   " served by nobody just now: the runs there are missing here");
        }
        return kOk;
      });
}

struct NameOptions {
  std::string run;
};

// "2, the worst critical at L1 H3 since step 2,750"; the number alone where that is not known.
std::string FiringText(Connection* connection, const v1::Run& run) {
  const std::string count = std::to_string(run.alerts_firing());
  if (run.alerts_firing() == 0 || !ForPeople()) return count;
  v1::ListAlertsRequest request;
  request.set_run(Hex(run.description().uuid()));
  request.set_firing_only(true);
  v1::ListAlertsResponse response;
  grpc::ClientContext context;
  connection->Prepare(&context);
  if (!connection->stub().ListAlerts(&context, request, &response).ok()) return count;
  const v1::Transition* worst = nullptr;
  for (const v1::Alert& alert : response.alerts()) {
    const v1::Transition& last = alert.last();
    const auto rank = [](const v1::Transition& of) { return std::tuple(of.severity(), of.head() >= 0, of.stage()); };
    if (!alert.muted() && (worst == nullptr || rank(last) > rank(*worst))) worst = &last;
  }
  if (worst == nullptr) return count;
  const std::string at = worst->layer() < 0 ? "" : " at " + HeadText(worst->layer(), worst->head());
  return count + ", the worst " + SeverityName(worst->severity()) + at + " since step " + Integer(worst->first_step());
}

// On a terminal how many there are: the names of a hundred signals hide what else is told.
std::string SignalsText(const v1::Run& run) {
  if (ForPeople()) return std::to_string(run.signals_size()) + "; -o json has their names";
  std::string names;
  for (const std::string& name : run.signals()) names += (names.empty() ? "" : " ") + name;
  return names;
}

ExitCode GetRun(Cli* cli, const NameOptions& options) {
  v1::GetRunRequest request;
  request.set_run(options.run);
  const auto print = [cli](Connection* connection, const v1::Run& run) {
    const v1::RunDescription& is = run.description();
    std::string labels;
    for (const auto& [key, value] : std::map<std::string, std::string>(is.labels().begin(), is.labels().end())) {
      labels += (labels.empty() ? "" : " ") + key + "=" + value;
    }
    const v1::Layout& layout = is.layout();
    std::string state = run.ended() ? "ended " + run.end_reason() : "live";
    if (run.imported()) state += ", imported";
    Table table{.columns = {"FIELD", "VALUE"}};
    table.rows = {
        {"run", is.name()},
        {"uuid", Hex(is.uuid())},
        {"attempt", std::to_string(is.attempt())},
        {"state", state},
        {"step", Integer(run.step())},
        {"stage", Stage(run)},
        {"judged", JudgedText(run)},
        {"eta_steps", EtaText(run.eta())},
        {"alerts_firing", FiringText(connection, run)},
        {"loss", LossText(run, 6, "not reported")},
        {"layers", std::to_string(layout.layers())},
        {"heads", std::to_string(layout.heads())},
        {"kv_heads", std::to_string(layout.kv_heads())},
        {"head_dim", std::to_string(layout.head_dim())},
        {"attention", is.attention().kernel() + " " + is.attention().score_dtype()},
        {"framework", is.framework()},
        {"model", is.model()},
        {"ranks", run.ended() ? std::to_string(is.reporters()) + ", ended"
                              : std::to_string(run.ranks_reporting()) + " of " + std::to_string(is.reporters())},
        {"frames", std::to_string(run.frames())},
        {"frames_dropped", std::to_string(run.frames_dropped())},
        {"frames_stripped", std::to_string(run.frames_stripped())},
        {"steps_recorded", std::to_string(run.steps_recorded())},
        {"started", Time(run.started_unix_ns())},
        {"last_report", Time(run.last_report_unix_ns())},
        {"labels", labels},
        {"signals", SignalsText(run)}};
    Print(cli->output, table, run);
    return kOk;
  };
  return CallAndPrint<v1::GetRunRequest, v1::Run>(cli, &v1::Query::Stub::GetRun, request, print);
}

struct EventsOptions {
  std::string run;
  uint64_t limit = 10'000;
};

ExitCode Events(Cli* cli, const EventsOptions& options) {
  ExitCode code = kOk;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  constexpr uint64_t kPage = 1000;
  v1::ListEventsResponse all;
  v1::ListEventsRequest request;
  request.set_run(options.run);
  do {
    grpc::ClientContext context;
    connection->Prepare(&context);
    v1::ListEventsResponse page;
    request.set_limit(static_cast<uint32_t>(std::min(kPage, options.limit - static_cast<uint64_t>(all.events_size()))));
    request.set_after(all.next_after());
    const grpc::Status status = connection->stub().ListEvents(&context, request, &page);
    if (!status.ok()) return Report(connection.get(), status);
    all.clear_next_after();
    all.MergeFrom(page);
  } while (all.next_after() != 0 && static_cast<uint64_t>(all.events_size()) < options.limit);
  Table table{.columns = {"TIME", "ATTEMPT", "STEP", "KIND", "VALUE", "TEXT"}};
  for (const v1::Event& event : all.events()) {
    table.rows.push_back({Time(event.time_unix_ns()), std::to_string(event.attempt()), Integer(event.step()),
                          v1::EventKind_Name(event.kind()).substr(sizeof("EVENT_KIND_") - 1), Number(event.value()),
                          event.text()});
  }
  Print(cli->output, table, all);
  if (all.next_after() != 0) {
    Complain("the first " + std::to_string(all.events_size()) + " of " + std::to_string(all.total()) +
             " events; see --limit");
  }
  return kOk;
}

struct CompareOptions {
  std::string run, baseline, signal = "drift_ratio";
  uint32_t limit = 20;
};

ExitCode Compare(Cli* cli, const CompareOptions& options) {
  v1::CompareRunsRequest request;
  request.set_run(options.run);
  request.set_baseline(options.baseline);
  request.set_signal(options.signal);
  request.set_limit(options.limit);
  return CallAndPrint<v1::CompareRunsRequest, v1::CompareRunsResponse>(
      cli, &v1::Query::Stub::CompareRuns, request, [cli](const v1::CompareRunsResponse& response) {
        const bool named = response.heads_size() > 0 && !response.heads(0).name().empty();
        Table table{.columns = {"LAYER", "HEAD", "FIRST STEP", "LOG2 RATIO", "BAND"}};
        if (named) table.columns = {"ROW", "FIRST STEP", "LOG2 RATIO", "BAND"};
        for (const v1::HeadDifference& head : response.heads()) {
          std::vector<Cell> row = {std::to_string(head.layer()), std::to_string(head.head())};
          if (named) row = {head.name()};
          for (const std::string& cell :
               {Integer(head.first_step()), Number(head.ratio(), 4), Number(head.band(), 3)}) {
            row.emplace_back(cell);
          }
          table.rows.push_back(std::move(row));
        }
        Print(cli->output, table, response);
        const std::string what = named ? "row" : "head";
        Complain(std::to_string(response.heads_differing()) + " " + what +
                 (response.heads_differing() == 1 ? " differs" : "s differ") + ", compared up to step " +
                 Integer(response.step_end()));
        return kOk;
      });
}

struct AnnotateOptions {
  std::string run, text;
  int64_t step = -1;
  v1::EventKind kind = v1::EVENT_KIND_ANNOTATION;
};

ExitCode Annotate(Cli* cli, const AnnotateOptions& options) {
  ExitCode code = kOk;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  v1::GetRunRequest get;
  get.set_run(options.run);
  v1::Run run;
  grpc::ClientContext get_context;
  connection->Prepare(&get_context);
  grpc::Status status = connection->stub().GetRun(&get_context, get, &run);
  if (!status.ok()) return Report(connection.get(), status);
  v1::AnnotateRequest request;
  request.set_run(options.run);
  request.mutable_event()->set_attempt(run.description().attempt());
  request.mutable_event()->set_step(options.step >= 0 ? options.step : std::max<int64_t>(run.step(), 0));
  request.mutable_event()->set_kind(options.kind);
  request.mutable_event()->set_text(options.text);
  v1::AnnotateResponse response;
  grpc::ClientContext context;
  connection->Prepare(&context);
  status = connection->stub().Annotate(&context, request, &response);
  if (!status.ok()) return Report(connection.get(), status);
  Complain("noted at step " + std::to_string(request.event().step()) + " of " + run.description().name());
  return kOk;
}

struct ImportOptions {
  std::vector<std::string> files;
  std::string name;
  bool notify = false;
};

// Streams the open recording `name` to the server.
ExitCode Send(const ImportOptions& options, Connection* connection, const std::string& name, int file,
              v1::ImportRunResponse* response) {
  grpc::ClientContext context;
  connection->Prepare(&context, /*long_call=*/true);
  const auto stream = connection->stub().ImportRun(&context, response);
  v1::ImportRunRequest request;
  request.set_as_name(options.name);
  request.set_notify(options.notify);
  std::string chunk(kChunkBytes, '\0');
  ssize_t got;
  while ((got = read(file, chunk.data(), chunk.size())) != 0) {
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      Complain(name + ": " + std::strerror(errno));
      context.TryCancel();
      (void)stream->Finish();
      return kFailed;
    }
    request.set_chunk(chunk.substr(0, static_cast<size_t>(got)));
    if (!stream->Write(request)) break;
    request.clear_as_name();
    request.clear_notify();
  }
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  if (status.ok()) return kOk;
  const ExitCode code = CodeOf(status);
  if (code == kUnreachable) return Report(connection, status);
  return Report(connection, grpc::Status(status.error_code(), name + ": " + status.error_message()));
}

// One after the other: what is wrong with one is told, and the others are sent.
ExitCode Import(Cli* cli, const ImportOptions& options) {
  const size_t count = options.files.size();
  if (count > 1 && !options.name.empty()) {
    Complain("--name is one run's: must not stand where " + std::to_string(count) + " recordings are imported");
    return kUsage;
  }
  ExitCode worst = kOk;
  size_t done = 0;
  std::unique_ptr<Connection> connection;
  for (const std::string& name : options.files) {
    std::string why;
    const int file = client::OpenRegularFile(name, O_RDONLY, 0, &why);
    if (file < 0) {
      Complain(name + ": " + why);
      worst = std::max(worst, kFailed);
      continue;
    }
    ExitCode code = kOk;
    if (connection == nullptr) connection = Connect(cli->connect, &code);
    v1::ImportRunResponse response;
    if (connection != nullptr) code = Send(options, connection.get(), name, file, &response);
    close(file);
    worst = std::max(worst, code);
    if (code == kUnreachable || connection == nullptr) break;  // As it would be with the others.
    if (code != kOk) continue;
    const Table table{.columns = {"RUN", "FRAMES", "EVENTS"},
                      .rows = {{response.run().description().name(), std::to_string(response.frames()),
                                std::to_string(response.events())}}};
    if (count == 1) {
      Print(cli->output, table, response);
    } else {
      PrintItem(cli->output, table, response, done == 0);
    }
    ++done;
  }
  if (count > 1 && done < count) {
    Complain(std::to_string(count - done) + " of " + std::to_string(count) + " recordings were not imported");
  }
  return worst;
}

struct ExportOptions {
  std::string run, file;
};

// Reads the stream into `out`; what it wrote is told on stderr by the caller.
ExitCode Receive(Connection* connection, const std::string& run, std::ostream* out, uint64_t* bytes) {
  grpc::ClientContext context;
  connection->Prepare(&context, /*long_call=*/true);
  v1::ExportRunRequest request;
  request.set_run(run);
  const auto stream = connection->stub().ExportRun(&context, request);
  v1::ExportRunResponse response;
  while (stream->Read(&response)) {
    *bytes += response.chunk().size();
    if (!out->write(response.chunk().data(), static_cast<std::streamsize>(response.chunk().size()))) {
      context.TryCancel();
    }
  }
  const grpc::Status status = stream->Finish();
  if (!out->flush()) {
    Complain("cannot write: disk full, or nobody reads");
    return kFailed;
  }
  return Report(connection, status);
}

ExitCode Export(Cli* cli, const ExportOptions& options) {
  ExitCode code = kOk;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  uint64_t bytes = 0;
  if (options.file == "-") return Receive(connection.get(), options.run, &std::cout, &bytes);
  return ExportTo(connection.get(), options.run, options.file);
}

}  // namespace

ExitCode ExportTo(Connection* connection, const std::string& run, const std::string& file) {
  ExitCode code = kFailed;
  uint64_t bytes = 0;
  const bool whole = WriteWhole(file, [&](std::ostream* out) {
    code = Receive(connection, run, out, &bytes);
    return code == kOk;
  });
  if (!whole) return code == kOk ? kFailed : code;
  Complain("wrote " + std::to_string(bytes) + " bytes to " + file);
  return kOk;
}

Table RunTable() { return {.columns = {"RUN", "STEP", "STAGE", "LOSS", "FIRING", "ETA", "LAST REPORT", "STATE"}}; }

std::vector<Cell> RunRow(const v1::Run& run) {
  return {run.description().name(),
          Integer(run.step()),
          Stage(run),
          LossText(run, 5),
          std::to_string(run.alerts_firing()),
          EtaText(run.eta()),
          Time(run.last_report_unix_ns()),
          (run.ended() ? "ended" + (run.end_reason().empty() ? "" : ": " + run.end_reason()) : "live") +
              (run.imported() ? ", imported" : "")};
}

void AddRuns(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "run", "Training runs: what is known of them, and their recordings");
  CLI::App* command = nullptr;

  auto* const list = AddCommand<ListRunsOptions>(cli, noun, "list", "Lists runs, the worst first",
                                                 "bellwether run list --live -o json", &ListRuns, &command);
  command->add_flag("--live", list->live, "only runs that have not ended");
  command->add_option("--limit", list->limit, "at most so many, 1..1000")->capture_default_str();
  command->add_option("--name", list->name, "only runs whose name holds this");
  AddWatch(cli, command);

  const char* const which = "the run's name, or its uuid in hexadecimal";
  auto* const get =
      AddCommand<NameOptions>(cli, noun, "get", "Shows one run", "bellwether run get my-run", &GetRun, &command);
  command->add_option("run", get->run, which)->required()->type_name("RUN");

  AddRunExplain(cli, noun);
  AddRunWatch(cli, noun);
  AddRunChanges(cli, noun);

  auto* const events =
      AddCommand<EventsOptions>(cli, noun, "events", "Lists what happened to a run: restores, notes, ...",
                                "bellwether run events my-run", &Events, &command);
  command->add_option("run", events->run, which)->required()->type_name("RUN");
  command->add_option("--limit", events->limit, "at most so many, the oldest")
      ->capture_default_str()
      ->check(CLI::Range(uint64_t{1}, uint64_t{1'000'000}));

  auto* const compare = AddCommand<CompareOptions>(
      cli, noun, "compare", "Finds the heads, tensors or modules in which two runs differ, and from which step on",
      "bellwether run compare bf16 fp32 --signal wq_sigma", &Compare, &command);
  command->add_option("run", compare->run, which)->required()->type_name("RUN");
  command->add_option("baseline", compare->baseline, "the run to hold it against")->required()->type_name("RUN");
  command->add_option("--signal", compare->signal, "the signal to compare")->capture_default_str()->type_name("SIGNAL");
  command->add_option("--limit", compare->limit, "at most so many heads or rows, 1..1024")->capture_default_str();

  auto* const annotate =
      AddCommand<AnnotateOptions>(cli, noun, "annotate", "Notes something at a step of a run",
                                  "bellwether run annotate my-run \"new data mix\" --kind data", &Annotate, &command);
  command->add_option("run", annotate->run, which)->required()->type_name("RUN");
  command->add_option("text", annotate->text, "the words, up to 256 bytes")->required();
  command->add_option("--step", annotate->step, "the step; else the newest")->check(CLI::NonNegativeNumber);
  AddChoice<v1::EventKind>(command, "--kind", &annotate->kind,
                           {{"annotation", v1::EVENT_KIND_ANNOTATION},
                            {"data", v1::EVENT_KIND_DATA},
                            {"restore", v1::EVENT_KIND_RESTORE},
                            {"evaluation", v1::EVENT_KIND_EVALUATION}},
                           "what happened (default annotation)");

  auto* const import =
      AddCommand<ImportOptions>(cli, noun, "import", "Sends recorded runs (.bwrun) to the server",
                                "bellwether run import incident.bwrun --name incident-42", &Import, &command);
  command->add_option("files", import->files, "the recordings")->required()->check(CLI::ExistingFile);
  command->add_option("--name", import->name, "name of the run on the server; else the recorded one");
  command->add_flag("--notify", import->notify,
                    "tell people of its alerts, as of a run that lives; else it is only judged");

  auto* const exported = AddCommand<ExportOptions>(cli, noun, "export", "Fetches a run as a recording (.bwrun)",
                                                   "bellwether run export my-run my-run.bwrun", &Export, &command);
  command->add_option("run", exported->run, which)->required()->type_name("RUN");
  command->add_option("file", exported->file, "where to write it; - = standard output")->required()->type_name("FILE");
}

}  // namespace bellwether::cli
