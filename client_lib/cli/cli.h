// cli.h: what the commands share.
//
// Each noun adds its commands to the tree and leaves, when one of them is
// chosen, an action; main() parses, then runs the action once.

#ifndef BELLWETHER_CLI_CLI_H_
#define BELLWETHER_CLI_CLI_H_

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/connect.h"
#include "cli/exit_code.h"
#include "cli/nearest.h"
#include "cli/output.h"
#include "cli/trouble.h"

namespace bellwether::cli {

struct Cli {
  CLI::App app;
  ConnectOptions connect;
  OutputOptions output;
  std::chrono::milliseconds every{0};  // --watch: the action again and again.
  std::function<ExitCode()> action;
};

void AddRuns(Cli* cli);
void AddRunWatch(Cli* cli, CLI::App* noun);
void AddRunChanges(Cli* cli, CLI::App* noun);  // rename, delete (run_changes.cc)
void AddHeads(Cli* cli);                       // head top, matrix
void AddSeries(Cli* cli);
void AddTensors(Cli* cli);  // tensor top
void AddAlerts(Cli* cli);
void AddActions(Cli* cli);
void AddPolicies(Cli* cli);
void AddBaselines(Cli* cli);
void AddAccess(Cli* cli);  // cert, token: they run bellwetherd
void AddServer(Cli* cli);  // server info, version
void AddReplay(Cli* cli);  // replay, check, rules: they run bellwetherd; scorecard: bellwether-lab
void AddCompletion(Cli* cli);
void AddOpen(Cli* cli);  // open
void AddRunExplain(Cli* cli, CLI::App* noun);
// What the scripts of `completion` call: `words` are those after the command's
// own, up to the cursor.
constexpr char kCandidates[] = "candidates";
ExitCode Candidates(Cli* cli, const std::vector<std::string>& words);

// Becomes `program` with these arguments; returns only if it cannot be started.
void Execute(const std::vector<std::string>& arguments, const std::string& program = "bellwetherd");

// Adds `parent` `name` with its help: `what` in one line and an example.
// `T` holds the command's options; `run` gets them.
template <typename T>
T* AddCommand(Cli* cli, CLI::App* parent, const std::string& name, const std::string& what, const std::string& example,
              ExitCode (*run)(Cli*, const T&), CLI::App** command) {
  *command = parent->add_subcommand(name, what);
  (*command)->footer("Example:\n  " + example);
  auto options = std::make_shared<T>();
  (*command)->callback([cli, options, run] { cli->action = [cli, options, run] { return run(cli, *options); }; });
  return options.get();
}

// What words of a command line mean, as far as that can be said before they are parsed.
struct CommandWords {
  const CLI::App* command;
  const CLI::Option* awaits = nullptr;  // This option's value is next.
  std::vector<std::string> positionals;
  std::vector<std::string> globals;  // As given, to reach the same server.
};
CommandWords WalkCommand(const CLI::App* root, const std::vector<std::string>& words);

struct NoOptions {};  // Of a command that has none.

// The flags that every command takes, less those that `command` has its own of.
std::vector<const CLI::Option*> GlobalsOf(const CLI::App* command);

// A noun that has commands, and does nothing alone.
CLI::App* AddNoun(Cli* cli, const std::string& name, const std::string& what);

// An option that takes one of a few words.  `words` is in the order of the help.
template <typename T>
void AddChoice(CLI::App* command, const std::string& name, T* value,
               const std::vector<std::pair<std::string, T>>& words, const std::string& what) {
  std::string all;
  for (const auto& [word, meaning] : words) all += (all.empty() ? "" : "|") + word;
  command
      ->add_option_function<std::string>(
          name,
          [name, value, words, all](const std::string& text) {
            for (const auto& [word, meaning] : words) {
              if (word == text) {
                *value = meaning;
                return;
              }
            }
            std::vector<std::string> known;
            for (const auto& [word, meaning] : words) known.push_back(word);
            throw CLI::ValidationError(name, "\"" + text + "\": must be " + all + DidYouMean(text, known));
          },
          what)
      ->type_name(all);
}

// --watch TIME, for commands that show what changes.
void AddWatch(Cli* cli, CLI::App* command);
// Runs the chosen action again and again until Ctrl-C or a failure.  Prints its
// output when that changes, on a terminal in the place of the last one.
ExitCode Repeat(Cli* cli);

// An option that takes a time such as 500ms, 10s or 2m, within these bounds.
void AddTime(CLI::App* command, const std::string& name, std::chrono::milliseconds* value,
             std::chrono::milliseconds min, std::chrono::milliseconds max, const std::string& what);

// The user: $USER, else the login.
std::string UserName();

// A run as a line (runs.cc).
Table RunTable();
std::vector<Cell> RunRow(const v1::Run& run);

// The same on a terminal, with each run's worst alert, which is asked for (run_list.cc).
Table RunsForPeople(Connection* connection, const v1::ListRunsResponse& response);
void SayHowToBegin(const Connection& connection);

// Fetches a run as a recording into a file, which is whole or not there (runs.cc).
ExitCode ExportTo(Connection* connection, const std::string& run, const std::string& file);

// An action as a line (actions.cc).
Table ActionTable();
std::vector<Cell> ActionRow(const v1::Action& action);
std::string ActionKindName(v1::ActionKind kind);   // "attention.center_k"
std::string ActionText(const v1::Action& action);  // "attention.center_k, L1 H2 (6f1b0a2c-3)"

// One call and its result.  `print` sees the response, and the connection for more questions.  On a
// terminal a question about a run takes the beginning of a name, too (CompleteRunNames).
template <typename Request, typename Response>
ExitCode CallAndPrint(Cli* cli,
                      grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                      Request request, const std::function<ExitCode(Connection*, const Response&)>& print) {
  ExitCode code = kOk;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  Response response;
  grpc::Status status;
  do {
    grpc::ClientContext context;
    connection->Prepare(&context);
    status = (connection->stub().*method)(&context, request, &response);
  } while (!status.ok() && CompleteRunNames(connection.get(), status, &request));
  return status.ok() ? print(connection.get(), response) : Report(connection.get(), status);
}
template <typename Request, typename Response>
ExitCode CallAndPrint(Cli* cli,
                      grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                      const Request& request, const std::function<ExitCode(const Response&)>& print) {
  return CallAndPrint<Request, Response>(cli, method, request,
                                         [&print](Connection*, const Response& response) { return print(response); });
}

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_CLI_H_
