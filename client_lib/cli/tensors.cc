// tensor top.
#include <string>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

struct TopOptions {
  std::string run, signal = "law_z";
  uint32_t limit = 10;
  int64_t step = -1;
};

ExitCode Top(Cli* cli, const TopOptions& options) {
  v1::TopHeadsRequest request;
  request.set_run(options.run);
  request.set_signal(options.signal);
  request.set_limit(options.limit);
  request.set_step(options.step);
  return CallAndPrint<v1::TopHeadsRequest, v1::TopHeadsResponse>(
      cli, &v1::Query::Stub::TopHeads, request, [cli](const v1::TopHeadsResponse& response) {
        Table table{.columns = {"NAME", SignalText(response.signal()), "MEDIAN", "PEER SCORE", "STEP"}};
        for (const v1::TopHead& row : response.heads()) {
          if (row.name().empty()) {
            Complain("signal \"" + response.signal() + "\": must be of tensors or modules; `head top` shows heads");
            return kUsage;
          }
          table.rows.push_back({row.name(), Number(row.value()), Number(row.median()), Number(row.peer_score(), 3),
                                Integer(row.step())});
        }
        Print(cli->output, table, response);
        if (response.heads_size() == 0) Complain("no sample of " + response.signal() + " at or before that step");
        return kOk;
      });
}

}  // namespace

void AddTensors(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "tensor", "Named tensors and modules, and the laws asked of them");
  CLI::App* command = nullptr;
  auto* const top = AddCommand<TopOptions>(cli, noun, "top", "Lists the tensors with the worst values of a signal",
                                           "bellwether tensor top my-run --signal law_z --limit 5", &Top, &command);
  command->add_option("run", top->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("--signal", top->signal, "a signal of tensors or modules")
      ->capture_default_str()
      ->type_name("SIGNAL");
  command->add_option("--limit", top->limit, "at most so many, 1..1024")->capture_default_str();
  command->add_option("--step", top->step, "the newest values at or before it; else the newest")
      ->check(CLI::NonNegativeNumber);
  AddWatch(cli, command);
}

}  // namespace bellwether::cli
