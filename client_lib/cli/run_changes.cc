// `bellwether run rename` and `bellwether run delete`.
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

struct RenameOptions {
  std::string run, name;
};

ExitCode Rename(Cli* cli, const RenameOptions& options) {
  v1::RenameRunRequest request;
  request.set_run(options.run);
  request.set_name(options.name);
  return CallAndPrint<v1::RenameRunRequest, v1::Run>(cli, &v1::Query::Stub::RenameRun, request,
                                                     [cli](const v1::Run& run) {
                                                       Table table = RunTable();
                                                       table.rows.push_back(RunRow(run));
                                                       Print(cli->output, table, run);
                                                       return kOk;
                                                     });
}

struct DeleteOptions {
  std::vector<std::string> runs;
  bool yes = false;
};

// Whether the person at the terminal says yes.
bool Confirms(const std::string& question) {
  std::cerr << question << " [y/N] " << std::flush;
  std::string answer;
  return std::getline(std::cin, answer) && (answer == "y" || answer == "Y" || answer == "yes");
}

ExitCode Delete(Cli* cli, const DeleteOptions& options) {
  if (!options.yes && isatty(STDIN_FILENO) == 0) {
    Complain("--yes is required where nobody can be asked: a deleted run cannot be brought back");
    return kUsage;
  }
  ExitCode code = kOk;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  for (const std::string& run : options.runs) {
    if (!options.yes && !Confirms("Delete run " + Clean(run) + " with its series, alerts and actions?")) continue;
    v1::DeleteRunRequest request;
    request.set_run(run);
    v1::DeleteRunResponse response;
    grpc::ClientContext context;
    connection->Prepare(&context);
    const grpc::Status status = connection->stub().DeleteRun(&context, request, &response);
    if (status.ok()) {
      Complain("deleted run " + Clean(response.name()));
    } else {
      code = Report(connection.get(), status);  // The others are deleted all the same.
    }
  }
  return code;
}

}  // namespace

void AddRunChanges(Cli* cli, CLI::App* noun) {
  CLI::App* command = nullptr;
  const char* const which = "the run's name, or its uuid in hexadecimal";

  auto* const rename =
      AddCommand<RenameOptions>(cli, noun, "rename", "Gives a run another name, which it keeps when it is resumed",
                                "bellwether run rename train-20261125-210719-6635 baseline", &Rename, &command);
  command->add_option("run", rename->run, which)->required()->type_name("RUN");
  command->add_option("name", rename->name, "the new name, which no other run has")->required()->type_name("NAME");

  auto* const removed =
      AddCommand<DeleteOptions>(cli, noun, "delete", "Deletes runs that have ended, with all that is kept of them",
                                "bellwether run delete old-run --yes", &Delete, &command);
  command->add_option("run", removed->runs, "their names or uuids")->required()->type_name("RUN");
  command->add_flag("--yes,-y", removed->yes, "do not ask");
}

}  // namespace bellwether::cli
